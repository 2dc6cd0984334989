"""Every malformed text is reported once, by the code of its rule."""

from __future__ import annotations

import pytest

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.codes import CODES
from peftc.syntax.parser import MAX_ERRORS, parse_expression, parse_text
from tests.syntax.malformed import MALFORMED


def errors_of(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(PeftcError) as excinfo:
        parse_text(text)
    return excinfo.value.diagnostics


@pytest.mark.parametrize(("text", "code"), [(text, code) for code, texts in MALFORMED.items() for text in texts])
def test_one_mistake_is_one_message(text: str, code: str) -> None:
    errors = errors_of(text)
    assert [error.code for error in errors] == [code], errors
    assert errors[0].span is not None
    assert errors[0].source is not None
    assert 0 <= errors[0].span.start <= errors[0].span.end <= len(text)
    assert code in CODES


MESSAGES = [
    ("edit a at layer[*].ffn { h += x }", "expected `peft 2`, found `edit`", "edit"),
    ("peft 1 edit a layer[*].ffn { h += x }", "expected `at` and a selector, found `layer`", "layer"),
    ("peft 1 edit a at layer[*].ffn { h += f(x r=3) }", "expected `,` before `r`", "r"),
    ("peft 1 edit a at layer[*].ffn { h += f(x, r=3 }", "this `(` is never closed", "("),
    ("peft 1 edit a at layer[*].ffn { h -= x }", "expected `=`, `+=` or `*=` after `h`, found `-`", "-"),
    ("peft 1 method m(r, s=3) {}", "the parameter `r` has no default", "r"),
    ("peft 1 expect sites(a) = 3", "`=` is not a comparison", "="),
    ("peft 1 let r = 12.", "unexpected `.` after `12`", "."),
    ("peft 1 edit a at layer[3..1].ffn { h += x }", "the range `3..1` is empty", "3..1"),
    ("peft 1 edit a at layer[1.5].ffn { h += x }", "`1.5` is not an index", "1.5"),
    ("peft 7", "this spec is in version 7 of the language; this peftc reads versions 1 and 2", "7"),
    ("peft 1 use m from home", "expected `std` or a file in quotes, found `home`", "home"),
    ("peft 1 edit a at b per day { h = h }", "expected `task` after `per`, found `day`", "day"),
    ("peft 1 edit a at b { h += f(r=3, x) }", "positional argument after `r=`", "x"),
    ("peft 1 apply m(3)", "arguments of a method are named", "3"),
    (f"peft 1 let r = {'9' * 41}", f"the number `{'9' * 30}…` is too large or too long", "9" * 41),
    ("peft 1 let r = 1e999", "the number `1e999` is too large or too long", "1e999"),
]


@pytest.mark.parametrize(("text", "message", "underlined"), MESSAGES)
def test_the_message_and_the_smallest_span(text: str, message: str, underlined: str) -> None:
    (error,) = errors_of(text)
    assert error.span is not None
    assert (error.message, text[error.span.start : error.span.end]) == (message, underlined)


def test_nearest_keyword() -> None:
    assert errors_of("peft 1 trian a = [b] at **")[0].help == "did you mean `train`?"
    assert errors_of("peft 1 methd m() { }")[0].help == "did you mean `method`?"


MANY = """peft 1

method mam(l = 30, r = 512) {
    edit prefix layer[*].attn { kv = concat(prefix(len=l) kv) }
    edit ffn at layer[*].ffn { h += adapter(x, r=r }
    edit foo at layer[*].ffn h += adapter(x, r=r) }
    expect stored = 6.8%
}
edti foo at layer[*]ffn { h -= 3 }
let g == 4 × 3
edit good at layer[*].ffn { h += x }
use mam form std
"""


def test_all_errors_of_a_text_are_reported_in_one_run() -> None:
    lines = [(error.span.line, error.code) for error in errors_of(MANY) if error.span]
    assert lines == [
        (4, "P009"),
        (4, "P008"),
        (5, "P006"),
        (6, "P010"),
        (7, "P025"),
        (9, "P013"),
        (9, "P016"),
        (9, "P012"),
        (10, "P012"),
        (10, "P003"),
        (12, "P022"),
    ]


def test_errors_in_two_statements_are_two_errors() -> None:
    text = "peft 1\nedit a at layer[*].ffn { h += ) }\nedit b at layer[*].ffn { h += adapter(x, r=) }\n"
    assert [error.span.line for error in errors_of(text) if error.span] == [2, 3]


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("h += adapter(x, r=)", [3, 4]),
        ("h = adapter(x r=4)\nh *= f(x r=3)", [3, 4, 5]),
        ("let g = f(x r=4)", [3, 4]),
        (") r = adapter(x, r=)", [3]),
        ("h - adapter(x, r=)", [3]),
    ],
)
def test_panic_mode_skips_to_the_next_equation_or_let(more: str, lines: list[int]) -> None:
    text = f"peft 1\nedit a at layer[*].ffn {{\nh += ) ) ) x\n{more}\n}}\n"
    assert [error.span.line for error in errors_of(text) if error.span] == lines


CLOSED = f"let b = 0{' + (f(1))' * 30} edit c at x{'.x[0]' * 45} {{ h = h }} {'edit d at x { h = h } ' * 45}"
NESTED = {
    "parentheses": ("let a = ", "(", "1", ")", ""),
    "calls": ("let a = ", "f(", "1", ")", ""),
    "signs": ("let a = ", "-", "1", "", ""),
    "one around an index": ("edit e at ", "(", "layer[0]", ")", " { h = h }"),
    "behind others that are closed": (CLOSED + "let a = ", "(", "1", ")", ""),
}


@pytest.mark.parametrize("name", NESTED)
def test_forty_levels_are_enough(name: str) -> None:
    before, opening, inner, closing, after = NESTED[name]
    most = 40 - inner.count("[")

    def nested(n: int) -> str:
        return f"peft 1 {before}{opening * n}{inner}{closing * n}{after}"

    parse_text(nested(most))
    (error,) = errors_of(nested(most + 1))
    assert error.code == "P018"


def test_the_number_of_messages_is_limited() -> None:
    assert len(errors_of("peft 1\n" + "edit a at { h += }\n" * 200)) == MAX_ERRORS


def test_an_expression_alone() -> None:
    assert str(parse_expression("mlp(800)")) == str(parse_expression(" mlp( 800 ) # width"))
    for bad in ("", "4 +", "a b", "r=3", "edit", "4)"):
        with pytest.raises(PeftcError) as excinfo:
            parse_expression(bad, "--set x")
        assert excinfo.value.diagnostics[0].code.startswith("P0")
        assert excinfo.value.diagnostics[0].source is not None
