"""Messages for syntax errors: a table of rules, tried in order, each with malformed examples.

The examples are the tests: each text has one mistake and is reported once, by its rule.
"""

from __future__ import annotations

from peftc.diagnostics.suggestions import nearest
from peftc.syntax.error_context import ASSIGNMENTS, CLOSING, ErrorContext, ErrorRule
from peftc.syntax.lexer import keywords

_OPEN = {"LBRACE": "`{`", "LPAR": "`(`", "LSQB": "`[`"}
_CLOSE = frozenset(CLOSING.values())
_TOP_LEVEL = ("method", "use", "apply", "edit", "train", "expect", "let")
_NAMED = frozenset({"EDIT", "TRAIN", "METHOD", "LET", "USE", "APPLY", "AS", "DOT"})  # what precedes a name


def _statement_help(c: ErrorContext) -> str:
    words = [text for terminal, text in keywords().items() if terminal in c.accepts and text in _TOP_LEVEL]
    suggestion = nearest(str(c.token), words)
    return f"did you mean `{suggestion}`?" if suggestion else f"statements begin with {', '.join(words)}"


def _name_help(c: ErrorContext) -> str | None:
    if c.is_keyword and c.next.type != "NAME":
        return f"`{c.token}` is a keyword; use another name, e.g. `{c.token}_1`"
    return "e.g. `edit ffn at layer[*].ffn { … }`" if c.statement == "EDIT" else None


def _is_unclosed(c: ErrorContext) -> bool:
    """Whether the innermost bracket is open, and the token cannot stand inside of it."""
    if not c.open_brackets:
        return False
    if c.type == "$END" or (c.bracket == "LSQB" and c.allows("RSQB") and c.type in {"DOT", "AT"}):
        return True
    if c.bracket in {"LPAR", "LSQB"}:
        return c.type in {"LBRACE", "RBRACE"} or c.starts_statement
    in_edit = c.block is not None and c.block.type == "EDIT"
    return in_edit and c.allows("RBRACE") and c.starts_statement and c.type != "PEFT"


def _unclosed_help(c: ErrorContext) -> str:
    if c.type == "$END":
        return f"close it before {c.unexpected}"
    contents = "; an edit contains equations and `let`, no other statement" if c.bracket == "LBRACE" else ""
    return f"close it before {c.unexpected} in line {c.token.line}{contents}"


def _selector_help(c: ErrorContext) -> str | None:
    if c.type == "STAR":
        return "`**` is every module below; a pattern on module names stands in quotes"
    return f"`{c.token}` is a keyword" if c.is_keyword and c.next.type != "NAME" else None


def _is_index_error(c: ErrorContext) -> bool:
    if c.bracket != "LSQB" or c.statement not in {"EDIT", "TRAIN", "APPLY"}:
        return False
    after_index = c.allows("RSQB") and c.previous_type in {"STAR", "NUMBER"}
    return c.allows("DOT_DOT") or c.previous_type in {"MINUS", "DOT_DOT"} or after_index


def _is_train_error(c: ErrorContext) -> bool:
    expected = c.allows_only("LSQB") or c.allows_only("NAME") or c.allows_only("COMMA", "RSQB") or c.allows("EQUAL")
    return c.statement == "TRAIN" and expected


def _assignment_help(c: ErrorContext) -> str:
    state = c.previous
    if c.type in {"MINUS", "SLASH"} and c.next.type == "EQUAL":
        alternative = f"{state} += -(…)" if c.type == "MINUS" else f"{state} *= 1 / (…)"
        return f"there is no `{c.token}=`; write `{alternative}`"
    example = f"h += {state}(…)" if c.type == "LPAR" else f"{state} += …"
    return f"an equation assigns a state: `{example}`"


