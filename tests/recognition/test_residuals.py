"""Residual streams with scales, shifts or several parallel streams; layers assembled from marked
modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from peftc.dataflow.layer_graph import LayerGraph
from peftc.recognition.layer_candidates import repeated_blocks
from peftc.recognition.layer_types import is_weighted_sum
from peftc.recognition.roles import sub_layers
from peftc.recognition.sublayer import SubLayer
from peftc.tracing.region_trace import RegionTrace
from peftc.tracing.tracer import RegionTracer

D, N = 8, 3
functional: Any = nn.functional


def traced(root: nn.Module, **arguments: torch.Tensor) -> RegionTrace:
    return RegionTracer(lambda name: is_weighted_sum(root.get_submodule(name))).trace_region(root, arguments)


def sub_layers_of(root: nn.Module, *shape: int) -> list[SubLayer]:
    return sub_layers(LayerGraph(traced(root, x=torch.randn(shape)).graph, root))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, h: torch.Tensor, res: torch.Tensor) -> torch.Tensor:
        return h + (res + self.bias) * self.scale


class Joined(Ffn):
    """The residual sum is in a module of its own, with a shifted residual."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.ffn(x), x)


class Multiplied(Ffn):
    """`Parameter.mul(x)` is a method call."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x + self.ffn(x)


class Hyper(Ffn):
    """Hyper-connections: the ffn reads a mixture of n streams, its output goes to each, and the
    streams are mixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(N * D, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pre = torch.sigmoid(self.weights(x.flatten(2)))
        one = (pre.unsqueeze(-1) * x).sum(dim=2)
        mixed = torch.matmul(pre.unsqueeze(-1) * pre.unsqueeze(-2), x)
        return pre.unsqueeze(-1) * self.ffn(one).unsqueeze(-2) + mixed


class Chained(Ffn):
    """Attention, its ffn and one more Linear in one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.last = (nn.Linear(D, D) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unsqueeze(1) for linear in (self.q, self.k, self.v))
        heads = functional.scaled_dot_product_attention(q, k, v)
        return x + self.last(self.ffn(self.o(heads.squeeze(1))))


class Blended(Chained):
    """Queries and keys both depend on the same two Linears."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unsqueeze(1) for linear in (self.q, self.k, self.v))
        mean = (q + k) * 0.5
        return x + self.o(functional.scaled_dot_product_attention(mean + q, mean + k, v).squeeze(1))


class Opaque(nn.Module):
    """Children that stay leaves of the trace, like a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * number


class Projected(nn.Module):
    """Two Linears before an opaque leaf, one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.leaf = nn.LayerNorm(D), Opaque()
        self.first, self.second, self.last = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.last(self.leaf(self.first(y), self.second(y)))


def roles(sub: SubLayer) -> dict[str, str]:
    return {role: str(p.node.target) for role, p in sub.projections.items()}


def test_residuals_that_are_scaled_or_shifted() -> None:
    for root in (Joined(), Multiplied()):
        (ffn,) = sub_layers_of(root, 2, 5, D)
        assert (ffn.kind, roles(ffn)) == ("ffn", {"down": "down", "up": "up"})
        assert ffn.h.target == "down"


def test_several_streams_side_by_side() -> None:
    (ffn,) = sub_layers_of(Hyper(), 2, 5, N, D)
    assert (ffn.kind, roles(ffn)) == ("ffn", {"down": "down", "up": "up"})
    assert ffn.h.meta["example"].shape == (2, 5, D), "what the ffn gives, and not what is added to the streams"
    assert ffn.x is not None
    assert ffn.x.meta["example"].shape == (2, 5, D)
    assert ffn.res.meta["example"].shape == (2, 5, N, D)


def test_a_block_of_attention_and_ffn_without_a_sum_in_between() -> None:
    attn, ffn = sub_layers_of(Chained(), 2, 5, D)
    assert (attn.kind, roles(attn)) == ("attn", {"q": "q", "k": "k", "v": "v", "o": "o"})
    assert (attn.h.target, ffn.h.target) == ("o", "down")
    assert (ffn.kind, roles(ffn)) == ("ffn", {"down": "down", "up": "up"})


def test_the_input_of_an_ffn_where_only_down_has_a_role() -> None:
    (sub,) = sub_layers_of(Projected(), 2, N, D)
    assert set(sub.projections) == {"down"}
    assert sub.x is not None
    assert sub.x.target == "norm"


def test_linears_of_both_queries_and_keys_have_no_role() -> None:
    """Both Linears are in both, so neither is q or k."""
    (attn,) = sub_layers_of(Blended(), 2, 5, D)
    assert roles(attn) == {"v": "v", "o": "o"}


def test_where_with_a_number_can_be_traced() -> None:
    """torch crashes if the second argument of `where` only imitates a tensor."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, x, -1.0)

    graph = traced(Masked(), x=torch.randn(3), mask=torch.ones(3, dtype=torch.bool)).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.where]


class Block(GradientCheckpointingLayer):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_layers_and_their_marked_parts() -> None:
    """A marked module that contains another is a layer; one that contains a list of others is a
    stage.
    """
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block(part=Block(), linear=nn.Linear(1, 1))])
    model.stages = nn.ModuleList([Block(blocks=nn.ModuleList([Block(), Block()]))])
    assert repeated_blocks(model) == ["layers.0", "layers.1", "stages.0.blocks.0", "stages.0.blocks.1"]


class Apart(nn.Module):
    """Queries, keys and values have norms of their own, of the norm of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.o = nn.LayerNorm(D), nn.Linear(D, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.projections = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n1(x)
        q, k, v = (p(norm(y)) for p, norm in zip(self.projections, self.norms, strict=True))
        return x + self.o(functional.scaled_dot_product_attention(q, k, v))


def test_a_norm_that_norms_read() -> None:
    (sub,) = sub_layers_of(Apart(), 2, N, D)
    assert [str(norm.target) for norm in sub.norms] == ["n1", "norms.0", "norms.1", "norms.2"]
