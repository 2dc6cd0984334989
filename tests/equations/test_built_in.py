"""Built-in forms that are texts, and what their lines can say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.cli.main import main
from peftc.diagnostics import PeftcError
from peftc.equations.checks import check_form
from peftc.equations.table import FORMS
from peftc.filesystem import resources
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from tests import zoo
from tests.equations.models import run

LORA = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=3, alpha=6) }\n"


def built_in(name: str) -> ast.Form:
    spec = parse_text(resources.forms()[name].read_text(encoding="utf-8"))
    (form,) = spec.statements
    assert isinstance(form, ast.Form)
    return form


@pytest.mark.parametrize("name", resources.forms())
def test_a_text_of_the_package_is_right(name: str) -> None:
    path = resources.forms()[name]
    assert built_in(name).name == name == path.stem
    errors = [d.code for d in check_form(built_in(name))]
    assert errors == ["P111"], "it has the name of a built-in form, and no other error"
    assert main(["fmt", "--check", str(path)]) == 0
    form = FORMS[name]
    assert form.paper
    assert all("an argument of" not in param.doc for param in form.arguments)


def drawn(model: nn.Module) -> nn.Module:
    for parameter in peftc.parameters(model).values():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return model


def test_an_adapter_means_what_its_texts_say(tmp_path: Path) -> None:
    """As if the package had another `lora` by now."""
    base = zoo.build("bert", torch.float64).eval()
    before = run(base, "bert")
    model = drawn(peftc.compile(LORA, zoo.build("bert", torch.float64).eval(), seed=0))
    peftc.save(model, tmp_path / "a")
    metadata = tmp_path / "a" / "adapter.json"
    description = json.loads(metadata.read_text())
    assert set(description["forms"]) == {"lora"}
    changed = description["forms"]["lora"].replace("f = scale", "f = 0 * scale")
    metadata.write_text(json.dumps(description | {"forms": {"lora": changed}}))
    other = peftc.load(tmp_path / "a", zoo.build("bert", torch.float64).eval())
    assert torch.equal(run(other, "bert"), before)
    assert not torch.equal(run(model, "bert"), before)
    peftc.save(other, tmp_path / "b")
    again = json.loads((tmp_path / "b" / "adapter.json").read_text())
    assert again["forms"] == {"lora": changed}
    assert "form lora" not in again["spec"]
    with pytest.raises(PeftcError, match="another `lora`") as refused:
        peftc.compile(LORA.replace("edit e", "edit f"), other)
    assert [d.code for d in refused.value.diagnostics] == ["P412"]
    with pytest.raises(PeftcError, match="another `lora`"):
        peftc.load(tmp_path / "b", model, prefix="second")
    with pytest.raises(PeftcError, match="another `lora`"):
        peftc.warm_start(model, tmp_path / "b")
    metadata.write_text(json.dumps(description | {"forms": {"lora": "edit e at layer { h *= 2 }"}}))
    with pytest.raises(PeftcError, match="P5"):
        peftc.load(tmp_path / "a", zoo.build("bert", torch.float64))


def code(form: str, equation: str, at: str = "layer[*].attn.q") -> str:
    model = zoo.build("bert", torch.float64).eval()
    peftc.compile(f"peft 2\n{form}\nedit e at {at} {{ {equation} }}", model, seed=0)
    run(model, "bert")
    (source, *_) = {region.code for region in peftc.graphs(model).values()}
    return source


@pytest.mark.parametrize("product", ["s * (B @ A) @ x", "2 * (B @ (s * A) @ x)", "(0 - s) * B @ A @ x / 3"])
def test_products_are_computed_in_the_order_of_the_fewest_operations(product: str) -> None:
    head = "form g(x, r, s = 2) { param A[r, d(x)] = kaiming param B[d(out), r] = kaiming"
    source = code(f"{head} f = {product} }}", "h += g(x, r=2)")
    assert "low_rank_linear(input, self.weight, self.bias, g.A, g.B, " in source
    assert "matmul" not in source
    assert " * " not in source.partition("def ")[2].partition("#")[0], "the number is an argument of the sum"


def test_a_product_of_wide_matrices_is_computed_once() -> None:
    head = "form g(x, r) { param A[r, d(x)] = kaiming param B[d(out), r] = kaiming"
    source = code(f"{head} f = B @ (A @ x) }}", "h += g(x, r=2000)")
    assert "torch.matmul(g.B, A)" in source
    assert source.count("nn.functional.linear(") == 1


def test_a_number_multiplies_where_a_value_is_thinnest() -> None:
    form = "form g(x, r) { param A[r, d(x)] = kaiming param B[d(out), r] = kaiming f = 3 * B @ A @ x }"
    source = code(form, "h *= g(x, r=2)")
    assert source.index("* 3") < source.index("g.B"), "between the two products"


@pytest.mark.parametrize(
    ("lines", "call", "message"),
    [
        ("let z = x if a let z = 2 * x if word != one f = A @ z", "a=true", "two lines define `z`"),
        ("let z = x if a f = A @ z", "a=false", "no condition of `z` holds"),
        ("f = A @ x if a f = A @ x + x if a", "a=true", "two lines define `f`"),
        ("f = A @ x if a f = x if word == one", "a=false, word=two", "no condition of its values"),
        ("let y = 2 if a param s[d(x)] = 1 if y f = A @ (s * x + x)", "a=false", "no condition of `y` holds"),
        ("param s[d(x)] = 1 if a f = A @ (s * x)", "a=false", "`s` is not there"),
        ("param s[d(x)] = 1 if a f = A @ ((0 - s) * x)", "a=false", "is no factor"),
        ("param s[d(x)] = 1 if a param u[d(x)] = 1 if a f = A @ ((s + u) * x)", "a=false", "is no factor"),
        ("param s[d(x)] = 1 if a let z = s f = A @ (x * z + x)", "a=false", "`z` is not there"),
    ],
)
def test_conditions_that_leave_a_name_without_one_value(lines: str, call: str, message: str) -> None:
    extra = "" if "word" in lines else "require 1 < 2 if word == one require 1 < 2 if word == two "
    head = f"peft 2\nform g(x, a = true, word = two) {{ param A[d(out), d(x)] = 0 if word != three {extra}"
    with pytest.raises(PeftcError) as refused:
        peftc.plan(f"{head}{lines} }}\nedit e at layer[*].attn.q {{ h += g(x, {call}) }}", zoo.build("bert"))
    assert any(message in d.message for d in refused.value.diagnostics), refused.value


def test_an_argument_is_one_of_the_words_that_lines_compare_it_with() -> None:
    head = (
        "peft 2\nform g(x, way = one) { param A[d(out), d(x)] = 0 f = A @ x if way == one f = A @ x + x if way == two }"
    )
    edit = "\nedit e at layer[*].attn.q { h += g(x, way=WORD) }"
    for word in ("one", "two"):
        peftc.plan(head + edit.replace("WORD", word), zoo.build("bert"))
    with pytest.raises(PeftcError, match="P10"):
        peftc.plan(head + edit.replace("WORD", "three"), zoo.build("bert"))


def test_names_that_differ_in_case_alone_fold_apart() -> None:
    form = "form g(x) { param A[d(out), d(x)] = normal param a[d(out)] = normal f = a * A @ x + a }"
    model: Any = zoo.build("bert", torch.float64).eval()
    peftc.compile(f"peft 2\n{form}\nedit e at layer[*].attn.q {{ h += g(x) }}", model, seed=0)
    value = run(model, "bert")
    peftc.fold(model)
    torch.testing.assert_close(run(model, "bert"), value, rtol=1e-9, atol=1e-9)


def test_a_form_of_heads_stands_in_both_layouts() -> None:
    parameters = "param K[heads(q), r, d_head(q)] = normal param V[heads(q), d_head(q), r] = normal"
    form = f"form g(q, r) {{ {parameters} f = V @ K @ q }}"
    for at, state in (("layer[*].attn.heads", "h"), ("layer[*].attn", "q")):
        model: Any = zoo.build("bert", torch.float64).eval()
        peftc.compile(f"peft 2\n{form}\nedit e at {at} {{ {state} += g(q, r=2) }}", model, seed=0)
        reference: Any = zoo.build("bert", torch.float64).eval()
        peftc.compile(f"peft 1\nedit e at {at} {{ {state} += bottleneck(q, r=2, act=none) }}", reference, seed=0)
        others = peftc.parameters(reference)
        for saved, parameter in peftc.parameters(model).items():
            other = others[saved.replace("/g.K", "/bottleneck.keys").replace("/g.V", "/bottleneck.values")]
            with torch.no_grad():
                other.copy_(parameter if saved.endswith("K") else parameter.mT)
        torch.testing.assert_close(run(model, "bert"), run(reference, "bert"), rtol=0, atol=1e-10)


def test_a_hook_changes_no_dtype_and_sees_the_backward() -> None:
    model: Any = drawn(peftc.compile(LORA, zoo.build("bert", torch.float32).eval(), seed=0))
    linear = model.get_submodule("bert.encoder.layer.0.attention.self.query")
    x = torch.randn(2, 3, linear.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        plain = linear(x)
        form = next(m for m in linear.modules() if type(m).__name__ == "EquationModule")
        handle = form.register_forward_hook(lambda *_: None)
        hooked = linear(x)
    handle.remove()
    assert plain.dtype == hooked.dtype == torch.bfloat16
    torch.testing.assert_close(hooked, plain, rtol=2e-2, atol=2e-2)
    calls: list[str] = []
    own = nn.modules.module.register_module_full_backward_hook(lambda m, *_: calls.append(type(m).__name__))
    linear(x.requires_grad_()).sum().backward()
    own.remove()
    assert "EquationModule" in calls


def test_dropout_is_off_where_the_form_is_not_trained() -> None:
    model = drawn(peftc.compile(LORA.replace("alpha=6", "dropout=0.5"), zoo.build("bert", torch.float64), seed=0))
    linear = model.get_submodule("bert.encoder.layer.0.attention.self.query").train()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    assert not torch.equal(linear(x), linear(x))
    next(m for m in linear.modules() if type(m).__name__ == "EquationModule").eval()
    assert torch.equal(linear(x), linear(x))


def test_a_ratio_along_the_other_side_of_a_square_weight_is_no_identity() -> None:
    """m is as long as the inputs are many: m / norm(w) is not 1."""
    form = "form g(w) { param m[cols(w)] = norm(w) f = ratio(m, frozen(norm(w))) * w }"
    plan = peftc.plan(f"peft 2\n{form}\nedit e at layer[*].attn.q {{ w = g(w) }}", zoo.build("bert"))
    assert not plan.edits[0].identity
    right = form.replace("ratio(m,", "ratio(column(m),").replace("cols", "rows")
    plan = peftc.plan(f"peft 2\n{right}\nedit e at layer[*].attn.q {{ w = g(w) }}", zoo.build("bert"))
    assert plan.edits[0].identity
