"""Tensors of one number in the place of a number: C code of torch reads it, and a proxy has none.

The process ended, since the proxy's class is that of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8
CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one_hot": lambda h, w, n: h + nn.functional.one_hot(n, n + 1).sum(),  # pyright: ignore[reportArgumentType]
    "full_like": lambda h, w, n: h + torch.full_like(h, n),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "roll": lambda h, w, n: torch.roll(h, n, 1),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "tril_indices": lambda h, w, n: h + torch.tril_indices(n, n).sum(),  # pyright: ignore
    "fft": lambda h, w, n: h + torch.fft.rfft(h, n).real.sum(),  # pyright: ignore[reportArgumentType]
    "of a parameter": lambda h, w, n: h + w.narrow(0, 0, n).sum(),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "repeat": lambda h, w, n: h + w.repeat(n, 1).sum(),  # pyright: ignore[reportArgumentType, reportCallIssue]
}


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.weight = nn.Parameter(torch.randn(4, D))
        self.function = function

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(self.norm(x))))
        return x + self.function(h, self.weight, n.max())


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(function) for _ in range(2)])

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, n)
        return x


@pytest.mark.parametrize("name", CASES)
def test_is_refused_with_its_line(name: str) -> None:
    model, sample = Model(CASES[name]), {"x": torch.randn(2, 3, D), "n": torch.tensor([2, 1])}
    assert model(**sample).shape == (2, 3, D)
    reasons = [module.reason for module in peftc.sites(model, sample=sample).untraced]
    assert len(reasons) == 2
    assert all("depends on the values of tensors" in reason for reason in reasons)


def asked(h: Tensor, w: Tensor, n: Tensor) -> Tensor:
    """Python's questions for the class have the answer that they have of a tensor."""
    assert isinstance(n, (int, Tensor))
    assert all(map(torch.is_tensor, (h, n)))
    assert all(isinstance(t, Tensor) for t in (h, n))
    match n:
        case Tensor():
            return h * n
        case _:  # pyright: ignore[reportUnnecessaryComparison]
            raise TypeError(n)


def test_class() -> None:
    model, sample = Model(asked), {"x": torch.randn(2, 3, D), "n": torch.tensor([2, 1])}
    sites = {site.path for site in peftc.sites(model, sample=sample).sites}
    assert "encoder.layer[1].ffn.up" in sites
