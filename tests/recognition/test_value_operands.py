"""Roles follow values only: an operand read for its dtype, device or shape is no source
of values.
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
from peftc.recognition.roles import sub_layers
from peftc.recognition.sublayer import SubLayer
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
    """q, k and v come from one Linear; each is cast to the dtype, device or shape of the two
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
        gate = torch.sigmoid(self.gate(self.use(x, mixed)))  # does not depend on the attention's values
        return x + gate * self.o(mixed)


def attention_of(root: nn.Module) -> SubLayer:
    graph = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, T, D)}).graph
    (attn,) = sub_layers(LayerGraph(graph, root))
    return attn


@pytest.mark.parametrize("name", USES)
def test_operands_read_for_dtype_device_or_shape_are_ignored(name: str) -> None:
    attn = attention_of(Layer(USES[name]))
    rows = {role: p.rows for role, p in attn.projections.items()}
    assert rows == {"q": Slice(0, D), "k": Slice(D, 2 * D), "v": Slice(2 * D, 3 * D), "o": None}
    assert attn.projections["o"].node.target == "o"
    assert [n.target for n in attn.linears] == ["gate"]


def test_operands_read_for_values_are_followed() -> None:
    """Keys are added to the values, so the values depend on both slices and have no role."""
    attn = attention_of(Layer(lambda x, like: x, lambda k, v: v.to(k) + k))
    assert {role: p.rows for role, p in attn.projections.items()} == {"q": Slice(0, D), "k": Slice(D, 2 * D), "o": None}


def test_a_cache_returns_keys_and_values() -> None:
    """A cache's `update` with two tensors returns keys and values; a third tensor, or another
    `update`, is unknown.
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
    """Reads values for their dtype, as older rotary embeddings do."""

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions.cos().to(like), positions.sin().to(dtype=like.dtype)


class Together(nn.Module):
    """Queries and keys in one call, each unchanged."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * 2, k * 3


class Entangled(nn.Module):
    """Both results depend on both arguments."""

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
def test_a_leaf_depends_on_the_arguments_of_its_computation(
    keys_first: bool, together: Callable[[], nn.Module], roles: str
) -> None:
    table = peftc.sites(Model(WithLeaves(keys_first, together())), sample={"x": torch.randn(2, T, D)})
    sites = {site.path.rpartition(".")[2]: site.module for site in table.sites if "w" in site.states}
    assert {role: sites.get(role) for role in "qkvo"} == {
        role: f"layers.0.{role}" if role in roles else None for role in "qkvo"
    }
