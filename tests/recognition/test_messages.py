"""Messages along the edges of a graph mix tokens; tokens sent to experts and back do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import peftc

D, H = 8, 2
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2], [1, 2, 0, 4, 5, 3, 0, 1]])


class Messages(nn.Module):
    """An attention over edges, as graph transformers write it without a library."""

    def __init__(self, *, scatters: bool) -> None:
        super().__init__()
        self.scatters = scatters
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        q, k, v = (linear(x).view(-1, H, D // H) for linear in (self.q, self.k, self.v))
        source, target = edges
        weights = (k[source] * q[target]).sum(-1, keepdim=True).exp()
        if self.scatters:
            places = target.view(-1, 1, 1).expand(-1, H, D // H)
            result = torch.zeros_like(v).scatter_add(0, places, v.index_select(0, source) * weights)
        else:
            result = torch.zeros_like(v).index_add(0, target, v[source] * weights)
        return self.o(result.flatten(1))


class Expert(nn.Module):
    """A part of the tokens, which a router chooses, passes an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(D, 1), nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weights, places = self.router(x).squeeze(-1).sigmoid().topk(3)
        return torch.zeros_like(x).index_add(0, places, self.down(self.up(x[places]).relu()) * weights[:, None])


class Part(nn.Module):
    """The same tokens in each call, such as the nodes of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source = edges[0, :3]
        return torch.zeros_like(x).index_add(0, source, self.down(self.up(x[source]).relu()))


class Layer(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(D), part

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + self.part(self.norm(x), edges)


class Model(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, parts))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def kinds(*parts: nn.Module) -> set[str]:
    """The kinds of the sub-layers."""
    sites = peftc.sites(Model(*parts), sample={"x": torch.randn(6, D), "edges": EDGES}).sites
    return {site.steps[2][0] for site in sites if len(site.steps) > 2}


def test_messages_along_edges_are_a_mixer() -> None:
    for scatters in (False, True):
        assert kinds(Messages(scatters=scatters), Messages(scatters=scatters)) == {"mixer"}


def test_tokens_that_return_to_their_places_are_no_mixer() -> None:
    assert kinds(Expert(), Expert()) == {"ffn"}
    assert kinds(Part(), Part()) == {"ffn"}
