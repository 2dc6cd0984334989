"""What people write instead of what the grammar says: one row a mistake.

A row has a diagnostic code, what it looks like to the parser (`when`), what is said about it, and examples. The rows are
tried in order. The examples are the test: each is a text with this one mistake, and must end in exactly this row.
Where no row fits, `OTHERWISE` says what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lark import Token

from peftc.diagnostics.suggestions import nearest
from peftc.syntax.situation import CLOSING, Situation
from peftc.syntax.tokens import keywords

Say = Callable[[Situation], str]


@dataclass(frozen=True)
class Mistake:
    """`when` it looks like this, `message` says what is wrong (expected and found) and `help` what can be done."""

    code: str
    when: Callable[[Situation], bool]
    message: Say
    examples: tuple[str, ...]
    help: Callable[[Situation], str | None] = lambda s: None
    label: Say = lambda s: ""
    span: Callable[[Situation], Token] = lambda s: s.token


_WORDS = {
    "EDIT": "an edit",
    "TRAIN": "`train`",
    "METHOD": "a method",
    "LET": "`let`",
    "USE": "`use`",
    "APPLY": "`apply`",
}
_OPEN = {"LBRACE": "`{`", "LPAR": "`(`", "LSQB": "`[`"}
_CLOSE = {"RBRACE": "`}`", "RPAR": "`)`", "RSQB": "`]`"}
_TOP = ("method", "use", "apply", "edit", "train", "expect", "let")


def _statement_words(s: Situation) -> tuple[str, ...]:
    return tuple(text for terminal, text in keywords().items() if terminal in s.accepts and text in _TOP)


def _meant(s: Situation) -> str | None:
    near = nearest(str(s.token), _statement_words(s))
    return f"did you mean `{near}`?" if near else f"statements begin with {', '.join(_statement_words(s))}"


def _name_help(s: Situation) -> str | None:
    if s.is_keyword and s.following.type != "NAME":
        return f"`{s.token}` is a word of the language; call it otherwise, e.g. `{s.token}_1`"
    return "e.g. `edit ffn at layer[*].ffn { … }`" if s.statement == "EDIT" else None


def _unclosed(s: Situation) -> bool:
    """A bracket is still open where nothing can stand that is inside of it."""
    if not s.open:
        return False
    if s.type == "$END":
        return True
    if s.inside == "LSQB" and s.wants("RSQB") and s.type in {"DOT", "AT"}:
        return True
    if s.inside in {"LPAR", "LSQB"}:
        return s.type in {"LBRACE", "RBRACE"} or s.starts_statement
    in_edit = s.edit is not None and s.edit.type == "EDIT"
    return s.wants("RBRACE") and (s.starts_statement and s.type not in {"PEFT"} and in_edit)


MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "P001",
        when=lambda s: s.at == 0 and s.wants("PEFT"),
        message=lambda s: f"expected `peft 1`, found {s.found}",
        label=lambda s: "a spec begins with its language version",
        help=lambda s: "write `peft 1` on the first line",
        examples=("", "edit a at layer[*].ffn { h += vector() }", "# only a comment", "PEFT 1"),
    ),
    Mistake(
        "P002",
        when=lambda s: s.after == "PEFT",
        message=lambda s: f"expected the language version after `peft`, found {s.found}",
        help=lambda s: "this is language version 1: `peft 1`",
        examples=("peft", "peft one", "peft edit a at layer[*].ffn { h += vector() }"),
    ),
    Mistake(
        "P006",
        when=_unclosed,
        message=lambda s: f"this {_OPEN[s.inside]} is never closed",
        span=lambda s: s.open[-1],
        label=lambda s: "opened here",
        help=lambda s: (
            f"close it before {s.found}"
            + (f" in line {s.token.line}" if s.type != "$END" else "")
            + ("; an edit holds equations and `let`, no other statement" if s.inside == "LBRACE" and s.type != "$END" else "")
        ),
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
    Mistake(
        "P007",
        when=lambda s: s.type in _CLOSE and (not s.open or CLOSING[s.inside] != s.type),
        message=lambda s: f"{s.found} closes nothing" + (f": {_OPEN[s.inside]} is open" if s.open else ""),
        help=lambda s: "remove it" if not s.open else None,
        examples=(
            "peft 1 edit a at layer[*].ffn { h += x } }",
            "peft 1 edit a at layer[*].ffn { h += adapter(x, r=4]) }",
            "peft 1 edit a at layer[*].ffn { h += (x)) }",
        ),
    ),
    Mistake(
        "P011",
        when=lambda s: s.takes("NAME") and s.after in {"EDIT", "TRAIN", "METHOD", "LET", "USE", "APPLY", "AS", "DOT"},
        message=lambda s: f"expected a name after {s.before}, found {s.found}",
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
    Mistake(
        "P009",
        when=lambda s: s.wants("AT") and s.statement in {"EDIT", "TRAIN"} and s.type not in _CLOSE,
        message=lambda s: f"expected `at` and a selector, found {s.found}",
        label=lambda s: "where is the edit?" if s.type == "LBRACE" else "`at` is missing",
        help=lambda s: "e.g. `at layer[*].ffn`" if s.type in {"LBRACE", "$END"} or s.starts_statement else "write `at` before the selector",
        examples=(
            "peft 1 edit a layer[*].ffn { h += x }",
            "peft 1 edit a on layer[*].ffn { h += x }",
            "peft 1 edit a { h += x }",
            "peft 1 train a = [w] layer[*].norm",
            "peft 1 train a = [w]",
            "peft 1 edit a = layer[*].ffn { h += x }",
        ),
    ),
    Mistake(
        "P016",
        when=lambda s: s.inside != "LPAR" and s.wants("DOT", "BAR") and s.type == "NAME" and s.after == "RSQB",
        message=lambda s: f"expected `.` before {s.found}",
        examples=("peft 1 edit a at layer[*]ffn { h += x }",),
    ),
    Mistake(
        "P016",
        when=lambda s: s.wants("BAR", "MINUS") and s.type in {"COMMA", "PLUS"},
        message=lambda s: f"{s.found} does not join selectors",
        help=lambda s: "`a | b` is both, `a - b` is `a` without `b`",
        examples=(
            "peft 1 edit a at layer[*].ffn, layer[*].attn { h += x }",
            "peft 1 edit a at layer[*].ffn + layer[*].attn { h += x }",
        ),
    ),
    Mistake(
        "P010",
        when=lambda s: s.wants("LBRACE") and s.statement in {"EDIT", "METHOD"} and s.inside in {"", "LBRACE"},
        message=lambda s: f"expected `{{`, found {s.found}",
        label=lambda s: "the equations of the edit stand in braces" if s.statement == "EDIT" else "the body of the method stands in braces",
        examples=(
            "peft 1 edit a at layer[*].ffn h += x",
            "peft 1 method m(r = 4) edit a at layer[*].ffn { h += x }",
            "peft 1 edit a at layer[*].ffn",
        ),
    ),
    Mistake(
        "P016",
        when=lambda s: s.wants("STRING", "DOUBLE_STAR") or (s.wants("DOUBLE_STAR") and s.after == "DOT"),
        message=lambda s: f"expected {'a selector' if s.wants('STRING') else 'a site'} after {s.before}, found {s.found}",
        help=lambda s: (
            "`**` is every module below; a pattern on the names of modules stands in quotes"
            if s.type == "STAR"
            else f"`{s.token}` is a word of the language"
            if s.is_keyword and s.following.type not in {"NAME"}
            else None
        ),
        examples=(
            "peft 1 edit a at { h += x }",
            "peft 1 edit a at layer.* { h += x }",
            "peft 1 edit a at layer[*].ffn | { h += x }",
            "peft 1 train a = [w] at",
            "peft 1 edit a at 3 { h += x }",
        ),
    ),
    Mistake(
        "P017",
        when=lambda s: s.inside == "LSQB" and s.statement in {"EDIT", "TRAIN", "APPLY"} and (s.wants("DOT_DOT") or s.after in {"MINUS", "DOT_DOT"} or (s.wants("RSQB") and s.after in {"STAR", "NUMBER"})),
        message=lambda s: f"expected an index, found {s.found}" if s.wants("STAR") else f"expected {s.expected}, found {s.found}",
        help=lambda s: "an index is `3`, `-1`, `*` or a range with both ends included: `0..5`, `6..`, `..5`",
        examples=(
            "peft 1 edit a at layer[].ffn { h += x }",
            "peft 1 edit a at layer[1-3].ffn { h += x }",
            "peft 1 edit a at layer[i].ffn { h += x }",
            "peft 1 edit a at layer[0 5].ffn { h += x }",
            "peft 1 edit a at layer[0, ].ffn { h += x }",
        ),
    ),
    Mistake(
        "P021",
        when=lambda s: s.statement == "TRAIN" and (s.takes("LSQB") or s.takes("NAME") or s.takes("COMMA", "RSQB") or s.wants("EQUAL")),
        message=lambda s: f"expected {s.expected}, found {s.found}",
        help=lambda s: "`train NAME = [w, b] at SELECTOR` names the parameters of the base to train",
        examples=(
            "peft 1 train a [w] at layer[*].norm",
            "peft 1 train a = w at layer[*].norm",
            "peft 1 train a = [] at layer[*].norm",
            "peft 1 train a += [w] at layer[*].norm",
            "peft 1 train a at layer[*].norm",
            "peft 1 train a = [w b] at layer[*].norm",
        ),
    ),
    Mistake(
        "P022",
        when=lambda s: s.statement == "USE",
        message=lambda s: f"expected {s.expected}, found {s.found}" if s.wants("FROM") or s.after == "FROM" else f"expected a statement, found {s.found}",
        help=lambda s: "`use NAME from std`, or from a file: `use NAME from \"file.peft\"`",
        examples=("peft 1 use mam", "peft 1 use mam form std", "peft 1 use mam from", "peft 1 use mam std"),
    ),
    Mistake(
        "P019",
        when=lambda s: s.statement == "METHOD" and s.inside == "LPAR" and s.takes("EQUAL"),
        message=lambda s: f"the parameter {s.before} has no default" if s.type in {"COMMA", "RPAR"} else f"expected `=` after {s.before}, found {s.found}",
        span=lambda s: (s.previous or s.token) if s.type in {"COMMA", "RPAR"} else s.token,
        help=lambda s: f"give it one, e.g. `{s.previous} = 8`: every method can be planned as it stands",
        examples=(
            "peft 1 method m(r) { edit a at layer[*].ffn { h += x } }",
            "peft 1 method m(r, s = 3) { edit a at layer[*].ffn { h += x } }",
            "peft 1 method m(r 3) { edit a at layer[*].ffn { h += x } }",
        ),
    ),
    Mistake(
        "P025",
        when=lambda s: s.statement == "EXPECT" and s.type in {"EQUAL", "COMPARISON"},
        message=lambda s: f"{s.found} is no comparison" if s.type == "EQUAL" else "comparisons do not chain" if not _is_missing_operand(s) else f"expected a fact before {s.found}",
        help=lambda s: "write `==`" if s.type == "EQUAL" else "write one `expect` for each" if not _is_missing_operand(s) else None,
        examples=("peft 1 expect sites(a) = 3", "peft 1 expect 1 <= sites(a) <= 3", "peft 1 expect <= 3"),
    ),
    Mistake(
        "P012",
        when=lambda s: s.takes("EQUAL") or s.takes("DOT", "EQUAL"),
        message=lambda s: f"expected `=` after {s.before}, found {s.found}",
        help=lambda s: "`let NAME = …` binds once" if s.type in {"PLUS_EQUAL", "STAR_EQUAL"} else None,
        examples=("peft 1 let r += 4", "peft 1 let r 4", "peft 1 let r == 4"),
    ),
    Mistake(
        "P013",
        when=lambda s: s.takes("EQUAL", "PLUS_EQUAL", "STAR_EQUAL") and nearest(str(s.previous), ("let",)) == "let",
        message=lambda s: f"expected an equation, found {s.before}",
        span=lambda s: s.previous or s.token,
        help=lambda s: "did you mean `let`?",
        examples=("peft 1 edit a at layer[*].ffn { lett g = gate(h)  h += g * h }",),
    ),
    Mistake(
        "P012",
        when=lambda s: s.takes("EQUAL", "PLUS_EQUAL", "STAR_EQUAL"),
        message=lambda s: f"expected `=`, `+=` or `*=` after {s.before}, found {s.found}",
        help=lambda s: (
            f"there is no `{s.token}=`; write " + (f"`{s.previous} += -(…)`" if s.type == "MINUS" else f"`{s.previous} *= 1 / (…)`")
            if s.type in {"MINUS", "SLASH"} and s.following.type == "EQUAL"
            else f"an equation writes a state: `h += {s.previous}(…)`"
            if s.type == "LPAR"
            else f"an equation writes a state: `{s.previous} += …`"
        ),
        examples=(
            "peft 1 edit a at layer[*].ffn { h -= x }",
            "peft 1 edit a at layer[*].ffn { h == x }",
            "peft 1 edit a at layer[*].ffn { h adapter(x, r=3) }",
            "peft 1 edit a at layer[*].ffn { adapter(x, r=3) }",
        ),
    ),
    Mistake(
        "P008",
        when=lambda s: s.wants("COMMA") and s.inside in {"LPAR", "LSQB"} and s.starts_operand,
        message=lambda s: f"expected `,` before {s.found}",
        help=lambda s: "arguments are separated by commas",
        examples=(
            "peft 1 edit a at layer[*].ffn { h += adapter(x r=3) }",
            "peft 1 method m(r = 3 s = 4) { edit a at layer[*].ffn { h += x } }",
            "peft 1 edit a at layer[*].ffn { h += adapter(x, r=3 act=relu) }",
        ),
    ),
    Mistake(
        "P014",
        when=lambda s: s.wants("EDIT") and s.type == "NAME" and s.following.type in {"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"},
        message=lambda s: f"the equation of {s.found} stands outside of an edit",
        help=lambda s: "put it in one: `edit NAME at SELECTOR { … }`; a constant is bound by `let`",
        examples=("peft 1 h += adapter(x, r=4)", "peft 1 method m() { h += adapter(x, r=4) }", "peft 1 let r = 3 s = 4"),
    ),
    Mistake(
        "P014",
        when=lambda s: s.starts_statement and (s.wants("EDIT") or s.wants("RBRACE")),
        message=lambda s: "`peft` stands at the top of a file, once" if s.type == "PEFT" else f"{s.found} cannot stand in a method",
        help=lambda s: None if s.type == "PEFT" else "move it out of the method; or is a `}` missing above?",
        examples=("peft 1 peft 1", "peft 1 method m() { use mam from std }", "peft 1 method m() { method n() { } }"),
    ),
    Mistake(
        "P013",
        when=lambda s: s.wants("EDIT") and s.type == "NAME" and (s.inside in {"", "LBRACE"}),
        message=lambda s: f"expected a statement, found {s.found}",
        help=_meant,
        examples=(
            "peft 1 edti a at layer[*].ffn { h += x }",
            "peft 1 methd m() { edit a at layer[*].ffn { h += x } }",
            "peft 1 edit a at layer[*].ffn { h += x } foo",
            "peft 1 expct stored <= 3%",
            "peft 1 expect stored < 3 foo",
        ),
    ),
    Mistake(
        "P015",
        when=lambda s: _is_missing_operand(s),
        message=lambda s: f"expected {'an argument' if s.wants('RPAR') else 'an expression'} after {s.before}, found {s.found}",
        help=lambda s: f"`{s.token}` is a word of the language" if s.is_keyword and not s.starts_statement else None,
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
)  # fmt: skip

OTHERWISE = Mistake(
    "P023",
    when=lambda s: True,
    message=lambda s: f"expected {s.expected}, found {s.found}" if len(s.accepts) <= 4 else f"unexpected {s.found} after {s.before}",
    examples=(
        "peft 1 apply mam() at encoder as enc as dec",
        "peft 1 let a = f(x) (y)",
        "peft 1 expect stored 5",
    ),
)  # fmt: skip


def _is_missing_operand(s: Situation) -> bool:
    return s.wants("NUMBER", "MINUS", "LPAR") and not s.wants("PLUS")


def explain(s: Situation) -> tuple[Mistake, str]:
    """The row for a situation, and its message."""
    row = next((row for row in MISTAKES if row.when(s)), OTHERWISE)
    return row, row.message(s)
