"""Text to `Spec`, or to all the syntax errors in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lark import Token, Tree

from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.syntax import ast
from peftc.syntax.build import Builder
from peftc.syntax.comments import Comments
from peftc.syntax.lexical import lexical
from peftc.syntax.mistakes import explain
from peftc.syntax.nodes import deepest, span
from peftc.syntax.recovery import accepted, feeds, resume
from peftc.syntax.situation import situation
from peftc.syntax.tokens import Cut, cut, language, span_of

MOST_ERRORS = 20  # more of them in one text say nothing new
_MOST_RESUMPTIONS = 2 * MOST_ERRORS  # each looks at the rest of the text
_QUIET = 3  # an error less than this many tokens after another is taken for its consequence
_DEEPEST_BRACKETS = 40
_DEEPEST = 150  # levels of the tree, so that whatever walks over it may be recursive


def parse_text(text: str, path: str = "<text>") -> ast.Spec:
    """The spec that `text` is, with spans and comments.

    Args:
        text: a whole `.peft` file; any text is fine.
        path: the name that messages show it under.

    Raises:
        PeftcError: P0xx, every syntax error found.
    """
    source = Source(path, text)
    words = cut(text)
    tree = _tree(words, source, "spec")
    builder = Builder(source, Comments(words))
    spec = builder.spec(tree)
    _refuse(builder.errors, source)
    return spec


def parse_expression(text: str, path: str = "<expression>") -> ast.Expr:
    """One expression alone, as in `--set s=scalar(init=4)`. Raises: PeftcError as `parse_text`."""
    source = Source(path, text)
    words = cut(text)
    tree = _tree(words, source, "expression")
    builder = Builder(source, Comments(words))
    value = builder.expression(tree.children[0])
    _refuse(builder.errors, source)
    return value


def _refuse(errors: Sequence[Diagnostic], source: Source) -> None:
    if errors:
        ordered = sorted(errors, key=lambda error: error.span.start if error.span else 0)
        raise PeftcError(error.with_source(source) for error in ordered[:MOST_ERRORS])


def _tree(words: Cut, source: Source, start: str) -> Tree[Token]:
    tokens, errors = lexical(words.tokens)
    deep = _too_deep(tokens)
    if deep:
        _refuse([*errors, deep], source)
    tree = _read(tokens, errors, start)
    _refuse(errors, source)
    found = deepest(tree, _DEEPEST)
    _refuse([_nested(span(found))] if found is not None else [], source)
    return tree


def _read(tokens: Sequence[Token], errors: list[Diagnostic], start: str) -> Tree[Token]:
    """The tree of a text, which is worth something where `errors` is still empty."""
    parser = language().parse_interactive(start=start)
    lexical_errors = sorted(error.span.start for error in errors if error.span)
    at = quiet_until = resumptions = 0
    while at < len(tokens):
        state = parser.parser_state
        before = state.state_stack[:], state.value_stack[:]
        if feeds(parser, tokens[at]):
            at += 1
            continue
        state.state_stack, state.value_stack = before  # it may have reduced before it saw that the token does not fit
        accepts = accepted(parser)
        if at >= quiet_until and not _near(tokens, at, lexical_errors):
            errors += diagnosed(tokens, at, accepts, state.value_stack, first=not errors)
        quiet_until = at + _QUIET
        resumptions += 1
        enough = len(errors) >= MOST_ERRORS or resumptions >= _MOST_RESUMPTIONS
        resumed = None if enough else resume(parser, tokens, at, accepts)
        if resumed is None:
            break
        parser, at = resumed.parser, resumed.at
    return parser.parser_state.value_stack[-1] if not errors else Tree("spec", [])


def diagnosed(
    tokens: Sequence[Token], at: int, accepts: frozenset[str], stack: Sequence[object], first: bool
) -> list[Diagnostic]:
    """What is said of `tokens[at]`, where one of `accepts` was expected; nothing where a repair is the cause.

    Only the `first` error may be that the text ends: later, something else was not understood.
    """
    seen = situation(tokens, at, accepts, stack)
    row, message = explain(seen)
    token = row.span(seen)
    if (seen.type == "$END" and not first and token is seen.token) or not (token or token is seen.token):
        return []
    return [Diagnostic(row.code, message, span_of(token), label=row.label(seen), help=row.help(seen))]


def _near(tokens: Sequence[Token], at: int, lexical_errors: Sequence[int]) -> bool:
    """Whether a word beside `tokens[at]` was wrong in itself, or something between them was left out."""
    low = (tokens[at - 2].start_pos or 0) if at > 1 else 0
    first = bisect_left(lexical_errors, low)
    return first < len(lexical_errors) and lexical_errors[first] <= (tokens[at].end_pos or 0)


def _too_deep(tokens: Sequence[Token]) -> Diagnostic | None:
    """Nothing sensible nests its brackets deeper, or negates more often, and the parser's time grows with them."""
    depth = signs = 0
    for token in tokens:
        depth += {"LPAR": 1, "LSQB": 1, "LBRACE": 1, "RPAR": -1, "RSQB": -1, "RBRACE": -1}.get(token.type, 0)
        signs = signs + 1 if token.type == "MINUS" else 0
        if max(depth, signs) > _DEEPEST_BRACKETS:
            return _nested(span_of(token))
    return None


def _nested(at: Span) -> Diagnostic:
    return Diagnostic("P018", "nested too deeply", at, help="bind a part of it by `let`")
