"""The parser: text to AST, or to all syntax errors of the text.

A text is read by `Reducer`, which stops at the first error. Then `Automaton` reads it again, token
by token, and recovers from each error.
"""

from collections.abc import Sequence
from itertools import repeat

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.syntax import ast
from peftc.syntax.automaton import Automaton, Tree, deeper_than
from peftc.syntax.build import Builder
from peftc.syntax.errors.context import error_context
from peftc.syntax.errors.lexical import other_format, repair_tokens
from peftc.syntax.errors.recovery import accepted_terminals, resume, with_braces
from peftc.syntax.errors.rules import syntax_error
from peftc.syntax.lexer import Lexemes, Token
from peftc.syntax.reducer import Reducer, Value
from peftc.syntax.tables import END

MAX_ERRORS = 20
_MAX_RESUMPTIONS = 2 * MAX_ERRORS  # the time of each grows with the rest of the text
_QUIET_TOKENS = 3  # an error so close to the one before is likely its consequence
_MAX_BRACKETS = 40
_MAX_DEPTH = 150  # levels of the tree, so that code that walks it may recurse
_DEPTH = {"LPAR": 1, "LSQB": 1, "LBRACE": 1, "RPAR": -1, "RSQB": -1, "RBRACE": -1}

# Of `_may_be_deep`: three levels a bracket, one an operator, and eleven around and below them.
_OPERATOR, _BOUNDARY = 2, 0
_NESTING = {
    **dict.fromkeys(("LPAR", "LSQB"), 1),
    **dict.fromkeys(("RPAR", "RSQB"), -1),
    **dict.fromkeys(("PLUS", "MINUS", "STAR", "AT_SIGN", "SLASH", "BAR"), _OPERATOR),
    **dict.fromkeys(
        ("EQUAL", "PLUS_EQUAL", "STAR_EQUAL", "AT", "LBRACE", "RBRACE", "LET", "EXPECT", "MOVED"), _BOUNDARY
    ),
}
_FEW_BRACKETS, _FEW_OPERATORS = 30, 40
_LONG = 100_000  # characters
# What nests as "+", and the words at which no bracket of a text without errors is open as "\n".
_NESTING_MARKS = {
    **{terminal: "+" for terminal, kind in _NESTING.items() if kind > 0},
    **dict.fromkeys(("LBRACE", "RBRACE", "LET", "EXPECT", "MOVED"), "\n"),
}


def parse_text(text: str, path: str = "<text>") -> ast.Spec:
    """Parses a spec, with spans and comments.

    Args:
        text: the content of a `.peft` file; any text is safe.
        path: the name of the text in messages.

    Raises:
        PeftcError: P0xx, all syntax errors of the text.
    """
    source = Source(path, text)
    with paused_gc(promote=len(text) > _LONG):  # a tree has no cycles
        phrase, lexemes, errors = _parse(source, "spec")
        builder = Builder(source, lexemes)
        spec = builder.spec(phrase)
        _raise([*errors, *builder.errors], source)
    return spec


def parse_expression(text: str, path: str = "<expression>") -> ast.Expr:
    """Parses one expression, as in `--set s=scalar(init=4)`. Raises: PeftcError P0xx."""
    source = Source(path, text)
    value, _, errors = _parse(source, "expression")
    _raise(errors, source)
    return value


def _raise(errors: Sequence[Diagnostic], source: Source) -> None:
    if errors:
        ordered = sorted(errors, key=lambda error: error.span.start if error.span else 0)
        raise PeftcError(error.with_source(source) for error in ordered[:MAX_ERRORS])


def _parse(source: Source, start: str) -> tuple[Value, Lexemes, list[Diagnostic]]:
    """What the text means as a `start`, and the errors that the grammar cannot express."""
    lexemes = Lexemes(source.text)
    reducer = Reducer(lexemes)
    value = reducer.reduce(start)
    if value is None or _may_be_deep(lexemes.types):
        _check_syntax(lexemes, source, start)
    return value, lexemes, reducer.errors


