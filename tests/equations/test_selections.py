"""`scatter(v, places, n)`: values at places that `peftc.calibrate` selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import peftc
from peftc.equation_code.budget_module import BudgetModule
from peftc.equation_code.buffer_module import BufferModule
from peftc.equation_code.cross_layer_module import CrossLayerModule
from peftc.equation_code.module import EquationModule
from peftc.equation_code.pruning_module import PruningModule
from peftc.equation_code.random_module import RandomModule
from peftc.equation_code.selection_module import SelectionModule
from peftc.forms.reserved import RESERVED_BESIDES
from tests import zoo

# Rows of a map, selected at each site; entries of a diagonal, selected by all sites together.
ROWS = """form some(x, part, select = snip) {
    let k = round(part * d(out))
    param v[k, d(x)] = normal(0.5)
    fixed here[k] = selection(select)
    f = scatter(v, here, d(out)) @ x
}"""
DIAGONAL = """form diagonal(x, part, select = magnitude) {
    param v[round(part * over_sites(d(x)))] per edit = uniform(1)
    fixed here[round(part * over_sites(d(x)))] per edit = selection(select)
    f = scatter(v, here, d(x)) * x
}"""


def compiled(form: str, call: str, **options: Any) -> Any:
    text = f"peft 2\n{form}\nedit e at layer[*].attn.q {{ h += {call} }}"
    return peftc.compile(text, zoo.build("llama", torch.float64), seed=0, **options)


def selections(model: Any) -> list[SelectionModule]:
    return [module for module in model.modules() if isinstance(module, SelectionModule)]


def hooked(maps: list[Tensor]) -> Any:
    """The base with these maps of the input added."""
    base: Any = zoo.build("llama", torch.float64)
    for layer, weight in zip(base.model.layers, maps, strict=True):

        def add(_module: Any, inputs: Any, h: Tensor, weight: Tensor = weight) -> Tensor:
            return h + F.linear(inputs[0], weight)

        layer.self_attn.q_proj.register_forward_hook(add)
    return base.eval()


def test_rows_of_own_parameters_are_selected_by_their_gradients(tmp_path: Path) -> None:
    model = compiled(ROWS, "some(x, part=0.25)")
    batch = zoo.inputs("llama", model, labels=True)
    firsts = [form.first_values().requires_grad_() for form in selections(model)]
    hooked(firsts)(**batch).loss.backward()
    assert peftc.calibrate(model, [batch])["e"] == sum(round(len(first) / 4) for first in firsts)
    maps: list[Tensor] = []
    for form, first in zip(selections(model), firsts, strict=True):
        assert first.grad is not None
        scores = (first * first.grad).abs().sum(1)
        places = form.get_buffer("here")
        assert set(places.tolist()) == set(scores.topk(len(places))[1].tolist())
        maps.append(torch.zeros_like(first).index_copy(0, places, first[places].detach()))
    torch.testing.assert_close(model.train()(**batch).logits, hooked(maps)(**batch).logits, rtol=0, atol=1e-11)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama", torch.float64))
    torch.testing.assert_close(again.train()(**batch).logits, hooked(maps)(**batch).logits, rtol=0, atol=1e-11)
    peftc.fold(model)
    torch.testing.assert_close(model.eval()(**batch).logits, hooked(maps)(**batch).logits, rtol=0, atol=1e-10)


def test_all_sites_select_together_and_differ_in_their_number() -> None:
    model = compiled(DIAGONAL, "diagonal(x, part=0.3)")
    (form,), batch = selections(model), zoo.inputs("llama", model)
    first = form.first_values()
    assert len(first) == form.unit_total == 32 * len(model.model.layers)
    with pytest.raises(peftc.PeftcError, match="P540"):
        model.train()(**batch)
    peftc.calibrate(model)
    places = first.abs().topk(round(0.3 * len(first)))[1]
    whole = torch.zeros_like(first).index_copy(0, places, first[places])
    assert len(peftc.parameters(model)) == 1
    want = hooked([part.diag() for part in whole.split(32)])(**batch).logits
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=1e-11)
    assert len({region.code for region in peftc.graphs(model).values()}) == 1, "the layers have one code"


def test_lines_that_select_may_not_be_there(tmp_path: Path) -> None:
    form = """form whole(x, wide = true, select = magnitude) {
        let part = 0 if wide
        let part = 1 if wide == false
        param v[4, d(x)] = normal
        fixed here[4] = selection(select) if part
        f = scatter(v, here, d(out)) @ x if part
        f = t(v) @ (v @ x) if wide
    }"""
    model = compiled(form, "whole(x)").train()
    batch = zoo.inputs("llama", model)
    (v, *_) = values = list(peftc.parameters(model).values())
    assert float(v.detach().std()) > 0.5, "drawn as any other parameter"
    want = hooked([p.detach().T @ p.detach() for p in values])(**batch).logits
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=1e-11)
    with pytest.raises(peftc.PeftcError, match="P541"):
        peftc.calibrate(model)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama", torch.float64))
    torch.testing.assert_close(again(**batch).logits, want, rtol=0, atol=1e-11)
    peftc.calibrate(compiled(form, "whole(x, wide=false)"))


def test_random_places_depend_on_the_argument_alone() -> None:
    one, two, other = (
        selections(compiled(DIAGONAL, f"diagonal(x, part=0.3, select=random, seed={seed})"))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(one.get_buffer("here"), two.get_buffer("here"))
    assert not torch.equal(one.get_buffer("here"), other.get_buffer("here"))
    assert one.get_buffer("here").unique().equal(one.get_buffer("here"))


LINE = "fixed here[n] = selection(select)"


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (f"param v[n] = 0 {LINE} f = scatter(2 * v, here, d(x)) * x", "P105"),
        (f"param v[n] = 0 param u[n] = 0 {LINE} f = scatter(v, u, d(x)) * x + scatter(v, here, d(x)) * x", "P105"),
        (f"param v[n] per edit = 0 {LINE} f = scatter(v, here, d(x)) * x", "P105"),
        (f"param v[2] = 0 {LINE} f = scatter(v, here, d(x)) * x", "P105"),
        (f"param v[n] = 0 {LINE} f = scatter(v, here, d(x)) * x + total(scatter(v, here, 2 * d(x)))", "P111"),
        (f"param v[n] = 0 param u[n] = 0 {LINE} f = scatter(v, here, d(x)) * (x + scatter(u, here, d(x)))", "P111"),
        (f"param v[n] = 0 {LINE} f = scatter(v, here, d(x) / 3) * x", "P106"),
        ("param v[n] = 0 param here[n] = selection(select) f = scatter(v, here, d(x)) * x", "P105"),
        ("param v[n] = 0 fixed here[n] = selection(n) f = scatter(v, here, d(x)) * x", "P105"),
        ("param v[n] = 0 fixed here[n] = selection f = scatter(v, here, d(x)) * x", "P105"),
        ("param units[n] = 0 fixed here[n] = selection(select) f = scatter(units, here, d(x)) * x", "P121"),
        (
            "param v[over_sites(2)] per edit = 0 fixed here[over_sites(2)] per edit = selection(select) "
            "f = n * scatter(v, here, d(x)) * x",
            "P318",
        ),
    ],
)
def test_refusals(lines: str, code: str) -> None:
    text = f"peft 2\nform g(x, n, select = snip) {{ {lines} }}\nedit e at layer[0].attn.q {{ h += g(x, n=4) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value


def test_a_change_of_a_weight_has_no_scores_of_its_own() -> None:
    text = "form g(n, select = snip) { param v[n] = 0 fixed here[n] = selection(select) f = scatter(v, here, d(out)) }"
    with pytest.raises(peftc.PeftcError, match="P107"):
        peftc.plan(f"peft 2\n{text}\nedit e at layer[*].norm {{ w += g(n=3) }}", zoo.build("llama"))


@pytest.mark.parametrize(
    ("way", "module"),
    [
        ("random", RandomModule),
        ("buffer", BufferModule),
        ("budget", BudgetModule),
        ("selection", SelectionModule),
        ("below", CrossLayerModule),
        ("pruned", PruningModule),
    ],
)
def test_names_of_the_modules_are_reserved(way: str, module: type[EquationModule]) -> None:
    own = {name for name in {*dir(module)} - {*dir(EquationModule)} if not name.startswith("_")}
    assert own <= RESERVED_BESIDES[way]


@pytest.mark.parametrize(
    "lines",
    [
        "let i = random(n) if some param A[n] = 1 f = A[i] * x if some f = A[0] * x if some == false",
        "param A[n] = 1 fixed B[n] = buffer if some f = A[0] * B[0] * x if some f = A[0] * x if some == false",
        "param v[n] = 1 f = total(budget(v, 1, 9, 0, 0, 1, 0.5, 0.5)) * x if some f = total(v) * x if some == false",
    ],
)
def test_what_changes_besides_training_may_not_be_there(lines: str, tmp_path: Path) -> None:
    model = compiled(f"form g(x, n, some = false) {{ {lines} }}", "g(x, n=3)").train()
    batch = zoo.inputs("llama", model)
    logits = model(**batch).logits
    logits.sum().backward()
    peftc.step(model, 1)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama", torch.float64)).train()
    torch.testing.assert_close(again(**batch).logits, logits, rtol=0, atol=1e-12)
