"""Rows that join an attention which the model computes itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import peftc
from benchmarks.families import build
from tests.layers import Layers


def test_a_scale_of_joined_rows_takes_its_dtype_from_the_keys() -> None:
    """A form without an input has no keys to read here: the attention is no call of a function."""
    outputs = list[torch.Tensor]()
    for factor, scale in (("scalar(init=3) * ", 1), ("", 3)):
        model, inputs = build("causal-lm", "bloom")
        model = model.double()
        peftc.compile(f"peft 2\nedit e at layer[*].attn {{ kv = concat({factor}prefix(len=3), kv) }}\n", model, seed=0)
        with torch.no_grad():
            for name, parameter in peftc.parameters(model).items():
                if name.endswith((".key", ".value")):
                    torch.manual_seed(len(name))
                    parameter.copy_(scale * torch.randn(parameter.shape, dtype=torch.float64))
            outputs.append(model(**inputs).logits)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-10)


D, HEADS = 8, 2
SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # of which each is one for all keys of a query
    "the largest is subtracted": lambda s: s - s.amax(-1, keepdim=True).detach(),
    "a number for each query": lambda s: s + torch.linspace(0, 3, s.shape[-2], dtype=s.dtype)[:, None],
    "a number": lambda s: 2 - s,
    "a soft cap": lambda s: 3 * torch.tanh(s / 3),
}


class Layer(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.rows: tuple[Tensor, Tensor] | None = None  # a reference has keys and values (heads, rows, d_head)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rows is not None:
            k, v = (torch.cat([r.expand(len(x), -1, -1, -1), t], 2) for r, t in zip(self.rows, (k, v), strict=True))
        return x + (self.change(q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", SCORES)
def test_what_is_done_to_all_scores_of_a_query_is_done_to_those_of_joined_rows(name: str) -> None:
    torch.manual_seed(0)
    model, x = Layers(Layer(SCORES[name]), Layer(SCORES[name])).double().eval(), torch.randn(2, 5, D).double()
    reference = copy.deepcopy(model)
    peftc.compile(
        "peft 2\nedit e at layer[*].attn { kv = concat(prefix(len=3), kv) }\n", model, seed=0, sample={"x": x}
    )
    values = iter(peftc.parameters(model).values())
    for layer in reference.layers:
        assert isinstance(layer, Layer)
        key, value = islice(values, 2)
        layer.rows = key.detach(), value.detach()
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-12)
    assert (model(x) - peftc.remove(model)(x)).abs().max() > 1e-2
