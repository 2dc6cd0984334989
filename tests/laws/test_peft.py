"""LoRA, DoRA and (IA)³ are PEFT's: same weights, same outputs, same gradients, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests import zoo
from tests.laws.harness import Case, Inputs, close, loss
from tests.laws.recipe import Recipe
from tests.reference import methods, peers
from tests.reference.reference import Reference

SITES = "layer[*].attn.o | layer[*].ffn.up | layer[*].ffn.down"
PLAIN = "layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | " + SITES


def sites_of(name: str) -> str:
    """PEFT changes a fused linear as a whole: on GPT-2, q, k and v are left to the glob below."""
    return SITES if name == "gpt2" else PLAIN


def assert_same(case: Case, model: nn.Module, found: peers.Parameters) -> None:
    assert set(found) == set(case.parameters)
    for given in case.batches:
        _same_outputs(case.model, model, given)
    for key, parameter in found.items():
        want, got = parameter.grad, case.parameters[key].grad
        assert want is not None
        assert got is not None
        close(got, want.reshape(got.shape), key)


def _same_outputs(ours: nn.Module, theirs: nn.Module, given: Inputs) -> None:
    mine, total = loss(ours, given)
    total.backward()
    other, total = loss(theirs, given)
    total.backward()
    close(mine, other, "outputs")


def _never(ref: Reference, weights: methods.Weights) -> None:
    raise AssertionError("PEFT is the reference here")


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_lora_and_dora(name: str, dora: bool) -> None:
    equation = "w = magnitude(w + lowrank(r=4, alpha=8))" if dora else "h += lora(x, r=4, alpha=8)"
    case = Case(Recipe("peft", f"edit e at {sites_of(name)} {{ {equation} }}", _never, True), name).at_random()
    ref = Reference(name, zoo.build(name, torch.float64))
    roles = "o up down" if name == "gpt2" else "q k v o up down"
    model, found = peers.lora(ref, peers.targets(ref, roles), case.parameters, "e", 8.0, dora)
    assert_same(case, model, found)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_fused_linear_by_its_module_name(dora: bool) -> None:
    """`at "transformer.h.*.attn.c_attn"`: the Conv1D as a whole, as PEFT does it."""
    equation = "w = magnitude(w + lowrank(r=4, alpha=8))" if dora else "h += lora(x, r=4, alpha=8)"
    glob = "transformer.h.*.attn.c_attn"
    case = Case(Recipe("peft", f'edit e at "{glob}" {{ {equation} }}', _never, True), "gpt2").at_random()
    ref = Reference("gpt2", zoo.build("gpt2", torch.float64))
    paths = sorted({key.split("/")[1] for key in case.parameters})
    assert len(paths) == len(ref.layers)
    sites = [(path, methods.Rows(f"transformer.h.{i}.attn.c_attn")) for i, path in enumerate(paths)]
    model, found = peers.lora(ref, sites, case.parameters, "e", 8.0, dora)
    assert_same(case, model, found)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_ia3(name: str) -> None:
    spec = "edit ff at layer[*].ffn.hidden { h *= vector(init=1) }"
    if name != "gpt2":
        spec += "\nedit kv at layer[*].attn.k | layer[*].attn.v { h *= vector(init=1) }"
    case = Case(Recipe("peft", spec, _never, True), name).at_random()
    ref = Reference(name, zoo.build(name, torch.float64))
    outputs = [(f"kv/{path}/vector.scale", rows) for path, rows in peers.targets(ref, "k v")]
    inputs = [(f"ff/{ffn.path}.hidden/vector.scale", ffn.down) for ffn in ref.ffns]
    model, found = peers.ia3(ref, outputs, inputs, case.parameters)
    assert_same(case, model, found)
