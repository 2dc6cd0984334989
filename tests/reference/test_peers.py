"""The references of LoRA, DoRA and (IA)³ are PEFT's, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.reference import methods, peers
from tests.reference.test_methods import draw, fresh, linear_weights

ROLES = "q k v o up gate down"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def leaves(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone().requires_grad_() for key, value in weights.items()}


def backward(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs)[0]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach()


def assert_same(ours: nn.Module, theirs: nn.Module, mine: dict[str, Tensor], parameters: peers.Parameters) -> None:
    inputs = zoo.inputs("bert", ours) if not ours.config.is_encoder_decoder else zoo.inputs("bart", ours)
    assert (backward(ours, inputs) - backward(theirs, inputs)).abs().max() < 1e-10
    for key, parameter in parameters.items():
        want, got = parameter.grad, mine[key].grad
        assert want is not None
        assert got is not None
        assert (want.reshape(got.shape) - got).abs().max() < 1e-10, key


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_lora_and_dora(name: str, dora: bool) -> None:
    one, two = fresh(name), fresh(name)
    sites = peers.targets(one, ROLES)
    weights = linear_weights(one, ROLES)
    for path, rows in sites:
        weights[f"e/{path}/magnitude.m"] = one.w(rows)[0].norm(dim=1) * (1 + draw(3, one.w(rows)[0].shape[0]))
    mine = leaves(weights)
    roles = " ".join(r for r in ROLES.split() if any(path.endswith("." + r) for path, _ in sites))
    (methods.dora if dora else methods.lora)("e", roles, alpha=8.0)(one, mine)
    model, parameters = peers.lora(two, sites, weights, "e", 8.0, dora)
    assert_same(one.model, model, mine, parameters)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_ia3(name: str) -> None:
    one, two = fresh(name), fresh(name)
    weights = linear_weights(one, "k v")
    for i, ffn in enumerate(one.ffns):
        weights[f"e/{ffn.path}.hidden/vector.scale"] = 1 + draw(i, one.w(ffn.down)[0].shape[1])
    mine = leaves(weights)
    outputs = [(f"e/{path}/vector.scale", rows) for path, rows in peers.targets(one, "k v")]
    inputs = [(f"e/{ffn.path}.hidden/vector.scale", ffn.down) for ffn in one.ffns]
    if outputs:
        methods.scaled("e", "k v")(one, mine)
    methods.scaled_hidden("e")(one, mine)
    model, parameters = peers.ia3(two, outputs, inputs, weights)
    assert_same(one.model, model, mine, parameters)
