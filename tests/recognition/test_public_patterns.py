"""Attention patterns of public repositories: the rows and Linears of each role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc

D, H, T = 16, 2, 5
functional: Any = nn.functional


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), attn, Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RelativeAttention(nn.Module):
    """Conformer: positions are an embedding of distances, cast to the dtype of the queries. Their
    product with the queries comes before or after that with the keys.
    """

    def __init__(self, positions_first: bool) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.rel_pos_emb, self.positions_first = nn.Embedding(9, D // H), positions_first

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        seq = torch.arange(x.shape[-2], device=x.device)
        rel = self.rel_pos_emb((seq[:, None] - seq[None, :]).clamp(-4, 4) + 4).to(q)
        positions = torch.einsum("b h n d, n r d -> b h n r", q, rel)
        scores = positions + dots if self.positions_first else dots + positions
        mixed = torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(-1), v)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """CaiT: Linears over heads before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.proj_l, self.proj_w = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * 0.5, qkv[1], qkv[2]
        scores = self.proj_l((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        scores = self.proj_w(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((scores @ v).transpose(1, 2).flatten(2))


class OwnBias(nn.Module):
    """BEiT and SwinV2: a fused projection with a concatenated bias; all arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.q_bias, self.v_bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        qkv = functional.linear(input=x, weight=self.qkv.weight, bias=bias)
        q, k, v = qkv.unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(functional.scaled_dot_product_attention(query=q, key=k, value=v).transpose(1, 2).flatten(2))


class QKNorm(nn.Module):
    """Flux: queries and keys are cast with `type_as` to the dtype of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(D // H), nn.RMSNorm(D // H)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


def rotated(x: Tensor, pe: Tensor) -> Tensor:
    y = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (pe[..., 0] * y[..., 0] + pe[..., 1] * y[..., 1]).reshape(*x.shape).type_as(x)


def joint(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    mixed = functional.scaled_dot_product_attention(rotated(q, pe), rotated(k, pe), v)
    return mixed.transpose(1, 2).flatten(2)


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(*qkv.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


class SingleStream(nn.Module):
    """Flux: one Linear for q, k, v and the hidden units, one for both outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2, self.mod = nn.Linear(D, 5 * D), nn.Linear(3 * D, D), nn.Linear(D, 3 * D)
        self.norm, self.pre_norm = QKNorm(), nn.LayerNorm(D, elementwise_affine=False)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        shift, scale, gate = self.mod(functional.silu(vec))[:, None].chunk(3, -1)
        qkv, mlp = torch.split(self.linear1((1 + scale) * self.pre_norm(x) + shift), [3 * D, 2 * D], -1)
        q, k, v = split_qkv(qkv)
        q, k = self.norm(q, k, v)
        return x + gate * self.linear2(torch.cat((joint(q, k, v, pe), functional.gelu(mlp)), 2))


class DoubleStream(nn.Module):
    """Flux: image and text attend jointly, each with Linears of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.img, self.txt = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.img_proj, self.txt_proj = nn.Linear(D, D), nn.Linear(D, D)
        self.img_norm, self.txt_norm = QKNorm(), QKNorm()

    def forward(self, x: Tensor, txt: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = split_qkv(self.img(x))
        q, k = self.img_norm(q, k, v)
        q2, k2, v2 = split_qkv(self.txt(txt))
        q2, k2 = self.txt_norm(q2, k2, v2)
        both = joint(torch.cat((q2, q), 2), torch.cat((k2, k), 2), torch.cat((v2, v), 2), pe)
        mixed, mixed2 = both[:, txt.shape[1] :], both[:, : txt.shape[1]]
        return x + self.img_proj(mixed), txt + self.txt_proj(mixed2)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor, txt: Tensor | None = None, pe: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            output = block(x) if txt is None else block(x, txt, pe)
            x = output[0] if isinstance(output, tuple) else output
        return x


def roles(model: nn.Module, *sample: Tensor) -> dict[str, str]:
    """The Linears of the first layer's attention by role, with their rows."""
    table = peftc.sites(model, sample=dict(zip(("x", "txt", "pe"), sample, strict=False)))
    weights: dict[str, str] = {}
    for site in table.sites:
        if site.root == "blocks.0" and "attn" in dict(site.steps) and site.steps[-1][0] in "qkvo":
            weight = site.states["w"].weight
            assert weight is not None
            rows = f"[{weight.rows.start}:{weight.rows.stop}]" if weight.rows else ""
            others = [index for name, index in site.steps[1:] if index]  # of a second stream
            weights[site.steps[-1][0] + "'" * len(others)] = site.module.rpartition(".")[2] + rows
    return weights


FUSED = {"q": "[0:16]", "k": "[16:32]", "v": "[32:48]"}


@pytest.mark.parametrize("positions_first", [True, False])
def test_relative_positions_are_no_keys(positions_first: bool) -> None:
    model = Model(lambda: Block(RelativeAttention(positions_first)))
    expected = {"q": "to_q", "k": "to_kv[0:16]", "v": "to_kv[16:32]", "o": "to_out"}
    assert roles(model, torch.randn(2, T, D)) == expected


def test_talking_heads() -> None:
    expected = {role: f"qkv{rows}" for role, rows in FUSED.items()} | {"o": "proj"}
    assert roles(Model(lambda: Block(TalkingHeads())), torch.randn(2, T, D)) == expected


def test_an_attention_with_a_functional_projection() -> None:
    """q, k and v are rows of a weight that the code multiplies by itself."""
    expected = {role: f"qkv{rows}" for role, rows in FUSED.items()} | {"o": "proj"}
    assert roles(Model(lambda: Block(OwnBias())), torch.randn(2, T, D)) == expected


PE = torch.randn(1, 1, T + 2, D // H // 2, 2, 2)


def test_rows_of_a_stream_with_its_hidden_units() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SingleStream()

        def forward(self, x: Tensor, txt: Tensor, pe: Tensor) -> Tensor:
            return self.inner(x, txt[:, 0], pe)

    sample = torch.randn(1, T + 2, D), torch.randn(1, 2, D), PE
    assert roles(Model(Single), *sample) == {role: f"linear1{rows}" for role, rows in FUSED.items()}
    table = peftc.sites(Model(Single), sample=dict(zip(("x", "txt", "pe"), sample, strict=True)))
    (up,) = (site.states["w"].weight for site in table.sites if site.path.endswith("layer[0].ffn.up"))
    assert str(up and up.rows and up.rows.start) == "48"
    (both,) = (part for part in table.unplaced if part.module == "blocks.0.inner.linear2")
    assert both.roles == {"attn.o", "ffn.down", "ffn.hidden"}


def test_rows_of_a_stream_that_attends_with_another() -> None:
    expected = {role: f"img{rows}" for role, rows in FUSED.items()} | {"o": "img_proj"}
    expected |= {f"{role}'": f"txt{rows}" for role, rows in FUSED.items()} | {"o'": "txt_proj"}
    assert roles(Model(DoubleStream), torch.randn(1, T, D), torch.randn(1, 2, D), PE) == expected
