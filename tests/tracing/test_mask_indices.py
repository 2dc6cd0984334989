"""Code that indexes with the positions where a mask is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers, Network
from tests.scaled_rows import assert_scales

D = 8


def cleared_by_where(mask: Tensor, x: Tensor) -> Tensor:
    mask[torch.where(mask.sum(-1) == mask.shape[-1])] = False
    return x.sum() * 0 + mask


def cleared_by_nonzero(mask: Tensor, x: Tensor) -> Tensor:
    mask[mask.all(-1).nonzero(as_tuple=True)] = False
    return x.sum() * 0 + mask


def read_by_where(mask: Tensor, x: Tensor) -> Tensor:
    rows = torch.where(mask.all(-1))
    return mask + x[rows].sum()


def of_fewer_rows(mask: Tensor, x: Tensor) -> Tensor:
    """Indices of the first rows: a mask of these is no key for all."""
    mask[torch.where(mask[:, :2].all(-1))] = False
    return x.sum() * 0 + mask


def written_in_between(mask: Tensor, x: Tensor) -> Tensor:
    full = mask.all(-1)
    rows = torch.where(full)
    full.logical_not_()
    mask[rows] = False
    return x.sum() * 0 + mask


class Masked(nn.Module):
    """Mask2Former: queries that may attend to nothing attend to everything."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.ffn, self.change = Network(D), change

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        hidden = self.change(scores > scores.mean(), x)
        weights = scores.masked_fill(hidden.bool(), -1e3).softmax(-1)
        x = x + self.o(weights @ self.v(x))
        return x + self.ffn(x)


@pytest.mark.parametrize("change", [cleared_by_where, cleared_by_nonzero, read_by_where])
def test_the_mask_stands_for_its_indices(change: Any) -> None:
    torch.manual_seed(0)
    model = Layers(Masked(change), Masked(change))

    def rows_of(model: Layers) -> list[list[Tensor]]:
        return [[layer.o.weight, layer.o.bias] for layer in model.layers]  # pyright: ignore

    assert_scales(model, {"x": torch.randn(2, 4, D)}, "layer[*].attn.o", rows_of)


@pytest.mark.parametrize("change", [of_fewer_rows, written_in_between])
def test_indices_that_the_mask_does_not_stand_for(change: Any) -> None:
    table = peftc.sites(Layers(Masked(change), Masked(change)), sample={"x": torch.randn(2, 4, D)})
    assert [part.module for part in table.untraced] == ["layers.0", "layers.1"]
