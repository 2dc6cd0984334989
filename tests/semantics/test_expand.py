"""Expansion of methods, constants, included files and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from peftc.diagnostics import PeftcError
from peftc.filesystem import resources
from peftc.semantics import expand, read_spec
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax import ast, parse_text, print_spec

RECIPES = sorted(resources.recipes().values())


def flat(text: str, *settings: str, path: str = "<text>") -> str:
    """The statements of an expanded spec, one per line."""
    expanded = expand(parse_text("peft 1\n" + text, path), parse_settings(settings))
    return "\n".join(line for line in print_spec(expanded).splitlines()[1:] if line)


def codes(text: str, *settings: str) -> list[str]:
    with pytest.raises(PeftcError) as excinfo:
        flat(text, *settings)
    return [error.code for error in excinfo.value.diagnostics]


METHOD = (
    "method m(r = 8, s = 2 * r, act = relu) { edit ffn at layer[*].ffn { h += s * adapter(x, r=r / 2, act=act) } }\n"
)


def test_a_single_method_is_its_defaults() -> None:
    assert flat(METHOD) == "edit ffn at layer[*].ffn { h += 16 * adapter(x, r=4, act=relu) }"


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        (["r=6"], "12 * adapter(x, r=3, act=relu)"),
        (["s=scalar(init=4)"], "scalar(init=4) * adapter(x, r=4, act=relu)"),
        (["r=1K", "s=1", "act=gelu"], "1 * adapter(x, r=500, act=gelu)"),
        (["r=10"], "20 * adapter(x, r=5, act=relu)"),
        (["s=-1"], "-1 * adapter(x, r=4, act=relu)"),
    ],
)
def test_settings_override_parameters(settings: list[str], value: str) -> None:
    assert flat(METHOD, *settings) == f"edit ffn at layer[*].ffn {{ h += {value} }}"


def test_settings_override_constants_of_a_file_without_methods() -> None:
    text = "let r = 8  let s = 2 * r  edit a at layer[*].ffn { h += s * adapter(x, r=r) }"
    assert "16 * adapter(x, r=8)" in flat(text)
    assert "6 * adapter(x, r=3)" in flat(text, "r=3")


@pytest.mark.parametrize("settings", [["rr=3"], ["x"], ["r=3", "r=4"], ["=3"], ["r s=3"]])
def test_bad_settings(settings: list[str]) -> None:
    assert codes(METHOD, *settings) == ["P110"]


def test_a_malformed_setting() -> None:
    assert codes(METHOD, "r=4 +") == ["P015"]


@pytest.mark.parametrize(
    ("source", "folded"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3 - 10", "-1"),
        ("-(2 - 5)", "--3"),
        ("1 / 4", "0.25"),
        ("6 / 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("27.4M / 2", "13700000"),
        ("2 * 3%", "6%"),
        ("3% + 1.5%", "4.5%"),
        ("10% / 4", "2.5%"),
        ("1 - 10%", "0.9"),
        ("2 * h", "2 * h"),
        ("2 * 3 * h", "6 * h"),
        ("h * 2 * 3", "h * 2 * 3"),
    ],
)
def test_arithmetic(source: str, folded: str) -> None:
    text = flat(f"edit a at layer[*].ffn {{ h += {source} }}")
    assert text == f"edit a at layer[*].ffn {{ h += {folded.replace('--', '')} }}"


@pytest.mark.parametrize("source", ["1 / 0", "1 / (2 - 2)", "1e300 * 1e300", "0 / 0"])
def test_arithmetic_that_fails(source: str) -> None:
    assert codes(f"edit a at layer[*].ffn {{ h += {source} * x }}") == ["P120"]


def test_let_inside_an_edit() -> None:
    text = "let g = 3  edit a at layer[*].ffn { let n = 2 * g  let g = gate(h)  let old = h  h += n * g  h += old }"
    assert flat(text).split() == (
        [
            "edit",
            "a",
            "at",
            "layer[*].ffn",
            "{",
            "let",
            "g",
            "=",
            "gate(h)",
            "let",
            "old",
            "=",
            "h",
            "h",
            "+=",
            "6",
            "*",
            "g",
            "h",
            "+=",
            "old",
            "}",
        ]
    )


APPLIED = """
method inner(r = 4) { edit a at layer[*].attn { h += adapter(h, r=r) }  expect foldable(a) }
method outer(r = 8) {
    let P = shared(adapter(r=r))
    apply inner(r=2 * r) as in
    edit b at layer[*].ffn { h += P(x) }
    train n = [w] at norm
    expect sites(in.a) == r
    expect identity(b)
}
"""


def test_names_and_selectors_of_applied_methods() -> None:
    assert flat(APPLIED + "apply outer(r=3) at encoder as enc  apply inner() at encoder.layer[0..3]").splitlines() == [
        "let enc.P = shared(adapter(r=3))",
        "edit enc.in.a at encoder.layer[*].attn { h += adapter(h, r=6) }",
        "expect foldable(enc.in.a)",
        "edit enc.b at encoder.layer[*].ffn { h += enc.P(x) }",
        "train enc.n = [w] at encoder.norm",
        "expect sites(enc.in.a) == 3",
        "expect identity(enc.b)",
        "edit a at encoder.layer[0..3].attn { h += adapter(h, r=4) }",
        "expect foldable(a)",
    ]


@pytest.mark.parametrize(
    ("inner", "outer", "together"),
    [
        ("layer[*].attn", "encoder", "encoder.layer[*].attn"),
        ("encoder.layer[*].attn", "encoder", "encoder.layer[*].attn"),
        ("layer[*].attn", "layer[0..3]", "layer[0..3].attn"),
        ("layer[2].attn", "encoder.layer[*]", "encoder.layer[2].attn"),
        ("decoder.layer[*].attn", "layer[0..3]", "decoder.layer[0..3].attn"),
        ("layer[*].attn.q", "layer[*].attn", "layer[*].attn.q"),
        ("layer[*].attn | layer[*].ffn", "decoder", "decoder.layer[*].attn | decoder.layer[*].ffn"),
        ("layer[*].attn - layer[0].attn", "decoder", "decoder.layer[*].attn - decoder.layer[0].attn"),
        ("layer[*].attn", "encoder | decoder", "encoder.layer[*].attn | decoder.layer[*].attn"),
        ("layer[*].ffn", "encoder - encoder.layer[0]", "encoder.layer[*].ffn - encoder.layer[0].ffn"),
        ("norm", "encoder", "encoder.norm"),
        ("**", "decoder", "decoder.**"),
        ("input.embed", "encoder", "encoder.input.embed"),
        ("embed", "input.embed", "input.embed"),
        ("output.layer[*].ffn", "decoder", "decoder.output.layer[*].ffn"),
        ("output.layer[*].ffn", "layer[2..]", "output.layer[2..].ffn"),
        ("output.layer[*].ffn", "decoder.layer[1]", "decoder.output.layer[1].ffn"),
        ("layer[*].ffn", "output.layer[2..]", "output.layer[2..].ffn"),
    ],
)
def test_selectors_are_restricted(inner: str, outer: str, together: str) -> None:
    text = f"method m() {{ edit a at {inner} {{ h *= vector() }} }} apply m() at {outer}"
    assert flat(text) == f"edit a at {together} {{ h *= vector() }}"


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("decoder.layer[*].attn", "encoder"),
        ('"a.*"', "encoder"),
        ("layer[*].attn", '"a.*"'),
        ("layer[0].attn", "layer[1]"),
        ("norm", "layer[0..3]"),
    ],
)
def test_selectors_that_cannot_be_restricted(inner: str, outer: str) -> None:
    assert codes(f"method m() {{ edit a at {inner} {{ h *= vector() }} }} apply m() at {outer}") == ["P122"]


def test_use_is_relative_to_the_file_that_uses(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.peft").write_text('peft 1\nuse b from "../b.peft"\nlet r = 3\nmethod a() { apply b(r=r) }\n')
    (tmp_path / "b.peft").write_text(
        "peft 1\nlet P = shared(vector())\nmethod b(r = 1) { edit e at layer[*].ffn { h += P() * adapter(x, r=r) } }\n"
    )
    (tmp_path / "main.peft").write_text('peft 1\nuse a from "sub/a.peft"\napply a() as x\n')
    expanded = expand(read_spec(tmp_path / "main.peft"))
    assert print_spec(expanded).splitlines()[2:] == [
        "let P = shared(vector())",
        "edit x.e at layer[*].ffn { h += P() * adapter(x, r=3) }",
    ]
    edit = expanded.statements[1]
    assert isinstance(edit, ast.Edit)
    assert edit.origin is not None
    assert edit.origin.path == str(tmp_path / "b.peft")
    assert edit.origin.text[edit.name_span.start : edit.name_span.end] == "e"
    assert any("apply a() as x" in note for note in edit.via)


def test_files_that_use_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.peft").write_text('peft 1\nuse b from "b.peft"\nmethod a() { apply b() }\n')
    (tmp_path / "b.peft").write_text('peft 1\nuse a from "a.peft"\nmethod b() { apply a() }\n')
    with pytest.raises(PeftcError) as excinfo:
        expand(read_spec(tmp_path / "a.peft"))
    assert "P113" in [error.code for error in excinfo.value.diagnostics]


def test_errors_in_a_used_file_are_about_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.peft").write_text("peft 1\nmethod a() { edit b at { h = h } }\n")
    (tmp_path / "main.peft").write_text('peft 1\nuse a from "a.peft"\napply a()\n')
    with pytest.raises(PeftcError) as excinfo:
        expand(read_spec(tmp_path / "main.peft"))
    (syntax_error,) = [error for error in excinfo.value.diagnostics if error.code == "P016"]
    assert syntax_error.source is not None
    assert syntax_error.source.path == str(tmp_path / "a.peft")


WRONG = [
    ("use mamm from std apply mamm()", ["P109"]),
    ('use m from "nowhere.peft" apply m()', ["P112"]),
    (METHOD + "apply m(rr=3, r=4, r=5)", ["P102", "P104"]),
    (METHOD + "apply m() apply m()", ["P111"]),
    (METHOD + "apply n()", ["P109"]),
    ("method a() { apply b() } method b() { apply a() } apply a()", ["P113"]),
    ("method a() { apply a() }", ["P113"]),
    (METHOD + METHOD.replace("method m", "method n"), ["P119"]),
    ("", ["P119"]),
    ("let a = 3", ["P119"]),
    ("edit a at layer[*].ffn { }", ["P119"]),
    ("let a = h edit b at layer[*].ffn { h += x }", ["P115"]),
    ("let a = 3 let a = 4 edit b at layer[*].ffn { h += a * x }", ["P111"]),
    ("method m(r = 3, q = 4) { edit a at layer[*].ffn { h += adapter(x, r=r) } }", ["P121"]),
    ("method m(r = 3, n = 4) { edit a at layer[*].ffn { h += adapter(x, r=r) } }", ["P114"]),
    ("edit a at layer[*].ffn { h += x } expect foldable(b) expect foo < 3", ["P117", "P116"]),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_what_cannot_be_expanded(text: str, expected: list[str]) -> None:
    assert codes(text) == expected


@pytest.mark.parametrize("more", range(8, 13))
def test_an_expansion_is_complete_or_an_error(more: int) -> None:
    """More than about a thousand statements are an error; no statement is dropped."""
    text = "method m() {" + "".join(f"edit e{i} at layer[*].ffn {{ h += x }} " for i in range(98)) + "} "
    text += "".join(f"apply m() as a{i} " for i in range(10))
    text += "".join(f"edit f{i} at layer[*].ffn {{ h += x }} " for i in range(more))
    if more > 9:
        assert codes(text) == ["P120"]
    else:
        assert len(flat(text).splitlines()) == 980 + more


LINES = "edit e at layer[*].ffn { h += adapter(x, r=4) }"
SUM = " + ".join("x" * 100)
LARGE = {
    "methods that double": f"method m0() {{ {LINES} }}"
    + "".join(f" method m{i + 1}() {{ apply m{i}() as a apply m{i}() as b }}" for i in range(12))
    + " apply m12()",
    "many parameters, many times": f"method m({', '.join(f'a{i} = 4' for i in range(400))}) {{ {LINES} }}"
    + "".join(f" apply m() as b{i}" for i in range(60)),
    "a deep value": f"method m(s = {SUM}, t = s + {SUM}) {{ edit e at layer[*].ffn {{ h += t }} }}",
    "a wide value": f"method m(s = {SUM}, t = f(s, s, s, s, s, s)) {{ edit e at layer[*].ffn {{ h += t }} }}",
}


@pytest.mark.parametrize("name", LARGE)
def test_the_size_of_an_expansion_is_limited(name: str) -> None:
    assert "P120" in codes(LARGE[name])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_expanded_recipes_parse(path: Path) -> None:
    expanded = expand(read_spec(path))
    again = parse_text(print_spec(expanded))
    assert again == expanded
    assert expand(again) == again
    name = path.stem.replace("-", "_")
    expansion = expand(parse_text(f"peft 1\nuse {name} from std\napply {name}()\n"))
    assert expansion.statements == expanded.statements


def test_every_recipe_of_the_library_is_there() -> None:
    names = (
        "lora dora ia3 houlsby pfeiffer parallel scaled_parallel "
        "prefix mam bitfit layernorm lora_ffn pa_pa prefix_lora_ffn "
        "krona krona_res lokr loha vera glora glora_weight oft said adalora rslora compacter compacter_pp phm_adapter "
        "prefix_ungated prompt_tuning p_tuning ipt adamix fishmask "
        "lt_sft cross_attention far sparse_adapter diff_pruning "
        "difffit loreft direft s4 unipelt lora_adapter lora_adapter_narrow "
        "hypernetwork_adaptbert_narrow multi_head_parallel learned_scale parallel_res "
        "qlora spot ladder adaptive_prefix "
        "hypernetwork hypernetwork_adaptbert adapterfusion attention_fusion "
        "beft boft c3a deft delora fourierft glora_kinds gralora hira hra miss peanut "
        "randlora road shira supertuning vblora "
        "unilora pvera waveft tinylora osf psoft frod lily poly multitask_prompt trainable_tokens"
    )
    assert set(resources.recipes()) == set(names.split())


def test_the_mam_recipe_takes_what_the_paper_varies() -> None:
    spec = read_spec(resources.recipes()["mam"])
    text = print_spec(expand(spec, parse_settings(["bias=false", "reparam=mlp(800)", "l=10"])))
    assert "prefix(len=10, reparam=mlp(800))" in text
    assert "4 * adapter(x, r=512, act=relu, init=lora, bias=false)" in text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("let b = 3  h += b * x", ["P121"]),
        ("let g = gate(x)  let g = gate(h)  h += g", ["P111"]),
        ("let g = 2  let g = 3  h += g * x", ["P111"]),
        ("let g = 1 / 0  let h = 2  h += x", ["P120", "P121"]),
    ],
)
def test_invalid_let_inside_an_edit(body: str, expected: list[str]) -> None:
    assert codes(f"edit a at layer[*].ffn {{ {body} }}") == expected


@pytest.mark.parametrize(
    "body", ["edit e at layer[*].attn.q { h += x[1] * lora(x, r=2) }", "train t = [w] at head where d(x) >= 2"]
)
def test_what_a_file_of_version_2_brings_is_printed_in_version_2(body: str, tmp_path: Path) -> None:
    (tmp_path / "two.peft").write_text(f"peft 2\nmethod m() {{ {body} }}\n")
    (tmp_path / "one.peft").write_text('peft 1\nuse m from "two.peft"\napply m()\n')
    expanded = expand(read_spec(tmp_path / "one.peft"))
    assert expanded.version == 2
    assert parse_text(print_spec(expanded)) == expanded
