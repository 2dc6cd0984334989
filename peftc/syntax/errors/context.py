"""Where a syntax error is: the unexpected token, what may stand there, and what is open."""

from collections.abc import Sequence
from dataclasses import dataclass

from peftc.diagnostics import Diagnostic, Fix, Replacement
from peftc.syntax.lexer import CLOSING, NEED_VERSION_2, Token, excerpt, keywords, spelling

BRACES = "BRACES"  # the type of a `{` between the steps of a path
ASSIGNMENTS = frozenset({"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"})
_STATEMENTS = frozenset({"PEFT", "FORM", "METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET", "MOVED"})
_QUOTED_NEVER = frozenset({"STRING", "LBRACE", "RBRACE", "$END"})


Error = tuple[Diagnostic, Token]  # and the token that it underlines


@dataclass(frozen=True)
class ErrorContext:
    """`tokens[at]` is unexpected: the parser accepts only the terminals in `accepts`."""

    tokens: Sequence[Token]
    at: int
    accepts: frozenset[str]
    statement: str  # its keyword's terminal, "EQUATION" in an equation, "" between statements
    open_brackets: tuple[Token, ...]  # innermost last
    block: Token | None  # the `edit` or `method` keyword that the innermost brace belongs to

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
    def branch(self) -> Token | None:
        """The `if` at the start of a line of a form, before the condition that ends here."""
        if self.block is None or self.block.type != "FORM" or self.bracket != "LBRACE":
            return None
        line = [token for token in self.tokens[: self.at + 1] if token.span.line == self.token.span.line]
        is_first = line[0].type == "IF"
        return line[0] if is_first and (self.type == "LBRACE" or line[0] is self.token) else None

    def with_previous(self) -> Token:
        """The token with the one before: `...` of `..` and `.`."""
        before = self.tokens[self.at - 1]
        return self.token._replace(text=f"{before}{self.token}", span=before.span.until(self.token.span))

    def with_next(self) -> Token:
        """The token with the one behind: `//` of `/` and `/`."""
        return self.token._replace(text=f"{self.token}{self.next}", span=self.token.span.until(self.next.span))

    @property
    def is_list_of_names(self) -> bool:
        """Whether a name and a separator or a bracket follow: `{q, v}`."""
        types = [token.type for token in self.tokens[self.at + 1 : self.at + 3]]
        return types[:1] == ["NAME"] and types[1:] in (["COMMA"], ["BAR"], ["RBRACE"])

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
        self,
        code: str,
        message: str,
        help_: str | None = None,
        label: str = "",
        at: Token | None = None,
        correction: Fix | None = None,
    ) -> tuple[Diagnostic, Token]:
        """A diagnostic that underlines `at`, or the unexpected token; and that token."""
        token = self.token if at is None else at
        return Diagnostic(code, message, token.span, help=help_, label=label, correction=correction), token

    def quotes(self, before: str) -> Fix | None:
        """Puts the words around the token in quotes, if `before` and a space stand in front."""
        first = last = self.at
        if self.type == "$END":
            return None
        while first and self.tokens[first - 1].span.end == self.tokens[first].span.start:
            first -= 1
        while self.tokens[last + 1].type != "$END" and self.tokens[last].span.end == self.tokens[last + 1].span.start:
            last += 1
        words = self.tokens[first : last + 1]
        if not first or self.tokens[first - 1].type != before or any(word.type in _QUOTED_NEVER for word in words):
            return None
        text = "".join(str(word) for word in words)
        return Fix((Replacement(words[0].span.until(words[-1].span), f'"{text}"'),))


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
            block = item if item.type in {"EDIT", "METHOD", "FORM"} else block
        elif item.type == "LBRACE" and isinstance(previous, Token) and previous.type == "DOT":
            brackets.append((item._replace(type=BRACES), statement, block))
        elif item.type in CLOSING:
            brackets.append((item, statement, block))
            statement = "" if item.type == "LBRACE" else statement
        elif item.type in CLOSING.values():
            bracket, outer, _ = brackets.pop()
            statement = "" if bracket.type == "LBRACE" else outer
        elif item.type in ASSIGNMENTS and isinstance(previous, Token):  # `let` and `train` have a tree before their `=`
            statement = "EQUATION" if not brackets or brackets[-1][0].type == "LBRACE" else statement
        previous = item
    blocks = [block for bracket, _, block in brackets if bracket.type == "LBRACE"]
    open_brackets = tuple(bracket for bracket, _, _ in brackets)
    return ErrorContext(tokens, at, accepts, statement, open_brackets, blocks[-1] if blocks else None)


def needs_version_2(c: ErrorContext) -> Error:
    version = Fix((Replacement(c.tokens[1].span, "2"),)) if c.tokens[0].type == "PEFT" else None
    message = f"{c.unexpected} belongs to version 2 of the language"
    return c.error("P028", message, NEED_VERSION_2, correction=version)
