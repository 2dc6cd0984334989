"""The residual stream, and the additions to it, in layers that do more than add sub-layers to one
tensor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

import peftc
from benchmarks.families import build
from peftc.dataflow import nodes
from peftc.dataflow.layer_graph import LayerGraph
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy, new_mode
from peftc.recognition.roles import sub_layers
from peftc.recognition.sublayer import SubLayer
from peftc.tracing.tracer import RegionTracer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.randn(1, 1, 8))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))


class Chosen(Layer):
    """The second sub-layer continues with some of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x[:, 1:]
        return x + self.second(x)


class ChosenWithEllipsis(Layer):
    """The same, where the key has an ellipsis for the features."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x[:, :1, ...] + self.second(x)[..., :1, :]


class Cut(Layer):
    """Half of the features are not the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x[..., :4] + self.second(x)[..., :4]


class CutBehindEllipsis(Layer):
    """Half of the features, behind an ellipsis for no dimension."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x[:, :, ..., :4] + self.second(x)[..., :4]


class CutBehindMask(Layer):
    """Half of the features of some tokens are not the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.arange(10).view(2, 5) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x[self.keep, :4] + self.second(x)[self.keep, :4]


class Entry(Layer):
    """A single entry is not the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x[0, 0, 0] + self.second(x)[..., :4]


class Sums(Layer):
    """Two tensors of the residual stream are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.first(x)) + x
        return x + self.second(x)


class Shifted(Layer):
    """Token shift with a parameter vector; that is no sub-layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(x * self.mix + self.shift(x) * (1 - self.mix))


class Copies(Layer):
    """Four copies of the residual stream, mixed by computed coefficients."""

    def forward(self, x: Tensor) -> Tensor:  # (copies, batch, tokens, features)
        coefficients = self.first(x[0])[..., :4, None] * self.first(x[0])[..., None, :4]
        x = torch.matmul(x.permute(1, 2, 3, 0), coefficients).permute(3, 0, 1, 2) + x
        return x[0] + self.second(x[0])


class Bottleneck(nn.Module):
    """A sub-layer with a narrow residual stream inside: `deep`, it has two sub-layers, else one,
    which does not count.
    """

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.deep = deep
        self.narrow, self.wide = nn.Linear(8, 4), nn.Linear(4, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 4))
        self.ffn = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)
        y = self.narrow(x) + self.o(weights @ self.v(x))
        if self.deep:
            y = y + self.ffn(y)
        return x + self.wide(y)


@pytest.mark.parametrize(("deep", "kinds"), [(True, ["attn", "ffn"]), (False, ["attn"])])
def test_a_residual_stream_inside_a_sub_layer(deep: bool, kinds: list[str]) -> None:
    subs = sub_layers_of(Bottleneck(deep), 2, 5, 8)
    assert [s.kind for s in subs] == kinds
    assert str(subs[0].projections["q"].node.target) == "q"
    assert nodes.shape(subs[0].h)[-1] == (4 if deep else 8)


def sub_layers_of(layer: nn.Module, *shape: int) -> list[SubLayer]:
    graph = RegionTracer(lambda name: name == "").trace_region(layer, {"x": torch.randn(shape)}).graph
    return sub_layers(LayerGraph(graph, layer))


def downs(subs: list[SubLayer]) -> list[str]:
    return [str(s.projections["down"].node.target) for s in subs]


@pytest.mark.parametrize("layer", [Chosen, ChosenWithEllipsis, Sums])
def test_the_residual_stream_continues(layer: type[Layer]) -> None:
    assert downs(sub_layers_of(layer(), 2, 5, 8)) == ["first", "second"]


@pytest.mark.parametrize("layer", [Cut, CutBehindEllipsis, CutBehindMask, Entry])
def test_a_slice_of_the_features_is_not_the_residual_stream(layer: type[Layer]) -> None:
    assert downs(sub_layers_of(layer(), 2, 5, 8)) == ["first"]


def test_a_shift_with_a_vector_is_no_sub_layer() -> None:
    (only,) = sub_layers_of(Shifted(), 2, 5, 8)
    assert only.kind == "mixer"
    assert [str(n.target) for n in only.linears] == ["first"]


def test_a_mixture_of_copies_is_no_sub_layer() -> None:
    assert downs(sub_layers_of(Copies(), 4, 2, 5, 8)) == ["second"]


def steps(mapping: str, name: str) -> list[str]:
    model, _ = build(mapping, name)
    paths = [s.path.partition(".layer[1].")[2] for s in peftc.sites(model).sites]
    return [p for p in paths if p.partition("[")[0] in ("attn.self", "ffn", "mixer") and not p.partition("]")[2]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rwkv", ["mixer", "ffn"]),
        ("gemma3n_text", ["ffn[0]", "attn.self", "ffn[1]", "ffn[2]"]),
        ("inkling_text", ["attn.self", "ffn"]),
        ("deepseek_v32", ["attn.self", "ffn"]),
        ("dots3_note_text", ["attn.self", "ffn"]),
    ],
)
def test_unusual_layers(name: str, expected: list[str]) -> None:
    """A recurrence with token shift; four streams; convolutions after sub-layers; key selection
    without gradient; per-layer configurations.
    """
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    assert steps("causal-lm", name) == expected


class Broadcast(nn.Module):
    """`broadcast_tensors` returns its arguments themselves if they need no broadcast."""

    def forward(self, x: Tensor) -> Tensor:
        one, _ = torch.broadcast_tensors(torch.ones(3) * 2, torch.zeros(3))
        return x * one


def test_a_tensor_that_torch_returns_unchanged_is_traced_once() -> None:
    root = Broadcast()
    traced = RegionTracer(lambda name: name == "").trace_region(root, {"x": torch.randn(2, 3)})
    x = torch.randn(2, 3)
    assert torch.equal(torch.fx.GraphModule(root, traced.graph)(x), root(x))


class Sized(nn.Module):
    """Shapes of intermediate tensors as arguments of torch's functions; entries
    selected by a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = torch.reshape(h, [h.shape[1], h.shape[0]])
        h[h > 0] = self.linear(x).reshape(-1)[h.reshape(-1) > 0]
        return torch.broadcast_to(h[None], [h.shape[1], *h.shape])


def test_shapes_and_masks_need_no_guard() -> None:
    root = Sized()
    with new_mode() as mode:
        arguments = fake_copy({"x": torch.randn(2, 3)}, mode)
        traced = RegionTracer(lambda name: name == "").trace_region(fake_copy(root, mode), arguments)
    assert not [g for g in traced.guards if g.kind == "int"]
    for x in (torch.randn(2, 3), torch.randn(5, 3)):
        assert torch.equal(torch.fx.GraphModule(root, traced.graph)(x), root(x))


def test_assumed_sizes_add_up() -> None:
    """`split` with data-dependent sizes."""
    with new_mode(), fake_data_answers():
        x = torch.ones(20, 3)
        parts = x.split(torch.ones(4, dtype=torch.long).tolist())
    assert sum(p.shape[0] for p in parts) == 20


def test_scores_of_relative_positions_are_not_those_of_the_keys() -> None:
    model, _ = build("masked-lm", "funnel")
    modules = {s.module.rpartition(".")[2] for s in peftc.sites(model).sites if s.path.endswith((".q", ".k", ".v"))}
    assert modules == {"q_head", "k_head", "v_head"}
