"""A residual stream that begins with a parameter: learned tokens, one copy for each example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Network
from tests.scaled_rows import assert_scales

D, H = 16, 2


class PerceiverAttention(nn.Module):
    """Flamingo: the latents read the tokens and themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_media, self.norm_latents = nn.LayerNorm(D), nn.LayerNorm(D)
        self.to_q, self.to_kv = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.to_out = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        x, latents = self.norm_media(x), self.norm_latents(latents)
        q = self.to_q(latents)
        k, v = self.to_kv(torch.cat((x.expand(latents.shape[0], -1, -1), latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("... i d, ... j d -> ... i j", q * D**-0.5, k)
        attn = (scores - scores.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        return self.to_out(torch.einsum("... i j, ... j d -> ... i d", attn, v).transpose(1, 2).flatten(2))


class PerceiverResampler(nn.Module):
    """`is_repeated`: whether each example has a copy of the latents, or all have the same."""

    def __init__(self, is_repeated: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_repeated = is_repeated
        self.latents = nn.Parameter(torch.randn(5, D))
        self.media_pos_emb = nn.Parameter(torch.randn(4, D))
        self.layers = nn.ModuleList()
        for _ in range(2):
            ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
            self.layers.append(nn.ModuleList([PerceiverAttention(), ff]))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.media_pos_emb[: x.shape[1]]
        latents = self.latents.unsqueeze(0)
        latents = latents.repeat(x.shape[0], 1, 1) if self.is_repeated else latents
        for attn, ff in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            latents = attn(x, latents) + latents
            latents = ff(latents) + latents
        return self.norm(latents)


def sample(examples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(examples, 4, D)}


@pytest.mark.parametrize(("role", "start"), [("q", 0), ("k", 0), ("v", D), ("o", 0)])
def test_the_first_layer_attends_from_parameters(role: str, start: int) -> None:
    names = {"q": "to_q", "k": "to_kv", "v": "to_kv", "o": "to_out"}

    def rows_of(model: PerceiverResampler) -> list[list[Tensor]]:
        return [[layer[0].get_submodule(names[role]).weight[start : start + D]] for layer in model.layers]  # pyright: ignore

    assert_scales(PerceiverResampler(), sample(3), f"layer[*].attn.{role}", rows_of)


def test_sub_layers_are_those_of_every_layer() -> None:
    model = PerceiverResampler()
    table = peftc.sites(model, sample=sample(3))
    paths = [{s.path.partition("]")[2] for s in table.sites if f"layer[{i}]" in s.path} for i in range(2)]
    assert paths[0] == paths[1]
    assert {".attn.self.norm[1]", ".attn.self.q", ".ffn.up"} <= paths[0]
    assert table.unplaced == ()


def test_an_attention_that_has_no_site_is_named() -> None:
    """All examples have one query: its attention adds to no stream, and P217 says so."""
    table = peftc.sites(PerceiverResampler(is_repeated=False), sample=sample(1))
    missing = {module.module for module in table.unplaced if "attn" in module.roles}
    assert missing == {f"layers.0.0.{name}" for name in ("to_q", "to_kv", "to_out")}


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        return x + self.attn(x + positions, memory, memory)[0]


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.network(x)


class QueryDecoder(nn.Module):
    """Mask2Former: learned queries, one copy for each example, attend to an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.positions = nn.Embedding(3, D), nn.Embedding(3, D)
        self.attns = nn.ModuleList([CrossAttention(), CrossAttention()])
        self.ffns = nn.ModuleList([Ffn(), Ffn()])

    def forward(self, memory: Tensor) -> Tensor:
        queries, positions = (t.weight[:, None].repeat(1, memory.shape[1], 1) for t in (self.queries, self.positions))
        for attn, ffn in zip(self.attns, self.ffns, strict=True):
            queries = ffn(attn(queries, memory, positions))
        return queries


@pytest.mark.parametrize(("role", "start"), [("q", 0), ("k", D), ("v", 2 * D)])
def test_the_first_layer_multiplies_parameters_by_rows_of_one(role: str, start: int) -> None:
    def rows_of(model: QueryDecoder) -> list[list[Tensor]]:
        tensors = [[a.attn.in_proj_weight, a.attn.in_proj_bias] for a in model.attns]  # pyright: ignore
        return [[t[start : start + D] for t in own] for own in tensors]  # pyright: ignore

    memory = {"memory": torch.randn(5, 2, D)}
    assert_scales(QueryDecoder(), memory, f"layer[*].attn.cross.{role}", rows_of)
