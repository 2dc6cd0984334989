"""Attention as research code writes it: einops, grouped rows, windows, memories, reduced keys.
The role tables were written before peftc had seen the code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.hand_written.projections import Stacked
from benchmarks.foreign_models.tables import attention, ffn, hand_written, packed, sequence, split_kv

B = "blocks.{i}"


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


MLP = ffn(f"{B}.mlp.0", f"{B}.mlp.2", f"{B}.norm2")


class PreNorm(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x))."""

    attention: type[nn.Module] = nn.Module

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = self.attention(width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def blocks(attn: type[nn.Module]) -> Any:
    kind = type(attn.__name__ + "Block", (PreNorm,), {"attention": attn, "__module__": __name__})
    globals()[kind.__name__] = kind  # copies and pickles find it
    return lambda: Stacked(kind)


# InternLM2: one weight; for each group of heads its queries, then a key and a value.
class Grouped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(width, 8 * 4, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = rearrange(self.wqkv(x), "b n (g s d) -> b n g s d", g=2, d=4)
        q = rearrange(qkv[..., :2, :], "b n g s d -> b n (g s) d")
        k, v = qkv[..., -2, :], qkv[..., -1, :]
        freqs = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), 10.0 ** -torch.arange(2, dtype=x.dtype))
        turn = torch.polar(torch.ones_like(freqs), freqs)[:, None]
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(3) for t in (q, k))
        k, v = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
        scores = q.transpose(1, 2) @ k.mT / 2
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=x.dtype).triu(1)
        out = F.softmax(scores + mask, dim=-1) @ v
        return self.wo(rearrange(out, "b h n d -> b n (h d)"))


# Cosine similarity with a learnt temperature, in shifted windows.
class CosineWindow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.tau = nn.Parameter(torch.full((2, 1, 1), math.log(10.0)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.roll(x, -2, dims=1)
        qkv = rearrange(self.qkv(x), "b (w n) (c h d) -> c (b w) h n d", c=3, h=2, n=4)
        q, k, v = qkv.unbind(0)
        similarity = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        weights = (similarity * self.tau.clamp(max=math.log(100.0)).exp()).softmax(-1)
        out = rearrange(weights @ v, "(b w) h n d -> b (w n) (h d)", b=x.shape[0])
        return torch.roll(self.proj(out), 2, dims=1)


# Linears over heads before and behind the softmax.
class TalkingHeads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.before, self.behind = (nn.Parameter(torch.randn(4, 4) / 2) for _ in range(2))
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=4) for t in self.to_qkv(x).chunk(3, -1))
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) / 2
        weights = torch.einsum("b h i j, h g -> b g i j", scores, self.before).softmax(-1)
        weights = torch.einsum("b h i j, h g -> b g i j", weights, self.behind)
        return self.to_out(rearrange(torch.einsum("b h i j, b h j d -> b h i d", weights, v), "b h n d -> b n (h d)"))


# Learnt keys and values beside those of the tokens; distances are subtracted (ALiBi).
class PersistentMemory(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.memory = nn.Parameter(torch.randn(2, 2, 3, 8))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25])[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, 2, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, 2, 8).permute(2, 0, 3, 1, 4)
        k, v = (torch.cat((m.expand(b, -1, -1, -1), t), dim=2) for m, t in zip(self.memory, (k, v), strict=True))
        place = torch.arange(n)
        bias = F.pad(-(place[:, None] - place).abs() * self.slopes, (3, 0))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 8**-0.5 + bias, dim=-1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, n, -1))


# Keys and values of a sequence that a strided convolution has shortened.
class Compressed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.reduce, self.norm = nn.Conv1d(width, width, 2, stride=2, groups=2), nn.LayerNorm(width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.to_q(x), "b n (h d) -> b h n d", h=2)
        short = self.norm(self.reduce(x.mT).mT)
        k, v = rearrange(self.to_kv(short), "b n (two h d) -> two b h n d", two=2, h=2)
        return self.to_out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


# Each token sees itself and three before it: keys and values are unfolded.
class Unfolded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, 8).unbind(2)
        k, v = (F.pad(t, (0, 0, 0, 0, 3, 0)).unfold(1, 4, 1) for t in (k, v))  # b n h d w
        weights = torch.einsum("bnhd,bnhdw->bnhw", q, k).mul(8**-0.5).softmax(dim=-1)
        return self.proj(torch.einsum("bnhw,bnhdw->bnhd", weights, v).reshape(b, n, c))


# The query's weight has a gate of each head beside it.
class GatedHeads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, 2 * width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, 8, bias=False), nn.Linear(width, 8, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = torch.chunk(self.q_proj(x), 2, dim=-1)
        q = self.q_norm(q.unflatten(-1, (2, 8))).transpose(1, 2)
        k, v = self.k_norm(self.k_proj(x))[:, None], self.v_proj(x)[:, None]
        out = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(gate))


