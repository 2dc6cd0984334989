"""Keys and values of overlapping windows: one convolution computes both, whose result is padded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D, H, E, BLOCK, HALO = 8, 2, 4, 2, 1
functional: Any = nn.functional


class Halo(nn.Module):
    """HaloNet: the rows of each head are those of its keys, then those of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Conv2d(D, D, 1), nn.Conv2d(D, 2 * D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, blocks, window = x.shape[0], x.shape[2] // BLOCK, BLOCK + 2 * HALO
        q = self.q(x).reshape(batch * H, E, blocks, BLOCK, blocks, BLOCK).permute(0, 2, 4, 3, 5, 1).flatten(3, 4)
        kv = functional.pad(self.kv(x), [HALO] * 4).unfold(2, window, BLOCK).unfold(3, window, BLOCK)
        kv = kv.reshape(batch * H, 2 * E, blocks, blocks, -1).permute(0, 2, 3, 4, 1)
        k, v = kv.split([E, E], -1)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        y = y.unflatten(3, (BLOCK, BLOCK)).permute(0, 5, 1, 3, 2, 4)
        return x + self.o(y.reshape(x.shape))


@pytest.mark.parametrize("role", ["k", "v"])
def test_keys_and_values_have_rows_of_their_own(role: str) -> None:
    """Both had all rows: an edit of one changed the other, too."""
    torch.manual_seed(0)
    model, x = Layers(Halo(), Halo()).double(), torch.randn(2, D, 4, 4).double()
    reference = copy.deepcopy(model)
    peftc.compile(f"peft 1\nedit e at layer[*].attn.{role} {{ h *= vector(init=3) }}", model, sample={"x": x})
    assert [p.shape for p in peftc.parameters(model).values()] == [(D,)] * 2
    own = torch.ones(H, 2, E).double()
    own[:, "kv".index(role)] = 3
    for layer in reference.layers:
        layer.kv.register_forward_hook(lambda module, args, out: out * own.view(-1, 1, 1))
    assert torch.allclose(model(x=x), reference(x=x), rtol=0, atol=1e-10)
    peftc.fold(model)
    assert torch.allclose(model(x=x), reference(x=x), rtol=0, atol=1e-10)
