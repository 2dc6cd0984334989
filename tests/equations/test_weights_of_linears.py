"""`weight(k, v)`: equations read the weights of Linears of their sub-layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import close, randomise
from tests.refusals import refused

FORM = """form mapped(x, w) {
    param A[d(out), rows(w)] = kaiming
    f = A @ w @ x
}
"""
# A selector, the Linears, and the names of their modules in a layer, by model.
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "llama": ("layer[*].attn", "q, k", ("self_attn.q_proj", "self_attn.k_proj")),
    "bert": ("layer[*].ffn", "up", ("intermediate.dense",)),
    "opt": ("layer[*].attn", "v", ("self_attn.v_proj",)),
    "gpt2": ("layer[*].attn", "k, q", ()),
}


def compiled(name: str, equation: str, **options: Any) -> Any:
    model = zoo.build(name, torch.float64, **options)
    selector = CASES[name][0]
    peftc.compile(f"peft 2\n{FORM}edit e at {selector} {{ {equation} }}\n", model, seed=0)
    randomise(peftc.parameters(model))
    return model


def weight_of(name: str, layer: torch.nn.Module, modules: tuple[str, ...]) -> torch.Tensor:
    if name == "gpt2":  # one module has q, k and v side by side, transposed
        q, k, _ = layer.get_submodule("attn.c_attn").get_parameter("weight").t().chunk(3)
        return torch.cat([k, q])
    return torch.cat([layer.get_submodule(module).get_parameter("weight") for module in modules])


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_base_one_above_the_other(name: str) -> None:
    selector, linears, modules = CASES[name]
    model = compiled(name, f"h += mapped(x, weight({linears}))")
    layers = [module for module in model.modules() if type(module).__name__.endswith(("Layer", "Block"))]
    assert layers
    inputs = zoo.inputs(name, model)
    whole = model(**inputs)[0]
    # With the product of A and these weights as the A of a Linear, the same model.
    plain = zoo.build(name, torch.float64)
    spec = f"form one(x) {{ param A[d(out), d(x)] = 0 f = A @ x }}\nedit e at {selector} {{ h += one(x) }}"
    peftc.compile(f"peft 2\n{spec}\n", plain, seed=0)
    own, others = (list(peftc.parameters(one).values()) for one in (model, plain))
    weights = [weight_of(name, layer, modules) for layer in layers if hasattr(layer, "self_attn") or name != "opt"]
    for parameter, other, weight in zip(own, others, weights, strict=True):
        other.data = parameter.detach() @ weight.detach()
    close(plain(**inputs)[0], whole, name)
    assert (whole - zoo.build(name, torch.float64)(**inputs)[0]).abs().max() > 1e-3
    assert not any(parameter.requires_grad for n, parameter in model.named_parameters() if "peftc" not in n)


def test_verification_knows_them() -> None:
    model = compiled("llama", "h += mapped(x, weight(q, k))")
    report = peftc.verify(model)
    assert report.ok
    assert any("outputs equal the equations" in str(check) for check in report.checks)


def test_they_are_saved_loaded_and_removed(tmp_path: Path) -> None:
    model = compiled("llama", "h += mapped(x, weight(q, k))")
    inputs = zoo.inputs("llama", model)
    before = model(**inputs).logits
    peftc.save(model, tmp_path / "own")
    loaded = peftc.load(tmp_path / "own", zoo.build("llama", torch.float64))
    assert torch.equal(loaded(**inputs).logits, before)
    peftc.remove(model)
    assert torch.equal(model(**inputs).logits, zoo.build("llama", torch.float64)(**inputs).logits)


REFUSALS = {
    "no such Linear": ("P307", "h += mapped(x, weight(gate))"),
    "an expression": ("P108", "h += mapped(x, weight(2 * k))"),
    "nothing": ("P108", "h += mapped(x, weight())"),
    "an argument": ("P108", "h += mapped(x, weight(k, rows=2))"),
    "other inputs": ("P301", "h += mapped(x, weight(up, down))"),
    "no matrix of the state": ("P301", "h += weight(q)"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    code, equation = REFUSALS[case]
    model = zoo.build("llama")
    place = "ffn" if "up" in equation else "attn"
    refused(code, lambda: peftc.compile(f"peft 2\n{FORM}edit e at layer[*].{place} {{ {equation} }}\n", model), model)


@pytest.mark.parametrize(
    "other", ["edit k at layer[*].attn.k { h += lora(x, r=2) }", "edit k at layer[1].attn.k { w += lowrank(r=2) }"]
)
def test_what_another_edit_changes_is_not_read(other: str) -> None:
    model = zoo.build("llama")
    spec = f"peft 2\n{FORM}edit e at layer[*].attn {{ h += mapped(x, weight(q, k)) }}\n{other}\n"
    diagnostic = refused("P324", lambda: peftc.compile(spec, model), model)
    assert "`k` changes that Linear" in diagnostic.message


def test_edits_of_other_linears_stand_beside_it() -> None:
    model = zoo.build("gpt2", torch.float64)
    edits = "edit e at layer[*].attn { h += mapped(x, weight(q, k)) }\nedit v at layer[*].attn.v { h += lora(x, r=2) }"
    peftc.compile(f"peft 2\n{FORM}{edits}\n", model, seed=0)
    randomise(peftc.parameters(model))
    inputs = zoo.inputs("gpt2", model)
    before = model(**inputs).logits
    peftc.fold(model, only=["v"])
    close(model(**inputs).logits, before, "gpt2")
