"""The parser: text to AST, or to all syntax errors of the text."""

from collections.abc import Sequence

from lark import Token, Tree

from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.syntax import ast
from peftc.syntax.build import Builder, deeper_than, span, trees
from peftc.syntax.error_rules import error_context, syntax_error
from peftc.syntax.lexer import CommentCursor, lark_parser, repair_tokens, span_of, tokenize
from peftc.syntax.recovery import accepted_terminals, feed, resume

MAX_ERRORS = 20
_MAX_RESUMPTIONS = 2 * MAX_ERRORS  # the time of each grows with the rest of the text
_QUIET_TOKENS = 3  # an error so close to the one before is likely its consequence
_MAX_BRACKETS = 40
_MAX_DEPTH = 150  # levels of the tree, so that code that walks it may recurse
_DEPTH = {"LPAR": 1, "LSQB": 1, "LBRACE": 1, "RPAR": -1, "RSQB": -1, "RBRACE": -1}


def parse_text(text: str, path: str = "<text>") -> ast.Spec:
    """Parses a spec, with spans and comments.

    Args:
        text: the content of a `.peft` file; any text is safe.
        path: the name of the text in messages.

    Raises:
        PeftcError: P0xx, all syntax errors of the text.
    """
    source = Source(path, text)
    tree, builder = _parse(source, "spec")
    spec = builder.spec(tree)
    _raise(builder.errors, source)
    return spec


def parse_expression(text: str, path: str = "<expression>") -> ast.Expr:
    """Parses one expression, as in `--set s=scalar(init=4)`. Raises: PeftcError P0xx."""
    source = Source(path, text)
    tree, builder = _parse(source, "expression")
    value = builder.expression(trees(tree)[0])
    _raise(builder.errors, source)
    return value


def _raise(errors: Sequence[Diagnostic], source: Source) -> None:
    if errors:
        ordered = sorted(errors, key=lambda error: error.span.start if error.span else 0)
        raise PeftcError(error.with_source(source) for error in ordered[:MAX_ERRORS])


def _parse(source: Source, start: str) -> tuple[Tree[Token], Builder]:
    stream = tokenize(source.text)
    tokens, errors = repair_tokens(stream.tokens)
    if bracket := _excess_bracket(tokens):
        _raise([*errors, _too_deep(span_of(bracket))], source)
    tree = _parse_tokens(tokens, errors, start)
    _raise(errors, source)
    deep = deeper_than(tree, _MAX_DEPTH)
    _raise([_too_deep(span(deep))] if deep is not None else [], source)
    return tree, Builder(source, CommentCursor(stream))


def _parse_tokens(tokens: Sequence[Token], errors: list[Diagnostic], start: str) -> Tree[Token]:
    """The parse tree, which is complete if `errors` stays empty."""
    parser = lark_parser().parse_interactive(start=start)
    lexical_errors = [error.span.start for error in errors if error.span]
    at = quiet_until = resumptions = 0
    while at < len(tokens):
        state = parser.parser_state
        stacks = state.state_stack[:], state.value_stack[:]
        if feed(parser, tokens[at]):
            at += 1
            continue
        state.state_stack, state.value_stack = stacks  # the parser may have reduced before it rejected the token
        accepts = accepted_terminals(parser)
        # A token that was repaired or removed, here or directly before, may be the cause.
        window = range((tokens[at - 2].start_pos or 0) if at > 1 else 0, (tokens[at].end_pos or 0) + 1)
        if at >= quiet_until and not any(start in window for start in lexical_errors):
            context = error_context(tokens, at, accepts, state.value_stack)
            error, token = syntax_error(context)
            is_inserted = not token and token is not context.token  # by recovery
            # Only the first error may be the end of the text: a later one follows from the others.
            is_consequence = token is context.token and context.type == "$END" and errors
            errors += [] if is_consequence or is_inserted else [error]
        quiet_until = at + _QUIET_TOKENS
        resumptions += 1
        give_up = len(errors) >= MAX_ERRORS or resumptions >= _MAX_RESUMPTIONS
        resumption = None if give_up else resume(parser, tokens, at, accepts)
        if resumption is None:
            break
        parser, at = resumption
    return parser.parser_state.value_stack[-1] if not errors else Tree("spec", [])


def _excess_bracket(tokens: Sequence[Token]) -> Token | None:
    """The first bracket or sign that is nested too deeply: parsing time grows with depth."""
    depth = signs = 0
    for token in tokens:
        depth += _DEPTH.get(token.type, 0)
        signs = signs + 1 if token.type == "MINUS" else 0
        if max(depth, signs) > _MAX_BRACKETS:
            return token
    return None


def _too_deep(at: Span) -> Diagnostic:
    return Diagnostic("P018", "nested too deeply", at, help="bind a part of it by `let`")
