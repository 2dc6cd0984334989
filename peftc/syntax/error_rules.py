"""Messages for syntax errors: rules in order, of which the first that applies decides.

tests/syntax/malformed.py has examples of each. A comment shows one where the rule does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from peftc.diagnostics import Diagnostic, Fix, Replacement, Suggestion
from peftc.diagnostics.suggestions import instead_of, nearest
from peftc.syntax.lexer import NEED_VERSION_2, Token, excerpt, keywords, spelling

CLOSING = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}
ASSIGNMENTS = frozenset({"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"})
_STATEMENTS = frozenset({"PEFT", "FORM", "METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET"})
_OPEN = {"LBRACE": "`{`", "LPAR": "`(`", "LSQB": "`[`"}
_CLOSE = frozenset(CLOSING.values())
_TOP_LEVEL = ("form", "method", "use", "apply", "edit", "train", "expect", "let")
_QUOTED_NEVER = frozenset({"STRING", "LBRACE", "RBRACE", "$END"})
_NAMED = frozenset({"EDIT", "TRAIN", "FORM", "METHOD", "LET", "USE", "APPLY", "AS", "DOT"})  # what precedes a name


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
        elif item.type in CLOSING:
            brackets.append((item, statement, block))
            statement = "" if item.type == "LBRACE" else statement
        elif item.type in CLOSING.values():
            _, outer, _ = brackets.pop()
            statement = "" if item.type == "RBRACE" else outer
        elif item.type in ASSIGNMENTS and isinstance(previous, Token):  # `let` and `train` have a tree before their `=`
            statement = "EQUATION" if not brackets or brackets[-1][0].type == "LBRACE" else statement
        previous = item
    blocks = [block for bracket, _, block in brackets if bracket.type == "LBRACE"]
    open_brackets = tuple(bracket for bracket, _, _ in brackets)
    return ErrorContext(tokens, at, accepts, statement, open_brackets, blocks[-1] if blocks else None)


Error = tuple[Diagnostic, Token]  # and the token that it underlines


def syntax_error(c: ErrorContext) -> Error:
    """The diagnostic of the unexpected token, and the token that it underlines."""
    rules = (_header, _brackets, _edit_head, _selector, _train_use_method, _expect, _assignment, _statement)
    message = c.expectation() if len(c.accepts) <= 4 else f"unexpected {c.unexpected} after {c.preceding}"
    return next((error for rule in rules if (error := rule(c))), c.error("P023", message))


def _header(c: ErrorContext) -> Error | None:
    if c.at == 0 and c.allows("PEFT"):
        label = "a spec begins with its language version"
        return c.error("P001", c.expectation("`peft 1`"), "write `peft 1` on the first line", label)
    expectation = c.expectation("the language version after `peft`")
    return c.error("P002", expectation, "this is language version 1: `peft 1`") if c.previous_type == "PEFT" else None


def _brackets(c: ErrorContext) -> Error | None:
    if c.open_brackets and _is_unclosed(c):
        line = "" if c.type == "$END" else f" in line {c.token.span.line}"
        help_ = f"close it before {c.unexpected}{line}"
        if line and c.bracket == "LBRACE":
            help_ += "; an edit contains equations and `let`, no other statement"
        return c.error("P006", f"this {_OPEN[c.bracket]} is never closed", help_, "opened here", c.open_brackets[-1])
    if c.type in _CLOSE and not c.open_brackets:
        return c.error("P007", f"unmatched {c.unexpected}", "remove it")
    if c.type in _CLOSE and CLOSING[c.bracket] != c.type:
        return c.error("P007", f"unmatched {c.unexpected}: {_OPEN[c.bracket]} is open")
    return None


def _is_unclosed(c: ErrorContext) -> bool:
    """Whether the token cannot stand inside of the innermost bracket."""
    if c.type == "$END" or (c.bracket == "LSQB" and c.allows("RSQB") and c.type in {"DOT", "AT"}):
        return True
    if c.bracket in {"LPAR", "LSQB"}:
        return c.type in {"LBRACE", "RBRACE"} or c.starts_statement
    in_edit = c.block is not None and c.block.type == "EDIT"
    return in_edit and c.allows("RBRACE") and c.starts_statement and c.type != "PEFT"


def _edit_head(c: ErrorContext) -> Error | None:
    """What stands before the selector: a name and `at`."""
    if c.allows_only("NAME") and c.previous_type in _NAMED:
        help_ = "e.g. `edit ffn at layer[*].ffn { … }`" if c.statement == "EDIT" else None
        if c.is_keyword and c.next.type != "NAME":
            help_ = f"`{c.token}` is a keyword; use another name, e.g. `{c.token}_1`"
        return c.error("P011", c.expectation(f"a name after {c.preceding}"), help_)
    if c.allows("AT") and c.statement in {"EDIT", "TRAIN"} and c.type not in _CLOSE:
        is_missing = c.type in {"LBRACE", "$END"} or c.starts_statement
        help_ = "e.g. `at layer[*].ffn`" if is_missing else "write `at` before the selector"
        label = "the selector is missing" if c.type == "LBRACE" else "`at` is missing"
        return c.error("P009", c.expectation("`at` and a selector"), help_, label)
    return None


def _selector(c: ErrorContext) -> Error | None:
    """A selector, its indices, and the brace behind it."""
    is_joined = c.bracket != "LPAR" and c.allows("DOT", "BAR")
    if is_joined and c.type == "NAME" and c.previous_type == "RSQB":  # layer[*]ffn
        return c.error("P016", f"expected `.` before {c.unexpected}")
    if c.allows("BAR", "MINUS") and c.type in {"COMMA", "PLUS"}:
        return c.error("P016", f"{c.unexpected} does not join selectors", "`a | b` is both, `a - b` is `a` without `b`")
    if c.allows("LBRACE") and c.statement in {"EDIT", "METHOD"} and c.bracket in {"", "LBRACE"}:
        return c.error("P010", c.expectation("`{`"), label=f"the body of the {c.statement.lower()} stands in braces")
    if c.allows("DOUBLE_STAR") and (c.allows("STRING") or c.previous_type == "DOT"):  # at { … }; layer.*
        help_ = f"`{c.token}` is a keyword" if c.is_keyword and c.next.type != "NAME" else None
        if c.type == "STAR":
            help_ = "`**` is every module below; a pattern on module names stands in quotes"
        wanted = "a selector" if c.allows("STRING") else "a site"
        correction = c.quotes("AT") if c.type == "STAR" else None
        return c.error("P016", c.expectation(f"{wanted} after {c.preceding}"), help_, correction=correction)
    if c.bracket == "LSQB" and c.statement in {"EDIT", "TRAIN", "APPLY"}:
        after_index = c.allows("RSQB") and c.previous_type in {"STAR", "NUMBER"}
        if after_index or c.allows("DOT_DOT") or c.previous_type in {"MINUS", "DOT_DOT"}:
            help_ = "an index is `3`, `-1`, `*` or a range with both ends included: `0..5`, `6..`, `..5`"
            return c.error("P017", c.expectation("an index" if c.allows("STAR") else c.expected), help_)
    return None


def _train_use_method(c: ErrorContext) -> Error | None:
    in_list = any(c.allows_only(*terminals) for terminals in (("LSQB",), ("NAME",), ("COMMA", "RSQB")))
    if c.statement == "TRAIN" and (in_list or c.allows("EQUAL")):
        help_ = "`train NAME = [w, b] at SELECTOR` names the parameters of the base to train"
        return c.error("P021", c.expectation(), help_)
    if c.statement == "USE":
        in_use = c.allows("FROM") or c.previous_type == "FROM"
        help_ = '`use NAME from std`, or from a file: `use NAME from "file.peft"`'
        wanted = c.expectation(c.expected if in_use else "a statement")
        return c.error("P022", wanted, help_, correction=c.quotes("FROM"))
    if c.statement == "METHOD" and c.bracket == "LPAR" and c.allows_only("EQUAL"):
        help_ = f"give it a default, e.g. `{c.previous} = 8`: every method can be planned without arguments"
        if c.type in {"COMMA", "RPAR"}:
            return c.error("P019", f"the parameter {c.preceding} has no default", help_, at=c.previous)
        return c.error("P019", c.expectation(f"`=` after {c.preceding}"), help_)
    return None


def _expect(c: ErrorContext) -> Error | None:
    if c.statement != "EXPECT" or c.type not in {"EQUAL", "COMPARISON"}:
        return None
    if c.type == "EQUAL":
        return c.error("P025", f"{c.unexpected} is not a comparison", Suggestion("write `==`", "=", "=="))
    if c.operand_missing:
        return c.error("P025", f"expected a fact before {c.unexpected}")
    return c.error("P025", "comparisons cannot be chained", "write one `expect` for each comparison")


def _assignment(c: ErrorContext) -> Error | None:
    if c.allows_only("EQUAL") or c.allows_only("DOT", "EQUAL"):  # let r += 4
        help_ = "`let NAME = …` binds once" if c.type in {"PLUS_EQUAL", "STAR_EQUAL"} else None
        return c.error("P012", c.expectation(f"`=` after {c.preceding}"), help_)
    if not c.allows_only(*ASSIGNMENTS):
        return None
    state = c.previous
    if nearest(str(state), ("let",)) == "let":  # lett g = …
        return c.error("P013", f"expected an equation, found {c.preceding}", instead_of(str(state), "let"), at=state)
    if c.type in {"MINUS", "SLASH"} and c.next.type == "EQUAL":  # h -= …
        alternative = f"{state} += -(…)" if c.type == "MINUS" else f"{state} *= 1 / (…)"
        help_ = f"there is no `{c.token}=`; write `{alternative}`"
    else:
        example = f"h += {state}(…)" if c.type == "LPAR" else f"{state} += …"
        help_ = f"an equation assigns a state: `{example}`"
    return c.error("P012", c.expectation(f"`=`, `+=` or `*=` after {c.preceding}"), help_)


def _statement(c: ErrorContext) -> Error | None:
    """Arguments, statements in the wrong place, misspelled statements, missing operands."""
    starts_operand = c.type in {"NAME", "NUMBER", "STRING", "TRUE", "FALSE", "LPAR"}
    if starts_operand and c.allows("COMMA") and c.bracket in {"LPAR", "LSQB"}:
        return c.error("P008", f"expected `,` before {c.unexpected}", "arguments are separated by commas")
    if c.allows("EDIT") and c.type == "NAME" and c.next.type in ASSIGNMENTS:  # h += … at the top of a file
        help_ = "move it into one: `edit NAME at SELECTOR { … }`; `let` binds a constant"
        return c.error("P014", f"the equation of {c.unexpected} stands outside an edit", help_)
    in_block = c.allows("EDIT") or c.allows("RBRACE")
    if c.type == "PEFT" and in_block:
        return c.error("P014", "`peft` stands only once, at the top of a file")
    if c.starts_statement and in_block:  # method m() { use mam from std }
        help_ = "move it out of the method, or add the missing `}` above"
        return c.error("P014", f"{c.unexpected} cannot stand in a method", help_)
    if c.allows("EDIT") and c.type == "NAME" and c.bracket in {"", "LBRACE"}:  # edti a at …
        words = [text for terminal, text in keywords().items() if terminal in c.accepts and text in _TOP_LEVEL]
        if keywords().get("FORM") == str(c.token):  # in version 1, where it is a name
            version = Fix((Replacement(c.tokens[1].span, "2"),)) if c.tokens[0].type == "PEFT" else None
            message = f"{c.unexpected} belongs to version 2 of the language"
            return c.error("P028", message, NEED_VERSION_2, correction=version)
        suggestion = nearest(str(c.token), words)
        help_ = instead_of(str(c.token), suggestion) if suggestion else f"statements begin with {', '.join(words)}"
        return c.error("P013", c.expectation("a statement"), help_)
    if c.operand_missing:
        wanted = "an argument" if c.allows("RPAR") else "an expression"
        help_ = f"`{c.token}` is a keyword" if c.is_keyword and not c.starts_statement else None
        return c.error("P015", c.expectation(f"{wanted} after {c.preceding}"), help_)
    return None
