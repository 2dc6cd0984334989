"""A fold takes into account what an instance does beside the code of its class."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from tests.layers import Layers, Network

D = 8


class Block(nn.Module):
    """Calls q, k and v by one line of code: an edit of one is in the code of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.mlp = Network(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x)[:, None] for linear in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + self.mlp(x)


def triple(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) * 3


def plain(self: Any, x: Tensor) -> Tensor:
    return x @ self.weight.T + self.bias


def assign(forward: Any) -> Any:
    def change(linear: Any) -> None:
        linear.forward = MethodType(forward, linear)

    return change


CHANGES: dict[str, Any] = {
    "a forward that scales": assign(triple),
    "a hook that scales": lambda linear: linear.register_forward_hook(lambda _, args, h: h * 3),
    "a hook of the input": lambda linear: linear.register_forward_pre_hook(lambda _, args: (args[0] * 3,)),
    "a forward that computes the product": assign(plain),
    "a norm by a hook": nn.utils.weight_norm,
    "none": lambda linear: None,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("place", ["attn.q", "attn.o", "ffn.down"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_folded_model_computes_the_same(change: str, place: str) -> None:
    torch.manual_seed(0)
    model, x = Layers(Block(), Block()).double().eval(), torch.randn(2, 5, D, dtype=torch.float64)
    for block in model.layers:
        CHANGES[change]({"attn.q": block.q, "attn.o": block.o, "ffn.down": block.mlp.down}[place])  # pyright: ignore
    spec = f"peft 1  edit e at layer[*].{place} {{ h += lora(x, r=2) }}"
    peftc.compile(spec, model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    edited = model(x)
    report = peftc.fold(model)
    torch.testing.assert_close(model(x), edited, rtol=0, atol=1e-10)
    if change in ("a forward that computes the product", "a norm by a hook", "none"):
        assert report.folded
    if change == "a forward that scales":
        assert not report.folded
