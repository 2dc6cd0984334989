"""The parser's context at an unexpected token, and the rules that turn it into a diagnostic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lark import Token

from peftc.diagnostics import Diagnostic
from peftc.syntax.lexer import keywords, span_of, spelling

CLOSING = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}
ASSIGNMENTS = frozenset({"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"})
_STATEMENTS = frozenset({"PEFT", "METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET"})


@dataclass(frozen=True)
class ErrorContext:
    """`tokens[at]` is unexpected: the parser accepts only the terminals in `accepts`.

    Args:
        statement: the terminal of the current statement's keyword, "EQUATION" in an equation, ""
            between statements.
        open_brackets: the unclosed brackets, innermost last.
        block: the `edit` or `method` keyword that the innermost brace belongs to.
    """

    tokens: Sequence[Token]
    at: int
    accepts: frozenset[str]
    statement: str
    open_brackets: tuple[Token, ...]
    block: Token | None

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def type(self) -> str:
        return self.token.type

    @property
    def previous(self) -> Token | None:
        return self.tokens[self.at - 1] if self.at else None

    @property
    def previous_type(self) -> str:
        return self.previous.type if self.previous is not None else ""

    @property
    def next(self) -> Token:
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    @property
    def bracket(self) -> str:
        """The type of the innermost open bracket."""
        return self.open_brackets[-1].type if self.open_brackets else ""

    @property
    def is_keyword(self) -> bool:
        return self.type in keywords()

    @property
    def starts_statement(self) -> bool:
        return self.type in _STATEMENTS

    @property
    def starts_operand(self) -> bool:
        return self.type in {"NAME", "NUMBER", "STRING", "TRUE", "FALSE", "LPAR"}

    @property
    def operand_missing(self) -> bool:
        return self.allows("NUMBER", "MINUS", "LPAR") and not self.allows("PLUS")

    def allows(self, *terminals: str) -> bool:
        """Whether the parser accepts each of `terminals`."""
        return self.accepts.issuperset(terminals)

    def allows_only(self, *terminals: str) -> bool:
        return self.accepts == frozenset(terminals)

    @property
    def unexpected(self) -> str:
        return describe(self.token)

    @property
    def preceding(self) -> str:
        return describe(self.previous) if self.previous is not None else "the start"

    @property
    def expected(self) -> str:
        """The accepted terminals as text."""
        names = sorted(spelling(terminal) for terminal in self.accepts)
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Text = str | Callable[[ErrorContext], str | None]


@dataclass(frozen=True)
class ErrorRule:
    """A diagnostic for the contexts in which `when` is true."""

    code: str
    when: Callable[[ErrorContext], bool]
    examples: tuple[str, ...]
    message: Text = lambda c: f"expected {c.expected}, found {c.unexpected}"
    help: Text = lambda c: None
    label: Text = ""
    span: Callable[[ErrorContext], Token] = lambda c: c.token

    def diagnostic(self, context: ErrorContext) -> Diagnostic:
        texts = (self.message, self.help, self.label)
        message, help_, label = (text if isinstance(text, str) else text(context) for text in texts)
        return Diagnostic(self.code, message or "", span_of(self.span(context)), help=help_, label=label or "")


def describe(token: Token) -> str:
    """A token in a message."""
    return "the end of the text" if token.type == "$END" else f"`{excerpt(str(token))}`"


def excerpt(text: str, limit: int = 30) -> str:
    """At most `limit` characters of untrusted text, without line breaks and control characters."""
    safe = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[: limit + 1])
    return safe if len(text) <= limit else safe[:limit] + "…"


def _in_block(brackets: Sequence[tuple[Token, str, Token | None]]) -> bool:
    return not brackets or brackets[-1][0].type == "LBRACE"


def error_context(tokens: Sequence[Token], at: int, accepts: frozenset[str], stack: Sequence[object]) -> ErrorContext:
    """The context of `tokens[at]`; `stack` has the tokens and trees that are not reduced yet."""
    statement = ""
    brackets: list[tuple[Token, str, Token | None]] = []  # with the statement and the block around each
    block: Token | None = None
    previous: object = None
    for item in stack:
        if not isinstance(item, Token):
            pass
        elif item.type in _STATEMENTS:
            statement = item.type
            block = item if item.type in {"EDIT", "METHOD"} else block
        elif item.type in CLOSING:
            brackets.append((item, statement, block))
            statement = "" if item.type == "LBRACE" else statement
        elif item.type in CLOSING.values():
            _, outer, _ = brackets.pop()
            statement = "" if item.type == "RBRACE" else outer
        elif item.type in ASSIGNMENTS and isinstance(previous, Token) and _in_block(brackets):
            statement = "EQUATION"  # `let` and `train` have a tree before their `=`
        previous = item
    blocks = [block for bracket, _, block in brackets if bracket.type == "LBRACE"]
    open_brackets = tuple(bracket for bracket, _, _ in brackets)
    return ErrorContext(tokens, at, accepts, statement, open_brackets, blocks[-1] if blocks else None)
