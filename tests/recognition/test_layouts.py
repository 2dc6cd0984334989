"""The rows of q, k and v for every layout of a fused projection, checked by the model's own
numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import peftc
from benchmarks.families import build
from peftc.addressing.sites import Site, Slice
from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.recognition.attention.manual_attention import joining
from peftc.recognition.attention.patterns import attentions
from peftc.tracing.tracer import RegionTracer

LATENT, INTERLEAVED = "causal-lm/deepseek_v3", ("causal-lm/gpt_neox", "causal-lm/bloom")


def sites_of(key: str) -> tuple[nn.Module, dict[str, Site]]:
    mapping, _, name = key.partition("/")
    model, _ = build(mapping, name, 0)
    table = peftc.sites(model)
    return model, {s.path.partition(".layer[0].attn.self.")[2]: s for s in table.sites if ".layer[0].attn." in s.path}


def rows(site: Site) -> Slice | None:
    place = site.states["h"].activation
    assert place is not None
    return place.rows


@pytest.mark.parametrize("key", INTERLEAVED)
def test_interleaved_heads(key: str) -> None:
    model, sites = sites_of(key)
    heads = model.config.num_attention_heads
    width = model.config.hidden_size // heads
    for i, role in enumerate("qkv"):
        assert rows(sites[role]) == Slice(i * width, (i + 1) * width, 3 * width, heads)


def test_keys_and_values_made_from_a_latent() -> None:
    """Keys are written slice by slice into a new tensor, whose shape comes from the values."""
    model, sites = sites_of(LATENT)
    config = model.config
    k, v, heads = config.qk_nope_head_dim, config.v_head_dim, config.num_attention_heads
    assert sites["k"].module == sites["v"].module
    assert rows(sites["k"]) == Slice(0, k, k + v, heads)
    assert rows(sites["v"]) == Slice(k, k + v, k + v, heads)


def test_values_that_two_attentions_share() -> None:
    """Each of two attentions mixes half of the values: `v` is the whole Linear, and a prefix cannot
    be added to both.
    """
    model, sites = sites_of("causal-lm/diffllama")
    assert rows(sites["v"]) is None
    whole = next(s for s in peftc.sites(model).sites if s.path.endswith(".layer[0].attn.self"))
    assert set(whole.states) == {"x", "h", "c", "res"}


class Blank(nn.Module):
    """Writes into new tensors, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.other = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        output = both.new_zeros(*x.shape[:-1], 6)
        output[..., :2].copy_(both[..., 6:])
        output[..., 2:] = self.other(x)
        return output + both.new_ones(6)


def test_writes_into_a_new_tensor() -> None:
    root = Blank()
    graph = RegionTracer(lambda name: name == "").trace_region(root, {"x": torch.randn(2, 3, 4)}).graph
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    assert [(str(n.target), rows) for n, rows in source_linears(LayerGraph(graph, root), result)] == [
        ("both", Slice(6, 8)),
        ("other", None),
    ]


class Rotated(nn.Module):
    """The slice of features for rotary positions is empty here."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain, rotated = self.both(x).split([6, 0], dim=-1)
        return torch.cat([plain, -rotated], dim=-1) + x.new_ones(6)


def test_an_empty_slice_of_features() -> None:
    root = Rotated()
    graph = RegionTracer(lambda name: name == "").trace_region(root, {"x": torch.randn(2, 3, 4)}).graph
    nothing = next(n for n in graph.nodes if getattr(n.meta["example"], "shape", (1,))[-1] == 0)
    assert source_linears(LayerGraph(graph, root), nothing) == []
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    assert [(str(n.target), rows) for n, rows in source_linears(LayerGraph(graph, root), result)] == [("both", None)]


class Positioned(nn.Module):
    """A hand-written attention with a position bias of the shape of its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        scores = scores + self.bias(x)[..., None, :].reshape_as(scores)
        return scores.softmax(-1) @ v


def test_a_bias_reshaped_like_the_scores_is_recognised() -> None:
    root = Positioned()
    graph = RegionTracer(lambda name: name == "").trace_region(root, {"x": torch.randn(2, 3, 4)}).graph
    (attention,) = attentions(LayerGraph(graph, root))
    assert joining(attention, LayerGraph(graph, root)) is not None
