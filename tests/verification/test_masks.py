"""Masks of every form leave the rows of a prefix visible, in the reference as in the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8
Mask = Callable[[Tensor, Tensor], Tensor]
MASKS: dict[str, Mask] = {
    "masked_fill": lambda scores, mask: scores.masked_fill(mask == 0, -1e9),
    "where visible": lambda scores, mask: torch.where(mask != 0, scores, -1e9),
    "where hidden": lambda scores, mask: torch.where(mask == 0, -1e9, scores),
    "method": lambda scores, mask: scores.where(mask != 0, -1e9),
    "sum": lambda scores, mask: scores + (mask - 1) * 1e9,
}


class Layer(nn.Module):
    def __init__(self, hide: Mask) -> None:
        super().__init__()
        self.norm, self.hide = nn.LayerNorm(D), hide
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.heads(self.q(y)), self.heads(self.k(y)), self.heads(self.v(y))
        weights = self.hide(q @ k.transpose(-2, -1) / 2, mask[:, None, None]).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, hide: Mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(hide), Layer(hide)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.parametrize("name", MASKS)
def test_the_rows_of_a_prefix_are_visible(name: str) -> None:
    model = Model(MASKS[name]).double()
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.float64)
    sample = {"x": torch.randn(2, 5, D, dtype=torch.float64), "mask": mask}
    peftc.compile("peft 1  edit e at layer[*].attn { kv = concat(prefix(len=2), kv) }", model, seed=0, sample=sample)
    assert not peftc.verify(model, sample).findings
