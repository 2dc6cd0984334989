"""Roles of Linears in similar graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftc.dataflow.layer_graph import LayerGraph
from peftc.recognition.roles import sub_layers
from peftc.recognition.sublayer import SubLayer
from peftc.tracing.tracer import RegionTracer

D, T = 8, 5
functional: Any = nn.functional


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.gate, self.down = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.both, self.one, self.last = nn.Linear(D, 4 * D), nn.Linear(D, 1), nn.Linear(D, D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.first, self.second = nn.Linear(T, 2 * T), nn.Linear(2 * T, T)
        self.places = nn.Parameter(torch.zeros(T, D))

    def mix(self, x: Tensor, k: Tensor | float = 0) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (self.q(x), self.k(x) + k, self.v(x)))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Swish(Layer):
    """A hand-written SiLU: a product, like a gate."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(h * torch.sigmoid(1.7 * h))


class Gelu(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(h * 0.5 * (1 + torch.erf(h / 2**0.5)))


class Method(Layer):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate).mul_(up))


class Factor(Layer):
    """A product whose other factor comes from no Linear."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y) * y.mean())


class Capped(Layer):
    """Both factors have an activation."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.tanh(gate) * torch.sigmoid(gate) * torch.tanh(up))


class Bilinear(Layer):
    """A gate without activation; its bias distinguishes it from `up`."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down((1 + self.gate(y)) * self.up(y))


def sub_layers_of(root: nn.Module) -> list[SubLayer]:
    graph = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, T, D)}).graph
    return sub_layers(LayerGraph(graph, root))


def roles(sub: SubLayer) -> dict[str, str]:
    rows = {role: "" if p.rows is None else f"[{p.rows.start}:{p.rows.stop}]" for role, p in sub.projections.items()}
    return {role: f"{p.node.target}{rows[role]}" for role, p in sub.projections.items()}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Swish, {"up": "up"}),
        (Gelu, {"up": "up"}),
        (Method, {"gate": "both[0:16]", "up": "both[16:32]"}),
        (Factor, {"gate": "gate", "up": "up"}),
        (Capped, {}),
        (Bilinear, {"gate": "gate", "up": "up"}),
    ],
)
def test_roles_before_the_hidden_activation(layer: type[Layer], expected: dict[str, str]) -> None:
    (ffn,) = sub_layers_of(layer())
    assert roles(ffn) == {"down": "down", **expected}


class Alone(Layer):
    """One Linear after an attention: its input is the attention's output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.mix(self.norm(x)))
        return x + self.last(self.other(x))


def test_the_linears_of_one_sub_layer_are_not_those_of_the_next() -> None:
    attn, ffn = sub_layers_of(Alone())
    assert roles(attn) == {role: role for role in "qkvo"}
    assert roles(ffn) == {"down": "last"}
    assert ffn.x is not None
    assert ffn.x.target == "other"


class Placed(Layer):
    """Keys are a sum: of a projection of positions, first, and a projection of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        places = self.last(self.places)
        return x + self.o(self.mix(self.norm(x), places))


class Gated(Layer):
    """The attention output is gated before the output projection."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x))
        return x + self.o(mixed * torch.sigmoid(self.one(mixed)))


@pytest.mark.parametrize("layer", [Placed, Gated])
def test_gates_and_position_projections_are_no_roles_of_attention(layer: type[Layer]) -> None:
    (attn,) = sub_layers_of(layer())
    assert roles(attn) == {role: role for role in "qkvo"}


class Mixer(Layer):
    """Two Linears along tokens, then two along features."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.second(torch.relu(self.first(self.norm(x).transpose(1, 2))))
        x = x + mixed.transpose(1, 2)
        return x + self.down(torch.relu(self.up(self.other(x))))


def test_linears_along_tokens_mix_them() -> None:
    mixer, ffn = sub_layers_of(Mixer())
    assert (mixer.kind, ffn.kind) == ("mixer", "ffn")
    assert [str(n.target) for n in mixer.linears] == ["first", "second"]
    assert mixer.x is not None
    assert mixer.x.meta["example"].shape == (2, T, D)
    assert roles(ffn) == {"down": "down", "up": "up"}


class Summed(Layer):
    """Each token becomes the mean of those up to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))).cumsum(1) / T)


class Counted(Layer):
    """A cumulative count: tokens after the third positive one are zeroed."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        number = (y[..., :1] > 0).long().cumsum(1)
        return x + self.down(torch.relu(self.up(y)) * (number <= 3))


@pytest.mark.parametrize(("layer", "kind"), [(Summed, "mixer"), (Counted, "ffn")])
def test_cumulative_sums_mix_tokens_and_cumulative_counts_do_not(layer: type[Layer], kind: str) -> None:
    (only,) = sub_layers_of(layer())
    assert only.kind == kind
