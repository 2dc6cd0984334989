"""A role follows values alone: what a tensor is asked for its dtype, device or shape says nothing
of where values come from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import peftc
from peftc.addressing.sites import Slice
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.values import value_operands
from peftc.recognition.roles import SubLayer, sub_layers
from peftc.tracing.tracer import RegionTracer

D, H, T = 8, 2, 5
functional: Any = nn.functional

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda x, like: x.to(like),
    "to dtype": lambda x, like: x.to(like.dtype),
    "type_as": lambda x, like: x.type_as(like),
    "expand_as": lambda x, like: x.expand_as(like),
    "view_as": lambda x, like: x.contiguous().view_as(like),
    "reshape_as": lambda x, like: x.reshape_as(like),
    "zeros_like": lambda x, like: x + torch.zeros_like(like),
    "ones_like": lambda x, like: x * torch.ones_like(like),
    "full_like": lambda x, like: x * torch.full_like(like, 2.0),
    "rand_like": lambda x, like: x + torch.rand_like(like),
    "new_zeros": lambda x, like: x + like.new_zeros(like.shape),
    "new_full": lambda x, like: x * like.new_full((1,), 2.0),
    "new_tensor": lambda x, like: x * like.new_tensor(2.0),
    "arange": lambda x, like: x + torch.arange(like.size(-1), device=like.device),
    "zeros": lambda x, like: x + torch.zeros(like.shape[-1], dtype=like.dtype, device=like.device),
    "size": lambda x, like: x * like.shape[-1],
    "numel": lambda x, like: x / like.numel(),
    "broadcast_tensors": lambda x, like: torch.broadcast_tensors(x, like)[0],
}


class Layer(nn.Module):
    """q, k and v of one Linear; each is told the dtype, the device or the shape of the two
    others.
    """

    def __init__(
        self, use: Callable[[Tensor, Tensor], Tensor], values: Callable[[Tensor, Tensor], Tensor] = lambda k, v: v
    ) -> None:
        super().__init__()
        self.use, self.values = use, values
        self.qkv, self.gate, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = (self.use(self.use(a, b), c) for a, b, c in ((q, k, v), (k, v, q), (v, q, k)))
        mixed = functional.scaled_dot_product_attention(q, k, self.values(k, v)).transpose(1, 2).flatten(2)
        gate = torch.sigmoid(self.gate(self.use(x, mixed)))  # no result of the attention
        return x + gate * self.o(mixed)


def attention_of(root: nn.Module) -> SubLayer:
    graph = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, T, D)}).graph
    (attn,) = sub_layers(LayerGraph(graph, root))
    return attn


@pytest.mark.parametrize("name", USES)
def test_dtypes_devices_and_shapes_are_not_followed(name: str) -> None:
    attn = attention_of(Layer(USES[name]))
    rows = {role: p.rows for role, p in attn.projections.items()}
    assert rows == {"q": Slice(0, D), "k": Slice(D, 2 * D), "v": Slice(2 * D, 3 * D), "o": None}
    assert attn.projections["o"].node.target == "o"
    assert [n.target for n in attn.linears] == ["gate"]


def test_what_changes_values_is_followed() -> None:
    """A part of the keys is added to the values: these have rows of both, and no name."""
    attn = attention_of(Layer(lambda x, like: x, lambda k, v: v.to(k) + k))
    assert {role: p.rows for role, p in attn.projections.items()} == {"q": Slice(0, D), "k": Slice(D, 2 * D), "o": None}


def test_only_keys_and_values_are_handed_on_by_a_cache() -> None:
    """What an `update` of three gives first and second; nothing is known of what comes third, or of
    other updates.
    """
    graph = fx.Graph()
    cache, k, v = (graph.placeholder(name) for name in ("cache", "k", "v"))
    both = graph.call_method("update", (cache, k, v))
    alone = graph.call_method("update", (cache, k))
    assert [value_operands(item(both, i)) for i in range(3)] == [[k], [v], [both]]
    assert [value_operands(item(alone, i)) for i in range(2)] == [[alone], [alone]]


def item(node: fx.Node, index: int) -> fx.Node:
    return node.graph.call_function(operator.getitem, (node, index))


class Rotary(nn.Module):
    """Takes values for their dtype, as older rotary embeddings do."""

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions.cos().to(like), positions.sin().to(dtype=like.dtype)


class Together(nn.Module):
    """Queries and keys in one call, each as it is."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * 2, k * 3


class Entangled(nn.Module):
    """Each result is computed from both."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q + 0.1 * k, k + 0.1 * q


class WithLeaves(nn.Module):
    def __init__(self, keys_first: bool, together: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.rotary, self.together, self.keys_first = Rotary(), together, keys_first

    def forward(self, x: Tensor) -> Tensor:
        v, k, q = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.v(x), self.k(x), self.q(x)))
        cos, sin = self.rotary(v, x.new_zeros(T, 1))
        q, k = (y * cos + y.flip(-1) * sin for y in (q, k))
        q, k = self.together(k, q)[::-1] if self.keys_first else self.together(q, k)
        return x + self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@pytest.mark.parametrize("keys_first", [True, False])
@pytest.mark.parametrize(("together", "roles"), [(Together, "qkvo"), (Entangled, "vo")])
def test_a_leaf_hands_on_the_arguments_that_its_code_computes_with(
    keys_first: bool, together: Callable[[], nn.Module], roles: str
) -> None:
    table = peftc.sites(Model(WithLeaves(keys_first, together())), sample={"x": torch.randn(2, T, D)})
    sites = {site.path.rpartition(".")[2]: site.module for site in table.sites if "w" in site.states}
    assert {role: sites.get(role) for role in "qkvo"} == {
        role: f"layers.0.{role}" if role in roles else None for role in "qkvo"
    }