def _check_syntax(lexemes: Lexemes, source: Source, start: str) -> None:
    """Raises: PeftcError P0xx, all syntax errors."""
    if (error := other_format(lexemes.tokens)) is not None:
        _raise([error], source)
    tokens, errors = repair_tokens(lexemes.tokens)
    if bracket := _excess_bracket(tokens):
        _raise([*errors, _too_deep(bracket.span)], source)
    tree = _parse_tokens(tokens, errors, start, lexemes.version)
    _raise(errors, source)
    deep = deeper_than(tree, _MAX_DEPTH)
    _raise([_too_deep(deep.span)] if deep is not None else [], source)


def _parse_tokens(tokens: Sequence[Token], errors: list[Diagnostic], start: str, version: str | None) -> Tree | Token:
    """The parse tree, which is complete if `errors` stays empty."""
    parser = Automaton.starting(start)
    lexical_errors = [error.span.start for error in errors if error.span]
    at = quiet_until = resumptions = 0
    in_form = is_unknown = False
    while at < len(tokens):
        if parser.feed(tokens[at]):
            at += 1
            continue
        accepts = accepted_terminals(parser, version)
        # A token that was repaired or removed, here or directly before, may be the cause.
        window = range(tokens[at - 2].span.start if at > 1 else 0, tokens[at].span.end + 1)
        if at >= quiet_until and not any(start in window for start in lexical_errors):
            context = error_context(tokens, at, accepts, parser.values)
            error, token = syntax_error(context)
            in_form = context.block is not None and context.block.type == "FORM"
            # A statement of another version, and one that is none, are skipped whole.
            is_unknown = error.code == "P028" or context.branch is not None
            is_inserted = not token.text and token is not context.token  # by recovery
            # Only the first error may be the end of the text: a later one follows from the others.
            is_consequence = token is context.token and context.type == END and errors
            if error.code == "P013":  # `def f():`
                errors[:] = [one for one in errors if not _is_behind(one, token)]
            errors += [] if is_consequence or is_inserted else [error]
            if error.code == "P010" and (braced := with_braces(tokens, at, accepts)) is not None:
                tokens = braced
                continue
        quiet_until = _next_line(tokens, at) if in_form else at + _QUIET_TOKENS  # a line of a form is a statement
        resumptions += 1
        give_up = len(errors) >= MAX_ERRORS or resumptions >= _MAX_RESUMPTIONS
        resumption = None if give_up else resume(parser, tokens, at, accepts, is_unknown)
        if resumption is None:
            break
        parser, at = resumption
    return parser.values[-1] if parser.values else tokens[-1]


def _is_behind(error: Diagnostic, token: Token) -> bool:
    """Whether an error is about a character of the same line, behind a word."""
    span = error.span
    return error.code == "P003" and span is not None and span.line == token.span.line and span.start > token.span.start


def _next_line(tokens: Sequence[Token], at: int) -> int:
    """The index of the first token behind the line of a token."""
    line = tokens[at].span.line
    return next((number for number in range(at + 1, len(tokens)) if tokens[number].span.line > line), len(tokens))


def _excess_bracket(tokens: Sequence[Token]) -> Token | None:
    """The first bracket or sign that is nested too deeply: parsing time grows with depth."""
    depth = signs = 0
    for token in tokens:
        depth += _DEPTH.get(token.type, 0)
        signs = signs + 1 if token.type == "MINUS" else 0
        if max(depth, signs) > _MAX_BRACKETS:
            return token
    return None


def _may_be_deep(terminals: Sequence[str]) -> bool:
    """Whether a text without errors can be too deep, judged by its brackets and operators alone."""
    marks = "".join([*map(_NESTING_MARKS.get, terminals, repeat(""))])
    if max(map(len, marks.split("\n"))) <= _FEW_BRACKETS:  # as in nearly all texts
        return False
    depth = operators = 0
    for terminal in terminals:
        kind = _NESTING.get(terminal)
        if kind is None:
            continue
        if kind == _OPERATOR:
            operators += 1
        elif kind == _BOUNDARY:
            operators = operators if depth else 0
        else:
            depth += kind
        if depth > _FEW_BRACKETS or operators > _FEW_OPERATORS:
            return True
    return False


def _too_deep(at: Span) -> Diagnostic:
    return Diagnostic("P018", "nested too deeply", at, help="bind a part of it by `let`")