# Only the largest scores of each query are kept.
class TopK(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        scores = (q * 8**-0.5) @ k.transpose(-2, -1)
        mask = torch.zeros_like(scores)
        mask.scatter_(-1, torch.topk(scores, k=3, dim=-1).indices, 1.0)
        weights = torch.where(mask > 0, scores, torch.full_like(scores, float("-inf"))).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


# Softmax of queries over features and of keys over tokens, then two products.
class Efficient(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.reprojection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(f(x), "b n (h d) -> b h n d", h=2) for f in (self.queries, self.keys, self.values))
        context = k.softmax(dim=-2).transpose(-2, -1) @ v
        return self.reprojection(rearrange(q.softmax(dim=-1) @ context, "b h n d -> b n (h d)"))


# Rows, then columns of an image, in one block; a third sub-layer is convolutional.
class AxialImages(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.row, self.column = TopK(width), TopK(width)
        self.up, self.depth = nn.Conv2d(width, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.down = nn.Conv2d(32, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = x + rearrange(self.row(rearrange(self.norm1(x), "b h w c -> (b h) w c")), "(b h) w c -> b h w c", h=h)
        x = x + rearrange(self.column(rearrange(self.norm2(x), "b h w c -> (b w) h c")), "(b w) h c -> b h w c", w=w)
        y = self.down(F.gelu(self.depth(self.up(rearrange(self.norm3(x), "b h w c -> b c h w")))))
        return x + rearrange(y, "b c h w -> b h w c")


# Flamingo: latents see the tokens and themselves.
class Resampler(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm_media, self.norm_latents = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q, self.to_kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp(width)

    def forward(self, media: Tensor, latents: Tensor) -> Tensor:
        x, y = self.norm_media(media), self.norm_latents(latents)
        q = rearrange(self.to_q(y), "b n (h d) -> b h n d", h=2) * 8**-0.5
        k, v = self.to_kv(torch.cat((x, y), dim=-2)).chunk(2, dim=-1)
        k, v = (rearrange(t, "b n (h d) -> b h n d", h=2) for t in (k, v))
        scores = torch.einsum("... i d, ... j d -> ... i j", q, k)
        scores = scores - scores.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("... i j, ... j d -> ... i d", scores.softmax(dim=-1), v)
        latents = latents + self.to_out(rearrange(out, "b h n d -> b n (h d)"))
        return latents + self.mlp(self.norm2(latents))


class Flamingo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 16))
        self.blocks = nn.ModuleList(Resampler() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        latents = repeat(self.latents, "n d -> b n d", b=x.shape[0])
        for block in self.blocks:
            latents = block(x, latents)
        return latents


A = f"{B}.attn"
QKV = packed(f"{A}.qkv", 16, o=f"{A}.proj", norm=f"{B}.norm1") | MLP
TWO = {
    role: (f"{B}.row.{at}", f"{B}.column.{at}")
    for role, at in (
        ("attn.q", "qkv.weight[0:16]"),
        ("attn.k", "qkv.weight[16:32]"),
        ("attn.v", "qkv.weight[32:48]"),
        ("attn.o", "proj.weight"),
    )
}
GROUPS = {"q": "0:8, 16:24", "k": "8:12, 24:28", "v": "12:16, 28:32"}

CASES = (
    hand_written(
        "internlm2_groups",
        blocks(Grouped),
        sequence(),
        Stack(
            (0, 1),
            attention(**{r: f"{A}.wqkv[{rows}]" for r, rows in GROUPS.items()}, o=f"{A}.wo", norm=f"{B}.norm1") | MLP,
        ),
    ),
    hand_written("cosine_window", blocks(CosineWindow), sequence(), Stack((0, 1), QKV, {"attn.h": A})),
    hand_written(
        "talking_heads",
        blocks(TalkingHeads),
        sequence(),
        Stack((0, 1), packed(f"{A}.to_qkv", 16, o=f"{A}.to_out", norm=f"{B}.norm1") | MLP),
    ),
    hand_written(
        "persistent_memory",
        blocks(PersistentMemory),
        sequence(),
        Stack((0, 1), split_kv(f"{A}.q", f"{A}.kv", 16, o=f"{A}.out", norm=f"{B}.norm1") | MLP),
    ),
    hand_written(
        "compressed_keys",
        blocks(Compressed),
        sequence(),
        Stack((0, 1), split_kv(f"{A}.to_q", f"{A}.to_kv", 16, o=f"{A}.to_out", norm=(f"{B}.norm1", f"{A}.norm")) | MLP),
    ),
    hand_written("unfolded_keys", blocks(Unfolded), sequence(), Stack((0, 1), QKV)),
    hand_written(
        "gated_heads",
        blocks(GatedHeads),
        sequence(),
        Stack(
            (0, 1),
            attention(
                q=f"{A}.q_proj[0:16]",
                k=f"{A}.k_proj",
                v=f"{A}.v_proj",
                o=f"{A}.o_proj",
                norm=f"{B}.norm1",
                q_norm=f"{A}.q_norm",
                k_norm=f"{A}.k_norm",
            )
            | MLP,
        ),
    ),
    hand_written("topk_scores", blocks(TopK), sequence(), Stack((0, 1), QKV)),
    hand_written(
        "efficient_attention",
        blocks(Efficient),
        sequence(),
        Stack(
            (0, 1),
            attention(q=f"{A}.queries", k=f"{A}.keys", v=f"{A}.values", o=f"{A}.reprojection", norm=f"{B}.norm1") | MLP,
        ),
    ),
    hand_written(
        "axial_images",
        lambda: Stacked(AxialImages),
        lambda: {"x": torch.randn(2, 4, 6, 16)},
        Stack(
            (0, 1),
            TWO | {"attn.norm": (f"{B}.norm1.weight", f"{B}.norm2.weight")} | ffn(f"{B}.up", f"{B}.down", f"{B}.norm3"),
        ),
    ),
    hand_written(
        "flamingo_resampler",
        Flamingo,
        sequence(),
        Stack(
            (0, 1),
            split_kv(f"{B}.to_q", f"{B}.to_kv", 16, o=f"{B}.to_out", norm=(f"{B}.norm_media", f"{B}.norm_latents"))
            | MLP,
        ),
    ),
)
