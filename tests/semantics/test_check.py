"""`peftc check`: diagnostics that need no model."""

from __future__ import annotations

import textwrap

import pytest

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.codes import CODES, RIGHT, WRONG
from peftc.equations.table import FORMS
from peftc.filesystem import resources
from peftc.semantics import bind, check_file, read_spec
from peftc.syntax import ast, parse_expression, parse_text
from peftc.syntax.vocabulary import STACK_CHOICE_HELP


def diagnostics(text: str) -> list[Diagnostic]:
    try:
        return check_file(parse_text(text))
    except PeftcError as error:
        return list(error.diagnostics)


def errors(text: str) -> set[str]:
    return {error.code for error in diagnostics(text) if error.severity == "error"}


EXPLAINED = sorted(code for code, info in CODES.items() if WRONG in info.explanation)


@pytest.mark.parametrize("code", EXPLAINED)
def test_examples_in_explanations_give_their_codes(code: str) -> None:
    wrong, right = CODES[code].explanation.split(WRONG)[1].split(RIGHT)
    assert errors(textwrap.dedent(wrong)) == {code}
    assert errors(textwrap.dedent(right)) == set()


ABOUT_FILES = {"P024", "P026", "P027", "P112", "P123", "P124", "P125", "P126"}  # the example would need a file
# Of a setting, of `fmt --upgrade`, and of `peftc check`: comments and the configuration.
OF_COMMANDS = {"P110", "P029", "P127", "P128", "P129", "P130", "P131", "P132"}


def test_every_code_that_the_front_end_raises_is_explained() -> None:
    assert {code for code in CODES if code < "P2"} - set(EXPLAINED) == ABOUT_FILES | OF_COMMANDS


@pytest.mark.parametrize("name", sorted(resources.recipes()))
def test_nothing_is_wrong_with_the_recipes(name: str) -> None:
    assert check_file(read_spec(resources.recipes()[name])) == []


