"""What looks like experts and is none: layers of a loop, and gates of groups of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import peftc

D = 8


def roles(model: nn.Module) -> dict[str, str]:
    """The path of each site in a layer, and its weight."""
    table = peftc.sites(model, sample={"x": torch.randn(2, 4, D)})
    weights = {site.path: site.states["w"].weight for site in table.sites if "w" in site.states}
    return {path: f"{w.module}.{w.attribute}" for path, w in weights.items() if w is not None and "layer" in path}


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, D, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...btd,...de->...bte", x, self.weight)


class Groups(nn.Module):
    """What a router sends to each group is multiplied by a matrix with two rows, as in a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner, self.mix = nn.Linear(D, 3, bias=False), Slices(), nn.Linear(2, D)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(1)
        mask = nn.functional.one_hot(index[..., 0], 3).to(x.dtype)
        inner = self.inner(torch.einsum("btd,btg->gbtd", x, mask))
        return self.mix(torch.einsum("gbte,btg->bte", inner, mask)) * weights


class Layer(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(D), part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


class Model(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(part()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_gates_of_groups() -> None:
    """The matrix of each group was `experts.down`, whose result is no hidden state of the layer."""
    assert not any("experts" in path for path in roles(Model(Groups)))


class Values(nn.Module):
    """A memory: the tokens choose rows of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.values = nn.Linear(D, D), nn.EmbeddingBag(D, D, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        scores, index = self.queries(x).topk(2)
        values = self.values(index.flatten(0, 1), per_sample_weights=scores.softmax(-1).flatten(0, 1))
        return values.view_as(x)


def test_rows_of_a_memory() -> None:
    """The bag was `down`, which reads numbers of rows: an edit of these ended in a traceback."""
    assert not any(weight.endswith("values.weight") for weight in roles(Model(Values)).values())
