"""Functions without code that can be traced, which may attend: an attention that calls one is no
feed-forward part.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError

D, H = 8, 2


class Kernel(torch.autograd.Function):
    """An attention with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q, k, v)
        return torch.softmax(q @ k.mT, -1) @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(torch.softmax(q @ k.mT, -1) @ v, (q, k, v), grads)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.to_out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        out: Any = Kernel.apply(q, k, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Walked(nn.Module):
    """Lists in a list, walked by the model: what a loop's body has is named from the root."""

    def __init__(self) -> None:
        super().__init__()
        ff = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(2)]
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), part]) for part in ff])

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.layers:
            attn, ff = pair  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x) + x
            x = ff(x) + x
        return x


def test_an_attention_in_an_autograd_function_is_no_feed_forward_part() -> None:
    sample = {"x": torch.randn(2, 5, D)}
    table = peftc.sites(Walked(), sample=sample)
    assert not [site.path for site in table.sites if ".0.to_" in site.module]
    assert [s.module for s in table.sites if s.path.endswith("ffn.up")] == ["layers.0.1.1", "layers.1.1.1"]
    assert {(m.module, "Kernel" in m.reason) for m in table.untraced} == {("layers.0.0", True), ("layers.1.0", True)}
    with pytest.raises(PeftcError) as excinfo:
        peftc.plan("peft 1\nedit e at layer[*].attn { h += adapter(x, r=2) }", Walked(), sample=sample)
    (diagnostic,) = excinfo.value.diagnostics
    assert diagnostic.code == "P214"
    assert any("Kernel" in note for note in diagnostic.notes)
