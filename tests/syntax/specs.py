"""Hypothesis strategies for random specs, one for each AST node."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from peftc.syntax import ast

KEYWORDS = {
    "peft",
    "method",
    "use",
    "from",
    "apply",
    "at",
    "as",
    "edit",
    "per",
    "train",
    "expect",
    "let",
    "form",
    "require",
    "param",
    "fixed",
    "save",
    "moved",
    "common",
    "in",
    "if",
    "true",
    "false",
}

words = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,6}", fullmatch=True).filter(lambda word: word not in KEYWORDS)
dotted = st.lists(words, min_size=1, max_size=3).map(".".join)
texts = st.text(
    st.characters(codec="ascii", exclude_characters='"\r\n', exclude_categories=("Cc",)), min_size=1, max_size=8
)
patterns = texts.filter(lambda text: text.strip() != "")

numbers = st.builds(
    ast.Number,
    st.integers(0, 10**12) | st.floats(0, 1e300, allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "%", "K", "M", "B"]),
)
leaves = numbers | st.builds(ast.Boolean, st.booleans()) | st.builds(ast.Name, dotted) | st.builds(ast.String, texts)


def _larger(inner: st.SearchStrategy[ast.Expr]) -> st.SearchStrategy[ast.Expr]:
    keywords = st.lists(st.builds(ast.Keyword, words, inner), max_size=2).map(tuple)
    calls = st.builds(ast.Call, dotted, st.lists(inner, max_size=2).map(tuple), keywords)
    return calls | st.builds(ast.Negative, inner) | st.builds(ast.Binary, st.sampled_from("+-*/"), inner, inner)


def _of_version_2(inner: st.SearchStrategy[ast.Expr]) -> st.SearchStrategy[ast.Expr]:
    several = st.lists(inner, min_size=1, max_size=3).map(tuple)
    lists = st.builds(ast.List, st.lists(inner, max_size=3).map(tuple)) | st.builds(ast.Pair, inner, inner)
    items = st.builds(ast.Item, inner, several)
    attributes = st.builds(ast.Attribute, inner.filter(lambda value: not isinstance(value, ast.Attribute)), words)
    bindings = st.tuples(st.builds(ast.Binding, words, inner), inner)
    sums = st.builds(ast.Call, dotted, bindings)
    return _larger(inner) | st.builds(ast.Binary, st.just("@"), inner, inner) | lists | items | attributes | sums


expressions = st.recursive(leaves, _larger, max_leaves=8)
expressions_2 = st.recursive(leaves, _of_version_2, max_leaves=8)


@st.composite
def _indices(draw: st.DrawFn) -> ast.Index:
    start, stop = draw(st.none() | st.integers(-99, 99)), draw(st.none() | st.integers(-99, 99))
    if start is not None and stop is not None and (start < 0) == (stop < 0):
        start, stop = sorted((start, stop))
    return ast.Index(start, stop)


steps = st.builds(ast.Step, words, st.none() | st.lists(_indices(), min_size=1, max_size=3).map(tuple)) | st.just(
    ast.Step("**")
)
chosen_stacks = st.sampled_from(
    [
        ast.Path((ast.Step("input"), ast.Step("embed"))),
        ast.Path((ast.Step("output"), ast.Step("layer", (ast.Index(None, None),)), ast.Step("ffn"))),
    ]
)
plain_paths = st.builds(ast.Path, st.lists(steps, min_size=1, max_size=4).map(tuple))
paths = plain_paths | plain_paths.map(lambda path: replace(path, optional=True))


@st.composite
def braced_paths(draw: st.DrawFn, inner: st.SearchStrategy[ast.Path | ast.BracedPath]) -> ast.BracedPath:
    """A path with braces in it, behind its first step."""
    braces = st.builds(ast.Braces, st.lists(inner, min_size=2, max_size=2).map(tuple))
    first, some, last = draw(steps), draw(braces), draw(st.lists(steps | braces, max_size=1))
    return ast.BracedPath((first, some, *last), draw(st.booleans()))


places = st.recursive(paths, braced_paths, max_leaves=4) | st.builds(ast.Glob, patterns, st.booleans()) | chosen_stacks


def _joined(inner: st.SearchStrategy[ast.Selector]) -> st.SearchStrategy[ast.Selector]:
    return st.builds(ast.Union, st.lists(inner, min_size=2, max_size=3).map(tuple)) | st.builds(
        ast.Difference, inner, inner
    )


selectors = st.recursive(places, _joined, max_leaves=5)

comments = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12).map(
    lambda text: f"#{text}".rstrip()
)
above = st.lists(comments, max_size=2).map(tuple)
trailing_comment = st.none() | comments
comment_fields = {"leading": above, "trailing": trailing_comment}

lets = st.builds(ast.Let, dotted, expressions, **comment_fields)
equations = st.builds(ast.Equation, words, st.sampled_from(["=", "+=", "*="]), expressions, **comment_fields)
bodies = st.lists(equations | lets, max_size=3).map(tuple)
edits = st.builds(ast.Edit, dotted, selectors, bodies, st.booleans(), closing=above, **comment_fields)
trains = st.builds(ast.Train, dotted, st.lists(words, min_size=1, max_size=3).map(tuple), selectors, **comment_fields)
uses = st.builds(ast.Use, words, st.none() | texts, **comment_fields)
arguments = st.lists(st.builds(ast.Keyword, words, expressions), max_size=2).map(tuple)
applies = st.builds(ast.Apply, words, arguments, st.none() | selectors, st.none() | dotted, **comment_fields)


@st.composite
def expects(draw: st.DrawFn) -> ast.Expect:
    op = draw(st.sampled_from([None, "==", "!=", "<", "<=", ">", ">="]))
    right = None if op is None else draw(expressions)
    return ast.Expect(draw(expressions), op, right, leading=draw(above), trailing=draw(trailing_comment))


groups = st.builds(ast.SiteGroup, dotted, selectors, **comment_fields)
members = edits | trains | applies | lets | groups | expects()
params = st.lists(st.builds(ast.Param, words, expressions, leading=above, trailing=trailing_comment), max_size=3).map(
    tuple
)
methods = st.builds(
    ast.Method, words, params, st.lists(members, max_size=3).map(tuple), closing=above, **comment_fields
)
comparisons = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
conditions = (
    st.none()
    | st.builds(ast.Condition, expressions_2)
    | st.builds(ast.Condition, expressions_2, comparisons, expressions_2)
)
requires = st.builds(ast.Require, expressions_2, comparisons, expressions_2, conditions, **comment_fields)
parts = st.builds(ast.Let, words, expressions_2, conditions, **comment_fields)
parameters = st.builds(
    ast.Parameter,
    words,
    st.lists(expressions_2, max_size=3).map(tuple),
    expressions_2,
    st.booleans(),
    st.sampled_from(["", "site", "group", "edit"]),
    st.booleans(),
    conditions,
    **comment_fields,
)
saves = st.builds(
    ast.Save,
    st.builds(
        ast.Call,
        dotted,
        st.lists(expressions_2, max_size=2).map(tuple),
        st.lists(st.builds(ast.Keyword, words, expressions_2), max_size=2).map(tuple),
    ),
    conditions,
    **comment_fields,
)
definitions = st.builds(ast.Equation, words, st.just("="), expressions_2, conditions, **comment_fields)
form_params = st.builds(ast.FormParam, words, st.none() | expressions_2, leading=above, trailing=trailing_comment)
forms = st.builds(
    ast.Form,
    words,
    st.lists(form_params, max_size=3).map(tuple),
    st.lists(requires | parameters | definitions | parts | saves, max_size=4).map(tuple),
    closing=above,
    **comment_fields,
)
moves = st.builds(ast.Moved, dotted, dotted, **comment_fields) | dotted.flatmap(
    lambda name: st.builds(ast.Moved, st.just(name), st.just(name), plain_paths, plain_paths, **comment_fields)
)
specs_2 = st.builds(
    ast.Spec,
    st.just(2),
    st.lists(members | uses | methods | forms | moves, max_size=4).map(tuple),
    header=above,
    header_trailing=trailing_comment,
    closing=above,
)
specs = st.builds(
    ast.Spec,
    st.just(1),
    st.lists(members | uses | methods, max_size=4).map(tuple),
    header=above,
    header_trailing=trailing_comment,
    closing=above,
)
