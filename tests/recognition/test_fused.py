"""Fused projections: the rows of q, k and v for every way to split the output, or no
roles at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.addressing.sites import Slice
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.numbers import as_slice
from peftc.recognition.roles import sub_layers
from peftc.tracing.tracer import RegionTracer
from tests.layers import Layers

D, H = 8, 2
functional: Any = nn.functional


def heads(x: Tensor, number: int = H) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


class Layer(nn.Module):
    """`split_qkv` splits the output of one Linear into q, k and v, (batch, heads,
    tokens, d_head).
    """

    def __init__(self, split_qkv: Callable[[Layer, Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.split_qkv = split_qkv
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("order", torch.arange(3 * D).view(3, D).flip(0).flatten())

    def forward(self, x: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(*self.split_qkv(self, self.qkv(x)))
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def stacked(_: Layer, y: Tensor) -> Sequence[Tensor]:
    y = y.unflatten(-1, (H, 3, D // H))
    y = torch.stack([y[..., 0, :], y[..., 1, :], y[..., 2, :]])
    return [y[i].transpose(1, 2) for i in range(3)]


def rotated_together(_: Layer, y: Tensor) -> Sequence[Tensor]:
    """Rotary positions are applied before the split."""
    y = y.unflatten(-1, (3, H, D // H))
    both = y[:, :, :2]
    both = both * 2 + torch.cat([-both[..., 2:], both[..., :2]], -1)
    return [part.transpose(1, 2) for part in (both[:, :, 0], both[:, :, 1], y[:, :, 2])]


IN_ORDER = [Slice(0, D), Slice(D, 2 * D), Slice(2 * D, 3 * D)]
LAYOUTS: dict[str, tuple[Callable[[Layer, Tensor], Sequence[Tensor]], list[Slice]]] = {
    "unflatten": (lambda _, y: torch.unflatten(y, -1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0), IN_ORDER),
    "sizes": (lambda _, y: [heads(part) for part in y.split_with_sizes([D, D, D], -1)], IN_ORDER),
    "stack": (stacked, [Slice(4 * i, 4 * i + 4, 12, H) for i in range(3)]),
    "flip": (lambda _, y: [heads(part) for part in y.flip(-1).chunk(3, -1)], IN_ORDER[::-1]),
    "roll": (lambda _, y: [heads(p) for p in torch.roll(y, D, -1).chunk(3, -1)], [*IN_ORDER[2:], *IN_ORDER[:2]]),
    "order": (lambda self, y: [heads(p) for p in torch.index_select(y, -1, self.order).chunk(3, -1)], IN_ORDER[::-1]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_recognised(name: str) -> None:
    split_qkv, expected = LAYOUTS[name]
    root = Layer(split_qkv)
    graph = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, 5, D)}).graph
    (attn,) = sub_layers(LayerGraph(graph, root))
    assert [attn.projections[role].rows for role in "qkv"] == expected


@pytest.mark.parametrize(
    ("split_qkv", "roles"),
    [
        (lambda self, y: [heads(part) for part in y[..., self.order].chunk(3, -1)], {"o", "qkv"}),  # no data, no order
        (rotated_together, {"v", "o"}),
    ],
)
def test_unrecognised_rows_have_no_role(split_qkv: Any, roles: set[str]) -> None:
    table = peftc.sites(Layers(Layer(split_qkv), Layer(split_qkv)), sample={"x": torch.randn(2, 5, D)})
    above = "encoder.layer[0].attn.self."
    sites = [s for s in table.sites if s.path.startswith(above) and "w" in s.states]
    assert {s.path.removeprefix(above) for s in sites} == roles


def numbers(rows: Slice) -> list[int]:
    return [number for start, stop in rows.blocks() for number in range(start, stop)]


SLICES = [*IN_ORDER, Slice(0, 4, 12, H), Slice(4, 8, 12, H), Slice(8, 12, 12, H), Slice(2, 3, 4, 5), Slice(20, 24)]


@pytest.mark.parametrize("rows", SLICES)
def test_a_slice_has_the_features_of_a_view(rows: Slice) -> None:
    """A `Slice` has, of every `stride` features, those from `start` to `stop`."""
    stride = rows.stride or 3 * D
    features = torch.arange(stride * rows.count).view(rows.count, stride)[:, rows.start : rows.stop].flatten()
    assert numbers(rows) == features.tolist()
    assert len(features) == rows.width
    assert as_slice(features, 3 * D) == rows
    for other in SLICES:
        assert rows.overlaps(other) == bool(set(numbers(rows)) & set(numbers(other)))


class Uneven(nn.Module):
    """Two attentions of different sizes on one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.o = nn.Linear(D, 36), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *more = self.all(x).split([D, D, D, 4, 4, 4], -1)
        one = functional.scaled_dot_product_attention(*map(heads, (q, k, v)))
        other = functional.scaled_dot_product_attention(*(heads(part, 1) for part in more))
        return x + self.o(torch.cat([y.transpose(1, 2).flatten(2) for y in (one, other)], -1))


def test_unequal_blocks_of_rows_have_no_role() -> None:
    root = Uneven()
    graph = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, 5, D)}).graph
    (attn,) = sub_layers(LayerGraph(graph, root))
    assert set(attn.projections) == {"o"}
    assert [str(n.target) for n in attn.linears] == ["all"]


class Crossed(nn.Module):
    """Attention over features: each feature is a row with one entry for each token."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.manual = manual
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 4, 1).unbind(0)
        if self.manual:
            mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(mixed.permute(0, 3, 1, 2).flatten(2))


@pytest.mark.parametrize("manual", [True, False])
def test_attention_over_features_has_no_states_of_queries_and_keys(manual: bool) -> None:
    table = peftc.sites(Layers(Crossed(manual), Crossed(manual)), sample={"x": torch.randn(2, 5, D)})
    site = next(s for s in table.sites if s.path == "encoder.layer[0].attn.self")
    assert set(site.states) == {"x", "h", "c", "res"}