EDIT = "peft 1\nedit a at {} {{ {} }}\n"
CASES = [
    ("layer[*].ffn", "h += adaptor(x, r=4)", "P101", "adaptor", "did you mean `adapter`?"),
    ("layer[*].ffn", "h += LoRA(x, r=4)", "P101", "LoRA", "did you mean `lora`?"),
    ("layer[*].ffn", "h += adapter(x, r=4, bais=true)", "P102", "bais", "did you mean `bias`?"),
    ("layer[*].ffn", "h += lora(x, rank=4, r=3)", "P102", "rank", "did you mean `r`?"),
    ("layer[*].attn.q", "h += lora(x)", "P103", "lora", "add `r=…`"),
    ("layer[*].ffn", "h += adapter(x, r=4, r=4)", "P104", "r=4", "remove one of them"),
    ("layer[*].attn.q", "h += lora(x, r=2.5)", "P105", "2.5", None),
    ("layer[*].attn.q", "h += lora(x, r=rank)", "P105", "rank", "no parameter and no constant is named `rank`"),
    ("layer[*].ffn", "h += adapter(x, r=4, bias=1)", "P105", "1", None),
    ("layer[*].attn.q", "h += lora(x, r=0)", "P106", "0", None),
    ("layer[*].attn.q", "h += lora(x, r=-4)", "P106", "-4", None),
    ("layer[*].attn.q", "h += lora(x, r=4, alpha=0)", "P106", "0", None),
    ("layer[*].attn.q", "h += lora(x, r=4, alpha=-5)", "P106", "-5", None),
    ("layer[*].attn.q", "h += lora(x, r=4, dropout=1)", "P106", "1", None),
    ("layer[*].attn.q", "h += lora(x, r=4, dropout=-0.5)", "P106", "-0.5", None),
    ("layer[*].ffn", "h += adapter(x, r=4, act=rleu)", "P106", "rleu", "did you mean `relu`?"),
    ("layer[*].ffn", 'h += adapter(x, r=4, act="relu")', "P106", '"relu"', "write it without quotes: `act=relu`"),
    ("layer[*].attn", "kv = concat(prefix(len=3, reparam=mpl(8)), kv)", "P106", "mpl", "did you mean `mlp`?"),
    ("layer[*].attn", "kv = concat(prefix(len=3, reparam=mlp(0)), kv)", "P106", "0", None),
    (
        "layer[*].attn",
        "kv = concat(prefix(len=3, reparam=mlp(8, 3)), kv)",
        "P105",
        "mlp(8, 3)",
        "e.g. `reparam=mlp(512)`",
    ),
    ("layer[*].ffn", "h += adapter(hh, r=4)", "P107", "hh", "did you mean `h`?"),
    ("layer[*].ffn", "weight += h", "P107", "weight", "did you mean `w`?"),
    ("layer[*].ffn", "let g = gate(h)  g = x  h += g", "P107", "g", None),
    ("layer[*].ffn", "h += adapter(r=4)", "P108", "adapter", "name its input: `adapter(x, …)` or `adapter(h, …)`"),
    ("layer[*].attn", "kv = concat(prefix(30), kv)", "P108", "30", "did you mean `len=30`?"),
    ("layer[*].attn", "kv = concat(kv)", "P108", "concat(kv)", None),
    ("layer[*].attn", "kv = concat(prefix(len=3), kv, len=4)", "P102", "len=4", None),
    ("layer[*].ffn", "h += norm(h, x)", "P108", "norm(h, x)", None),
    ("layer[*].ffn", "h += shared(adapter(r=3))", "P115", "shared", None),
    ("layer[*].ffn", "let h = gate(x)  h += x", "P121", "let h = gate(x)", "use another name"),
    ("layer[*].ffn", "w = magnitude(w)", "P205", "w", "it is a state of a Linear, e.g. of `layer[*].attn.q`"),
    ("layer[*].attn.q | layer[*].ffn", "kv = concat(kv, kv)", "P205", "kv", None),
    ("layer[*].attn.q_proj", "h += lora(x, r=4)", "P208", "q_proj", "did you mean `q`?"),
    ("layer[*].mlp", "h += adapter(x, r=4)", "P208", "mlp", "did you mean `ffn`?"),
    ("layers[*].ffn", "h += adapter(x, r=4)", "P208", "layers", "did you mean `layer`?"),
    ("layer[*].ffn.q", "h += lora(x, r=4)", "P208", "q", None),
    ("input", "h += adapter(x, r=4)", "P208", "input", STACK_CHOICE_HELP["input"]),
    ("layer[*].input.embed", "h += adapter(x, r=4)", "P208", "embed", None),
    ("layer[*].ffn - layer[*].croos", "h += adapter(x, r=4)", "P208", "croos", "did you mean `cross`?"),
]  # fmt: skip


@pytest.mark.parametrize(("at", "body", "code", "underlined", "help_"), CASES)
def test_one_mistake_is_one_message(at: str, body: str, code: str, underlined: str, help_: str | None) -> None:
    text = EDIT.format(at, body)
    (error,) = [e for e in diagnostics(text) if e.severity == "error"]
    assert error.span is not None
    assert (error.code, text[error.span.start : error.span.end]) == (code, underlined)
    if help_ is not None:
        assert error.help == help_


@pytest.mark.parametrize(
    "at", ["layer[*].mixer", "layer[*].mixer.in_proj", "layer[*].attn.qkv", "r_layers.layer[*].ffn"]
)
def test_names_that_only_a_model_defines_are_accepted(at: str) -> None:
    assert not [e for e in diagnostics(EDIT.format(at, "h += adapter(x, r=4)")) if e.severity == "error"]


def test_several_errors_in_one_run() -> None:
    text = """peft 1
let Q = shared(adaptr(r=8))
method m(r = 4, un = 3) {
    edit a at layer[*].atn { h += 4 * adapter(x, r=r/2, act=relu) }
    edit b at layer[*].ffn { h += loar(x, r=r) + hh + Q(x) }
    expect stred <= 3%
}
edit t at layer[*].ffn { h += adapter(x, r=0, dropout=1, bais=true) }
edit t at layer[*].ffn { h = lora(x, r=1 / 0) }
apply m(rr=3) as enc
train n = [w, bias] at layer[*].norm
"""
    codes = [(error.span.line, error.code) for error in diagnostics(text) if error.span]
    assert codes == [
        (2, "P101"),
        (3, "P114"),
        (4, "P208"),
        (5, "P101"),
        (5, "P107"),
        (6, "P116"),
        (8, "P106"),
        (8, "P106"),
        (8, "P102"),
        (9, "P120"),
        (10, "P102"),
        (11, "P107"),
    ]


