"""Where the parser stood when a token did not fit: what the rows of `mistakes` look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lark import Token

from peftc.syntax.tokens import keywords, spelling

CLOSING = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}
_STATEMENTS = frozenset({"PEFT", "METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET"})
_ASSIGNS = frozenset({"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"})


@dataclass(frozen=True)
class Situation:
    """`token` does not fit after `tokens[:at]`; the parser would take any of `accepts`.

    `statement` is the keyword (a terminal's name) of the statement that is being read, "EQUATION" in one, "" between
    statements; `open` are the brackets not closed yet, innermost last.
    """

    tokens: Sequence[Token]
    at: int
    accepts: frozenset[str]
    statement: str
    open: tuple[Token, ...]
    edit: Token | None  # the `edit` or `method` that the innermost brace belongs to

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
    def following(self) -> Token:
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    @property
    def after(self) -> str:
        """The type of the token before."""
        return self.previous.type if self.previous is not None else ""

    @property
    def inside(self) -> str:
        """The innermost open bracket."""
        return self.open[-1].type if self.open else ""

    @property
    def is_keyword(self) -> bool:
        return self.type in keywords()

    @property
    def starts_statement(self) -> bool:
        return self.type in _STATEMENTS

    @property
    def starts_operand(self) -> bool:
        return self.type in {"NAME", "NUMBER", "STRING", "TRUE", "FALSE", "LPAR"}

    def wants(self, *terminals: str) -> bool:
        """Whether the parser would take each of `terminals`."""
        return self.accepts.issuperset(terminals)

    def takes(self, *terminals: str) -> bool:
        """Whether the parser would take `terminals` and nothing else."""
        return self.accepts == frozenset(terminals)

    @property
    def found(self) -> str:
        return describe(self.token)

    @property
    def before(self) -> str:
        """The token before, as messages show it."""
        return describe(self.previous) if self.previous is not None else "the start"

    @property
    def expected(self) -> str:
        """The terminals that fit, where they are few enough to be read."""
        names = sorted(spelling(terminal) for terminal in self.accepts)
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def describe(token: Token) -> str:
    """A token as messages show it."""
    return "the end of the text" if token.type == "$END" else f"`{shown(str(token))}`"


def shown(text: str, limit: int = 30) -> str:
    """Text of the user made fit for a line of a message."""
    plain = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[: limit + 1])
    return plain if len(text) <= limit else plain[:limit] + "…"


def situation(tokens: Sequence[Token], at: int, accepts: frozenset[str], stack: Sequence[object]) -> Situation:
    """Reads statement and brackets off what the parser has not reduced yet: its `stack` of tokens and trees."""
    statement = ""
    brackets: list[tuple[Token, str, Token | None]] = []
    owner: Token | None = None
    before: object = None
    for item in stack:
        if not isinstance(item, Token):
            pass
        elif item.type in _STATEMENTS:
            statement = item.type
            owner = item if item.type in {"EDIT", "METHOD"} else owner
        elif item.type in CLOSING:
            brackets.append((item, statement, owner))
            statement = "" if item.type == "LBRACE" else statement
        elif item.type in CLOSING.values():
            _, outer, _ = brackets.pop()
            statement = "" if item.type == "RBRACE" else outer
        elif item.type in _ASSIGNS and isinstance(before, Token) and (not brackets or brackets[-1][0].type == "LBRACE"):
            statement = "EQUATION"  # `let` and `train` have a tree before their `=`
        before = item
    opened = tuple(token for token, _, _ in brackets)
    braces = [owner for token, _, owner in brackets if token.type == "LBRACE"]
    return Situation(tokens, at, accepts, statement, opened, braces[-1] if braces else None)
