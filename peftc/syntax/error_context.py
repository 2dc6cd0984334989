"""The parser's context at an unexpected token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lark import Token

from peftc.diagnostics import Diagnostic
from peftc.syntax.lexer import excerpt, keywords, span_of, spelling

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
        return "the end of the text" if self.type == "$END" else f"`{excerpt(str(self.token))}`"

    @property
    def preceding(self) -> str:
        return "the start" if self.previous is None else f"`{excerpt(str(self.previous))}`"

    @property
    def expected(self) -> str:
        """The accepted terminals as text."""
        names = sorted(spelling(terminal) for terminal in self.accepts)
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

    def expectation(self, wanted: str | None = None) -> str:
        return f"expected {wanted or self.expected}, found {self.unexpected}"

    def error(
        self, code: str, message: str, help_: str | None = None, label: str = "", at: Token | None = None
    ) -> tuple[Diagnostic, Token]:
        """A diagnostic that underlines `at`, or the unexpected token; and that token."""
        token = self.token if at is None else at
        return Diagnostic(code, message, span_of(token), help=help_, label=label), token


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
        elif item.type in ASSIGNMENTS and isinstance(previous, Token):  # `let` and `train` have a tree before their `=`
            in_block = not brackets or brackets[-1][0].type == "LBRACE"
            statement = "EQUATION" if in_block else statement
        previous = item
    blocks = [block for bracket, _, block in brackets if bracket.type == "LBRACE"]
    open_brackets = tuple(bracket for bracket, _, _ in brackets)
    return ErrorContext(tokens, at, accepts, statement, open_brackets, blocks[-1] if blocks else None)