def test_two_assignments_to_one_state() -> None:
    text = (
        "peft 1\nedit a at layer[*].attn {{ kv = concat(prefix(len=3), kv) }}\n"
        "edit b at {} {{ kv = concat(prefix(len=4), kv) }}\n"
    )
    assert errors(text.format("layer[*].attn")) == {"P302"}
    assert errors(text.format("layer[ * ].attn | decoder.layer[0].attn")) == {"P302"}
    assert errors(text.format("encoder.layer[*].attn")) == set()
    assert errors(text.format("layer[*].attn").replace("kv =", "h +=").replace("concat", "norm")) != {"P302"}


def test_every_method_of_a_file_is_checked() -> None:
    text = (
        "peft 1\nmethod a() { edit e at layer[*].ffn { h += one(x) } }\n"
        "method b() { edit e at layer[*].ffn { h += two(x) } }\n"
    )
    assert [error.message for error in diagnostics(text)] == ["there is no form `one`", "there is no form `two`"]


def test_unused_names_are_warnings() -> None:
    text = "peft 1\nuse mam from std\nlet r = 3\nedit a at layer[*].ffn { let g = gate(h)  h += x }\n"
    assert [(error.code, error.severity) for error in diagnostics(text)] == [("P114", "warning")] * 3


def test_a_method_beside_edits_is_applied_or_a_warning() -> None:
    method = "peft 1\nmethod m(r = 8) { edit a at layer[*].attn.q { h += lora(x, r=r) } }\n"
    edit = "edit b at layer[*].ffn { h += adapter(x, r=4) }\n"
    assert [(e.code, e.severity, e.help) for e in diagnostics(method + edit)] == [
        ("P114", "warning", "add `apply m()`")
    ]
    assert not diagnostics(method)
    assert not diagnostics(method + edit + "apply m()")


def test_a_value_that_came_from_apply_says_so() -> None:
    text = "peft 1\nmethod m(r = 8) { edit a at layer[*].attn.q { h += lora(x, r=r) } }\napply m(r=0)\n"
    (error,) = diagnostics(text)
    assert error.code == "P106"
    assert error.notes == ("from `apply m(r=0)`, line 3 of <text>",)


@pytest.mark.parametrize(
    "text", ["stored", "foldable(a) < 3", "sites(a, a) == 1", "stored(a) <= 3", '"a" == 3', "true == 3"]
)
def test_invalid_expectations(text: str) -> None:
    assert errors(f"peft 1 edit a at layer[*].ffn {{ h += x }} expect {text}") == {"P116"}


@pytest.mark.parametrize(
    "text", ["stored <= 3%", "foldable(a)", "foldable(a) == false", "2 * trained >= stored", "sites(a) == 1"]
)
def test_valid_expectations(text: str) -> None:
    assert errors(f"peft 1 edit a at layer[*].ffn {{ h += x }} expect {text}") == set()


def test_bind_fills_in_defaults_and_units() -> None:
    call = parse_expression("prefix(len=1K, reparam=mlp(800))")
    assert isinstance(call, ast.Call)
    bound = bind(call, FORMS["prefix"])
    assert bound.input is None
    assert (bound.args["len"], bound.args["reparam"], bound.args["keep"]) == (1000, ("mlp", 800), False)
    call = parse_expression("lora(h + x, r=8, dropout=10%)")
    assert isinstance(call, ast.Call)
    bound = bind(call, FORMS["lora"])
    assert isinstance(bound.input, ast.Binary)
    assert (bound.args["r"], bound.args["dropout"]) == (8, 0.1)


def test_bind_reports_everything_at_once() -> None:
    call = parse_expression("lora(x, h, r=0, foo=1, dropout=2)")
    assert isinstance(call, ast.Call)
    with pytest.raises(PeftcError) as excinfo:
        bind(call, FORMS["lora"])
    assert [error.code for error in excinfo.value.diagnostics] == ["P108", "P106", "P102", "P106"]
