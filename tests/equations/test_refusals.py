"""Texts of forms that are refused, with a code and the place, and texts that once went wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.cli.main import main
from peftc.diagnostics import PeftcError
from peftc.equation_code.module import EquationModule
from peftc.equations.primitives import ACTIVATIONS, FUNCTIONS
from peftc.equations.words import INITIAL_VALUES, NUMBERS, SIZES
from peftc.forms.reserved import is_reserved
from tests import zoo
from tests.equations.models import PAPERS, compiled, run

# Mistakes: each has one diagnostic, with the text that is wrong

BODY = "param A[r, d(x)] = kaiming\nparam B[d(out), r] = 0\n"


def check(form: str, equation: str = "h += g(x, r=2)", at: str = "layer[*].attn.q") -> list[Any]:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{form}\nedit e at {at} {{ {equation} }}", zoo.build("bert", torch.float64))
    return list(error.value.diagnostics)


@pytest.mark.parametrize(
    ("form", "code", "text"),
    [
        (f"form g(x, r) {{ {BODY} f = B @ A @ y }}", "P107", "y"),
        (f"form g(x, r) {{ {BODY} f = B @ gelo(A @ x) }}", "P101", "gelo"),
        (f"form g(x, r) {{ {BODY} let u = A @ x f = B @ A @ x }}", "P114", "let u = A @ x"),
        (f"form g(x, r, s = 1) {{ {BODY} f = B @ A @ x }}", "P114", "s = 1"),
        (f"form g(x, r) {{ {BODY} param A[r] = 0 f = B @ A @ x }}", "P111", "A"),
        (f"form g(x, r) {{ {BODY} }}", "P319", "g"),
        (f"form g(x, r) {{ {BODY} f = B @ A @ x f = x }}", "P111", "f"),
        (f"form g(x, r) {{ {BODY} h = B @ A @ x f = B @ A @ x }}", "P107", "h"),
        ("form lora(x, r) { param A[d(out), d(x)] = r f = A @ x }", "P111", "lora"),
        ("form g(x, r, dtype = 1) { param A[d(out), d(x)] = r f = dtype * A @ x }", "P111", "dtype = 1"),
        ("form g(x, r) { param A[d(out), d(x)] per task = r f = A @ x }", "P023", "A"),
        ("form g(x, r) { param A[d(out), d(y)] = r f = A @ x }", "P108", "y"),
        ("form g(x, r) { param A[d(out), d(x)] = r f = [A @ x] }", "P105", "[A @ x]"),
        ("form g(x, h, c, r) { param A[d(out), d(x)] = r f = A @ x + h + c }", "P108", "c"),
    ],
)
def test_mistakes_in_the_text_of_a_form(form: str, code: str, text: str) -> None:
    diagnostics = check(form)
    marked = [(d.code, d.source.text[d.span.start : d.span.end]) for d in diagnostics if d.source and d.span]
    assert (code, text) in marked, marked


@pytest.mark.parametrize(
    ("form", "code", "text"),
    [
        ("form g(x, r) { param A[r, d(x)] = 0 f = A @ A @ x }", "P301", "A @ A @ x"),
        ("form g(x, r) { require 2 * r >= 16 param A[d(out), d(x)] = 0 f = A @ x }", "P317", "require 2 * r >= 16"),
        ("form g(x, r) { param A[d(out), d(x) / 5] = r f = A @ x }", "P318", "d(x) / 5"),
        ("form g(x, r) { param A[rows(out), d(x)] = r f = A @ x }", "P310", "rows(out)"),
        ("form g(x, r) { param A[d(out), d(x)] = r f = A @ x + r @ x }", "P105", "r"),
        ("form g(x, r) { param A[d(out), d(x)] = r f = A[9999] * x }", "P106", "9999"),
        ("form g(x, r) { param A[d(out), d(x)] = norm(w) f = r * A @ x }", "P310", "w"),
        ("form g(x, r) { param s[r] = orthogonal param A[r, d(x)] = 0 f = t(A) @ (s * A @ x) }", "P318", "orthogonal"),
        ("form g(x, r) { param A[d(out), d(x)] = normal(0 - 1) f = r * A @ x }", "P106", "0 - 1"),
        ("form g(x, r, act = relu) { require act <= r param A[d(out), d(x)] = 0 f = r * act(A @ x) }", "P105", "act"),
    ],
)
def test_an_equation_without_meaning_at_a_site(form: str, code: str, text: str) -> None:
    """The diagnostic is at the call, and points into the text of the form."""
    (diagnostic,) = check(form)
    assert diagnostic.code == code
    assert diagnostic.source is not None
    at = diagnostic.source.text[diagnostic.span.start : diagnostic.span.end]
    assert at in ("g(x, r=2)", "x", "r=2"), "the call, or the argument that is wrong"
    (place,) = diagnostic.related
    marked = place.source.text[place.span.start : place.span.end]
    assert marked == text


def test_the_language_reference_names_every_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
    section = page.partition("## Forms of your own")[2].partition("\n## ")[0]
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", section))))
    assert {*FUNCTIONS, *NUMBERS, *SIZES, *INITIAL_VALUES} - {"token_mean", "batch_mean"} <= words


def test_a_file_of_forms_alone_is_right(tmp_path: Path) -> None:
    (tmp_path / "papers.peft").write_text(PAPERS, encoding="utf-8")
    assert main(["check", str(tmp_path / "papers.peft")]) == 0


@pytest.mark.parametrize("at", ["embed", "layer[*].attn.q"])
def test_dropout_at_an_embedding_and_a_linear(at: str) -> None:
    """The mean over many draws is the value without dropout."""
    model = zoo.build("bert", torch.float64)
    equation = "h += text_lora(x, r=3, alpha=6, dropout=0.4)"
    peftc.compile(f"{PAPERS}\nedit e at {at} {{ {equation} }}", model)
    torch.manual_seed(0)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    form = next(m for m in model.modules() if isinstance(m, EquationModule))
    x = torch.arange(20).reshape(4, 5) if at == "embed" else torch.randn(4, 5, 32, dtype=torch.float64)
    mean = torch.stack([form.train()(x) for _ in range(4_000)]).double().mean(0)
    exact = form.eval()(x)
    assert not torch.equal(form.train()(x), form.eval()(x))
    assert (mean - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("name", ["lora", "adapter", "magnitude", "gate"])
def test_torch_compile_has_one_graph(name: str) -> None:
    model = compiled("bert", name, "text_")
    value = run(model, "bert")
    torch._dynamo.reset()
    graph = torch.compile(model, backend="eager", fullgraph=True)
    out = graph(**zoo.inputs("bert", model))
    torch.testing.assert_close(out.logits if "logits" in out else out[0], value, rtol=0, atol=1e-12)


# Once wrong in silence, or an exception of Python


def outputs(spec: str, model: str = "bert", **options: Any) -> tuple[nn.Module, Tensor]:
    one = zoo.build(model, torch.float64).eval()
    peftc.compile(spec, one, seed=0, **options)
    for parameter in peftc.parameters(one).values():
        nn.init.normal_(parameter)
    return one, run(one, model)


@pytest.mark.parametrize(
    "spec",
    [
        "form g(x, h) { param A[d(out), d(x)] = 0 param v[d(h)] = 0 f = A @ x + v * h } "
        "edit e at layer[*].attn.q { h += g(x, h) }",
        "form g(x) { param v[d(x)] = 0 f = v } edit e at layer[*].attn.q { h += g(x) }",
        "form g(x) { param A[d(x)] = 1 f = A * x } edit e at layer[*].attn.q { h = g(x) }",
        "form g(h) { param A = 1 f = A * mean(h, tokens) + h } edit e at layer[*].ffn { h = g(h) }",
    ],
)
@pytest.mark.filterwarnings("ignore:.*P320")
def test_a_fold_changes_nothing(spec: str) -> None:
    model, value = outputs(f"peft 2 {spec}")
    peftc.fold(model)
    torch.testing.assert_close(run(model, "bert"), value, rtol=0, atol=1e-9)


def test_tasks_share_nothing_that_is_trained() -> None:
    form = "form g(x, r = 2) { param A[r, d(x)] per edit = normal param B[d(out), r] = normal f = B @ A @ x }"
    model, _ = outputs(f"peft 2 {form} edit e at layer[*].attn.q per task {{ h += g(x) }}", tasks=["a", "b"])
    names = set(peftc.parameters(model))
    assert all(".tasks." in name for name in names)
    assert len({name for name in names if name.endswith(".A")}) == 2


@pytest.mark.parametrize("value", ["a / a * x", "a * (1 / a) * x", "x / b"])
def test_a_divisor_that_is_zero_at_first(value: str) -> None:
    form = f"form g(x, on = false) {{ param a[d(x)] = 0 param b[d(x)] = 1 if on f = a * x + {value} + 0 * b * x }}"
    (diagnostic,) = check(form, "h += g(x)")
    assert diagnostic.code == "P120"


@pytest.mark.parametrize(
    ("value", "help_"),
    [
        ("log(a) * x", "first value"),
        ("sqrt(a - 1) * x", "first value"),
        ("inverse(A) @ x", "first value"),
        ("solve(A, A) @ x", "first value"),
        ("(u / norm(u))[0] * x", "ratio"),
    ],
)
def test_what_is_not_finite_at_first(value: str, help_: str) -> None:
    lines = "param a[d(x)] = 0 param A[d(x), d(x)] = 0 param u[2, d(x)] = 0"
    (diagnostic,) = check(f"form g(x) {{ {lines} f = {value} + a * x + A @ x + u[0] * x }}", "h += g(x)")
    assert diagnostic.code == "P120"
    assert help_ in str(diagnostic.help)


def test_an_inexact_constant_is_no_identity() -> None:
    text = "peft 2 form g() { param a = 1 / 41 f = a * 41 } edit e at layer[*].attn.q { h *= g() } expect identity(e)"
    assert not peftc.plan(text, zoo.build("bert", torch.float64)).expectations[0].holds


@pytest.mark.parametrize(
    ("form", "equation", "code"),
    [
        ("form g(x) { param A[d(x)] per edit = 1 param C[d(x)] per group = 1 f = A * C * x }", "h += g(x)", "P111"),
        ("form g(x) { param half[d(x)] = 0 f = half * x }", "h += g(x)", "P121"),
        ("form g(x) { param lambda[d(x)] = 0 f = lambda * x }", "h += g(x)", "P121"),
        ("form g(x, h) { param v[d(x)] = 1 f = v * x + h }", "h += g(x)", "P108"),
        ("form g() { f = 1 }", "h *= g()", "P301"),
        ("form g(act = relu) { f = act }", "h *= g()", "P301"),
        ("form g(x) { param A[d(x)] = kaiming param C[d(x)] = A f = A * C * x }", "h += g(x)", "P318"),
        ("form g(x) { param A[d(x)] = relu f = A * x }", "h += g(x)", "P105"),
        ("form g(x) { param A[d(x)] = 0 f = A * relu * x }", "h += g(x)", "P105"),
        ("form g(x) { param A[d(x)] = sqrt(1 - 2) f = A * x }", "h += g(x)", "P120"),
        ("form g(x) { param A[1e300 * 1e300] = 0 f = A * x }", "h += g(x)", "P318"),
        ("form relu(x) { param A[d(x)] = 0 f = A * x }", "h += relu(x)", "P111"),
    ],
)
def test_what_has_no_meaning_has_a_code(form: str, equation: str, code: str) -> None:
    assert code in {diagnostic.code for diagnostic in check(form, equation)}


def test_a_first_value_is_not_reshaped() -> None:
    (diagnostic,) = check("form g() { param A[cols(out), rows(out)] = w f = t(A) }", "w = g()", "layer[0].ffn.up")
    assert diagnostic.code == "P318"


def test_every_activation_is_a_choice() -> None:
    form = "form g(x, act = exp) { param A[d(out), d(x)] = kaiming f = act(A @ x) }"
    for name in ACTIVATIONS:
        plan = peftc.plan(
            f"peft 2 {form} edit e at layer[*].attn.q {{ h += g(x, act={name}) }}", zoo.build("bert", torch.float64)
        )
        assert plan.edits[0].reason.startswith("`g(x)`: `act(A @ x)`") == (name != "none")


def test_an_argument_named_zeros() -> None:
    model = zoo.build("bert", torch.float64)
    form = "form g(x, zeros = 5) { param A[d(x)] = zeros f = A * x }"
    peftc.compile(f"peft 2 {form} edit e at layer[0].attn.q {{ h += g(x) }}", model)
    (parameter,) = peftc.parameters(model).values()
    assert torch.equal(parameter, torch.full_like(parameter, 5.0))


def test_sites_of_other_sizes_share_nothing_of_their_size() -> None:
    form = "form g(x, r = 2) { let n = d(x) param A[r, n] per edit = kaiming param B[d(out), r] = 0 f = B @ A @ x }"
    (diagnostic,) = check(form, "h += g(x)", "layer[*].ffn.up | layer[*].ffn.down")
    assert diagnostic.code == "P305"
    same = f"peft 2 {form} edit e at layer[*].attn.q | layer[*].ffn.up {{ h += g(x) }}"
    assert peftc.plan(same, zoo.build("bert", torch.float64)).edits


def test_dtypes_after_compile() -> None:
    form = "form g(x) { fixed n[d(out), d(x)] = normal(0.1) f = n @ x }"
    model = zoo.build("bert", torch.float32).eval()
    peftc.compile(f"peft 2 {form} edit e at layer[*].attn.q {{ h += g(x) }}", model)
    assert run(model.double(), "bert").dtype == torch.float64


def test_every_name_of_the_module_is_reserved() -> None:
    model, _ = outputs("peft 2 form g(x) { param A[d(x)] = 0 f = A * x } edit e at layer[0].attn.q { h += g(x) }")
    form = next(m for m in model.modules() if isinstance(m, EquationModule))
    own = {*dir(form), *vars(form)} - {"A"}
    assert not {name for name in own if not is_reserved(name)}


def test_keywords_of_version_2_in_joint_specs() -> None:
    model = zoo.build("bert", torch.float64)
    peftc.compile("peft 1 edit form at layer[*].attn.v { h += lora(x, r=2) }", model, name="a")
    with pytest.raises(PeftcError) as error:
        peftc.compile("peft 2 edit e at layer[*].attn.q { h += lora(x, r=2) }", model, name="b")
    assert [d.code for d in error.value.diagnostics] == ["P029"]


# Commands


def test_explain_prints_the_text_of_a_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "papers.peft").write_text(PAPERS, encoding="utf-8")
    assert main(["explain", "text_adapter", str(tmp_path / "papers.peft")]) == 0
    printed = capsys.readouterr().out
    assert "f = up @ act(down @ x + down_bias) + up_bias" in printed
    assert "no: `act(down @ x + down_bias)` is not linear with `act=relu`".replace("`", "") in printed
    assert "13,064 trained and stored for each site" in printed  # 2 · 8 · 768 + 8 + 768
    assert main(["explain", "text_adaptor", str(tmp_path / "papers.peft")]) == 2
    assert "did you mean `text_adapter`?" in capsys.readouterr().err


def test_fmt_upgrades_specs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.peft"
    file.write_text("peft 1\n\nedit frm at layer[*].ffn { h += lora(x, r=2) }\n", encoding="utf-8")
    assert main(["fmt", "--upgrade", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == "peft 2\n\nedit frm at layer[*].ffn { h += lora(x, r=2) }\n"
    keyword = "peft 1\n\nedit form at layer[*].ffn { h += lora(x, r=2) }\n"
    file.write_text(keyword, encoding="utf-8")
    assert main(["fmt", "--upgrade", str(file)]) == 1
    assert file.read_text(encoding="utf-8") == keyword
    assert "P029" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("peft 1\nform g(x) { f = x }\nedit e at layer[*].ffn { h += g(x) }\n", "P028"),
        ("peft 1\nedit e at layer[*].ffn { h += [1] }\n", "P028"),
        ("peft 1\nedit e at layer[*].ffn { h += x @ x }\n", "P003"),
        ("peft 2\nedit e at layer[*].ffn { h += x @ x }\n", "P105"),
    ],
)
def test_what_belongs_to_version_2(text: str, code: str) -> None:
    with pytest.raises(PeftcError) as error:
        peftc.plan(text, zoo.build("bert", torch.float64))
    assert code in {d.code for d in error.value.diagnostics}


def test_a_difference_of_common_sizes_names_them() -> None:
    text = "form g(x) { param A[d(out), d(x)] per edit = 0 f = A @ x }"
    (error,) = check(text, "h += g(x)", "layer[*].attn.q | layer[*].ffn.up")
    assert error.code == "P305"
    assert re.fullmatch(r"`A` is \[\d+, \d+\] first, and \[\d+, \d+\] here", error.notes[0])


@pytest.mark.parametrize("kind", ["param", "fixed"])
def test_a_parameter_of_no_sensible_size(kind: str) -> None:
    text = f"form g(x) {{ {kind} A[99999, 99999, 99] = 0 param B[d(out), d(x)] = 0 f = A[0, 0, 0] * B @ x }}"
    (error,) = check(text, "h += g(x)")
    assert error.code == "P318"


def test_a_product_with_a_negative() -> None:
    text = "form g(x, r) { param A[r, d(x)] = kaiming param B[d(out), r] = 0 f = B @ -A @ x }"
    model = zoo.build("bert", torch.float64)
    peftc.compile(f"peft 2\n{text}\nedit e at layer[*].attn.q {{ h += g(x, r=2) }}\n", model)
    form: Any = next(m for m in model.modules() if isinstance(m, EquationModule))
    with torch.no_grad():
        form.B.normal_()
    x = torch.randn(2, 3, form.A.shape[1], dtype=torch.float64)
    torch.testing.assert_close(form(x), -(x @ form.A.T) @ form.B.T)