ERROR_RULES: tuple[ErrorRule, ...] = (
    ErrorRule(
        "P001",
        when=lambda c: c.at == 0 and c.allows("PEFT"),
        message=lambda c: f"expected `peft 1`, found {c.unexpected}",
        label="a spec begins with its language version",
        help="write `peft 1` on the first line",
        examples=("", "edit a at layer[*].ffn { h += vector() }", "# only a comment", "PEFT 1"),
    ),
    ErrorRule(
        "P002",
        when=lambda c: c.previous_type == "PEFT",
        message=lambda c: f"expected the language version after `peft`, found {c.unexpected}",
        help="this is language version 1: `peft 1`",
        examples=("peft", "peft one", "peft edit a at layer[*].ffn { h += vector() }"),
    ),
    ErrorRule(
        "P006",
        when=_is_unclosed,
        message=lambda c: f"this {_OPEN[c.bracket]} is never closed",
        span=lambda c: c.open_brackets[-1],
        label="opened here",
        help=_unclosed_help,
        examples=(
            "peft 1 edit a at layer[*].ffn { h += x",
            "peft 1 edit a at layer[*].ffn { h += adapter(x, r=4 }",
            "peft 1 edit a at layer[*.ffn { h += x }",
            "peft 1 edit a at layer[*].ffn { h += x   edit b at layer[*].attn { h += x }",
            "peft 1 method m(r = 4 { edit a at layer[*].ffn { h += x } }",
            "peft 1 method m(r = 4) { edit a at layer[*].ffn { h += x }",
            "peft 1 train a = [w, b at layer[*].norm",
        ),
    ),
    ErrorRule(
        "P007",
        when=lambda c: c.type in _CLOSE and (not c.open_brackets or CLOSING[c.bracket] != c.type),
        message=lambda c: f"unmatched {c.unexpected}" + (f": {_OPEN[c.bracket]} is open" if c.open_brackets else ""),
        help=lambda c: None if c.open_brackets else "remove it",
        examples=(
            "peft 1 edit a at layer[*].ffn { h += x } }",
            "peft 1 edit a at layer[*].ffn { h += adapter(x, r=4]) }",
            "peft 1 edit a at layer[*].ffn { h += (x)) }",
        ),
    ),
    ErrorRule(
        "P011",
        when=lambda c: c.allows_only("NAME") and c.previous_type in _NAMED,
        message=lambda c: f"expected a name after {c.preceding}, found {c.unexpected}",
        help=_name_help,
        examples=(
            "peft 1 edit at layer[*].ffn { h += x }",
            "peft 1 edit train at layer[*].ffn { h += x }",
            "peft 1 let = 4",
            "peft 1 train = [w] at layer[*].norm",
            "peft 1 apply mam() as 3",
            'peft 1 use "mam.peft" from std',
            "peft 1 method (r = 4) { edit a at layer[*].ffn { h += x } }",
        ),
    ),
    ErrorRule(
        "P009",
        when=lambda c: c.allows("AT") and c.statement in {"EDIT", "TRAIN"} and c.type not in _CLOSE,
        message=lambda c: f"expected `at` and a selector, found {c.unexpected}",
        label=lambda c: "the selector is missing" if c.type == "LBRACE" else "`at` is missing",
        help=lambda c: (
            "e.g. `at layer[*].ffn`"
            if c.type in {"LBRACE", "$END"} or c.starts_statement
            else "write `at` before the selector"
        ),
        examples=(
            "peft 1 edit a layer[*].ffn { h += x }",
            "peft 1 edit a on layer[*].ffn { h += x }",
            "peft 1 edit a { h += x }",
            "peft 1 train a = [w] layer[*].norm",
            "peft 1 train a = [w]",
            "peft 1 edit a = layer[*].ffn { h += x }",
        ),
    ),
    ErrorRule(
        "P016",
        when=lambda c: (
            c.bracket != "LPAR" and c.allows("DOT", "BAR") and c.type == "NAME" and c.previous_type == "RSQB"
        ),
        message=lambda c: f"expected `.` before {c.unexpected}",
        examples=("peft 1 edit a at layer[*]ffn { h += x }",),
    ),
    ErrorRule(
        "P016",
        when=lambda c: c.allows("BAR", "MINUS") and c.type in {"COMMA", "PLUS"},
        message=lambda c: f"{c.unexpected} does not join selectors",
        help="`a | b` is both, `a - b` is `a` without `b`",
        examples=(
            "peft 1 edit a at layer[*].ffn, layer[*].attn { h += x }",
            "peft 1 edit a at layer[*].ffn + layer[*].attn { h += x }",
        ),
    ),
    ErrorRule(
        "P010",
        when=lambda c: c.allows("LBRACE") and c.statement in {"EDIT", "METHOD"} and c.bracket in {"", "LBRACE"},
        message=lambda c: f"expected `{{`, found {c.unexpected}",
        label=lambda c: f"the body of the {c.statement.lower()} stands in braces",
        examples=(
            "peft 1 edit a at layer[*].ffn h += x",
            "peft 1 method m(r = 4) edit a at layer[*].ffn { h += x }",
            "peft 1 edit a at layer[*].ffn",
        ),
    ),
    ErrorRule(
        "P016",
        when=lambda c: c.allows("DOUBLE_STAR") and (c.allows("STRING") or c.previous_type == "DOT"),
        message=lambda c: (
            f"expected {'a selector' if c.allows('STRING') else 'a site'} after {c.preceding}, found {c.unexpected}"
        ),
        help=_selector_help,
        examples=(
            "peft 1 edit a at { h += x }",
            "peft 1 edit a at layer.* { h += x }",
            "peft 1 edit a at layer[*].ffn | { h += x }",
            "peft 1 train a = [w] at",
            "peft 1 edit a at 3 { h += x }",
        ),
    ),
    ErrorRule(
        "P017",
        when=_is_index_error,
        message=lambda c: f"expected {'an index' if c.allows('STAR') else c.expected}, found {c.unexpected}",
        help="an index is `3`, `-1`, `*` or a range with both ends included: `0..5`, `6..`, `..5`",
        examples=(
            "peft 1 edit a at layer[].ffn { h += x }",
            "peft 1 edit a at layer[1-3].ffn { h += x }",
            "peft 1 edit a at layer[i].ffn { h += x }",
            "peft 1 edit a at layer[0 5].ffn { h += x }",
            "peft 1 edit a at layer[0, ].ffn { h += x }",
        ),
    ),
    ErrorRule(
        "P021",
        when=_is_train_error,
        help="`train NAME = [w, b] at SELECTOR` names the parameters of the base to train",
        examples=(
            "peft 1 train a [w] at layer[*].norm",
            "peft 1 train a = w at layer[*].norm",
            "peft 1 train a = [] at layer[*].norm",
            "peft 1 train a += [w] at layer[*].norm",
            "peft 1 train a at layer[*].norm",
            "peft 1 train a = [w b] at layer[*].norm",
        ),
    ),
    ErrorRule(
        "P022",
        when=lambda c: c.statement == "USE",
        message=lambda c: (
            f"expected {c.expected if c.allows('FROM') or c.previous_type == 'FROM' else 'a statement'}, "
            f"found {c.unexpected}"
        ),
        help='`use NAME from std`, or from a file: `use NAME from "file.peft"`',
        examples=("peft 1 use mam", "peft 1 use mam form std", "peft 1 use mam from", "peft 1 use mam std"),
    ),
    ErrorRule(
        "P019",
        when=lambda c: c.statement == "METHOD" and c.bracket == "LPAR" and c.allows_only("EQUAL"),
        message=lambda c: (
            f"the parameter {c.preceding} has no default"
            if c.type in {"COMMA", "RPAR"}
            else f"expected `=` after {c.preceding}, found {c.unexpected}"
        ),
        span=lambda c: (c.previous or c.token) if c.type in {"COMMA", "RPAR"} else c.token,
        help=lambda c: f"give it a default, e.g. `{c.previous} = 8`: every method can be planned without arguments",
        examples=(
            "peft 1 method m(r) { edit a at layer[*].ffn { h += x } }",
            "peft 1 method m(r, s = 3) { edit a at layer[*].ffn { h += x } }",
            "peft 1 method m(r 3) { edit a at layer[*].ffn { h += x } }",
        ),
    ),
    ErrorRule(
        "P025",
        when=lambda c: c.statement == "EXPECT" and c.type == "EQUAL",
        message=lambda c: f"{c.unexpected} is not a comparison",
        help="write `==`",
        examples=("peft 1 expect sites(a) = 3",),
    ),
    ErrorRule(
        "P025",
        when=lambda c: c.statement == "EXPECT" and c.type == "COMPARISON" and c.operand_missing,
        message=lambda c: f"expected a fact before {c.unexpected}",
        examples=("peft 1 expect <= 3",),
    ),
    ErrorRule(
        "P025",
        when=lambda c: c.statement == "EXPECT" and c.type == "COMPARISON",
        message="comparisons cannot be chained",
        help="write one `expect` for each comparison",
        examples=("peft 1 expect 1 <= sites(a) <= 3",),
    ),
    ErrorRule(
        "P012",
        when=lambda c: c.allows_only("EQUAL") or c.allows_only("DOT", "EQUAL"),
        message=lambda c: f"expected `=` after {c.preceding}, found {c.unexpected}",
        help=lambda c: "`let NAME = …` binds once" if c.type in {"PLUS_EQUAL", "STAR_EQUAL"} else None,
        examples=("peft 1 let r += 4", "peft 1 let r 4", "peft 1 let r == 4"),
    ),
    ErrorRule(
        "P013",
        when=lambda c: c.allows_only(*ASSIGNMENTS) and nearest(str(c.previous), ("let",)) == "let",
        message=lambda c: f"expected an equation, found {c.preceding}",
        span=lambda c: c.previous or c.token,
        help="did you mean `let`?",
        examples=("peft 1 edit a at layer[*].ffn { lett g = gate(h)  h += g * h }",),
    ),
    ErrorRule(
        "P012",
        when=lambda c: c.allows_only(*ASSIGNMENTS),
        message=lambda c: f"expected `=`, `+=` or `*=` after {c.preceding}, found {c.unexpected}",
        help=_assignment_help,
        examples=(
            "peft 1 edit a at layer[*].ffn { h -= x }",
            "peft 1 edit a at layer[*].ffn { h == x }",
            "peft 1 edit a at layer[*].ffn { h adapter(x, r=3) }",
            "peft 1 edit a at layer[*].ffn { adapter(x, r=3) }",
        ),
    ),
    ErrorRule(
        "P008",
        when=lambda c: c.allows("COMMA") and c.bracket in {"LPAR", "LSQB"} and c.starts_operand,
        message=lambda c: f"expected `,` before {c.unexpected}",
        help="arguments are separated by commas",
        examples=(
            "peft 1 edit a at layer[*].ffn { h += adapter(x r=3) }",
            "peft 1 method m(r = 3 s = 4) { edit a at layer[*].ffn { h += x } }",
            "peft 1 edit a at layer[*].ffn { h += adapter(x, r=3 act=relu) }",
        ),
    ),
    ErrorRule(
        "P014",
        when=lambda c: c.allows("EDIT") and c.type == "NAME" and c.next.type in ASSIGNMENTS,
        message=lambda c: f"the equation of {c.unexpected} stands outside an edit",
        help="move it into one: `edit NAME at SELECTOR { … }`; `let` binds a constant",
        examples=(
            "peft 1 h += adapter(x, r=4)",
            "peft 1 method m() { h += adapter(x, r=4) }",
            "peft 1 let r = 3 s = 4",
        ),
    ),
    ErrorRule(
        "P014",
        when=lambda c: c.type == "PEFT" and (c.allows("EDIT") or c.allows("RBRACE")),
        message="`peft` stands only once, at the top of a file",
        examples=("peft 1 peft 1",),
    ),
    ErrorRule(
        "P014",
        when=lambda c: c.starts_statement and (c.allows("EDIT") or c.allows("RBRACE")),
        message=lambda c: f"{c.unexpected} cannot stand in a method",
        help="move it out of the method, or add the missing `}` above",
        examples=("peft 1 method m() { use mam from std }", "peft 1 method m() { method n() { } }"),
    ),
    ErrorRule(
        "P013",
        when=lambda c: c.allows("EDIT") and c.type == "NAME" and c.bracket in {"", "LBRACE"},
        message=lambda c: f"expected a statement, found {c.unexpected}",
        help=_statement_help,
        examples=(
            "peft 1 edti a at layer[*].ffn { h += x }",
            "peft 1 methd m() { edit a at layer[*].ffn { h += x } }",
            "peft 1 edit a at layer[*].ffn { h += x } foo",
            "peft 1 expct stored <= 3%",
            "peft 1 expect stored < 3 foo",
        ),
    ),
    ErrorRule(
        "P015",
        when=lambda c: c.operand_missing,
        message=lambda c: (
            f"expected {'an argument' if c.allows('RPAR') else 'an expression'} after {c.preceding}, "
            f"found {c.unexpected}"
        ),
        help=lambda c: f"`{c.token}` is a keyword" if c.is_keyword and not c.starts_statement else None,
        examples=(
            "peft 1 edit a at layer[*].ffn { h += }",
            "peft 1 edit a at layer[*].ffn { h += 4 * }",
            "peft 1 edit a at layer[*].ffn { h += adapter(, r=3) }",
            "peft 1 edit a at layer[*].ffn { h += adapter(x, r=) }",
            "peft 1 let r = ",
            "peft 1 expect stored <= ",
            "peft 1 edit a at layer[*].ffn { h += at }",
        ),
    ),
    ErrorRule(
        "P023",
        when=lambda c: True,
        message=lambda c: (
            f"expected {c.expected}, found {c.unexpected}"
            if len(c.accepts) <= 4
            else f"unexpected {c.unexpected} after {c.preceding}"
        ),
        examples=(
            "peft 1 apply mam() at encoder as enc as dec",
            "peft 1 let a = f(x) (y)",
            "peft 1 expect stored 5",
        ),
    ),
)


def rule_for(context: ErrorContext) -> ErrorRule:
    return next(rule for rule in ERROR_RULES if rule.when(context))
