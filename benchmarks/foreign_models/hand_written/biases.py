"""Relative biases: T5, Swin, ALiBi."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


def projections(at: str, names: str = "q k v o") -> dict[str, str]:
    return {f"attn.{role}": f"{at}.{name}.weight" for role, name in zip("qkvo", names.split())}


# T5: an embedding of buckets in the first layer, its bias passed on; no scale; RMS norms.
class T5Norm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Attention(nn.Module):
    def __init__(self, d: int, has_bias: bool, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        if has_bias:
            self.relative_attention_bias = nn.Embedding(8, heads)
        self.has_bias = has_bias

    def compute_bias(self, n: int) -> Tensor:
        position = torch.arange(n)
        relative = (position[None, :] - position[:, None]).clamp(-4, 3) + 4
        return self.relative_attention_bias(relative).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shape = lambda t: t.view(t.shape[0], -1, self.heads, 8).transpose(1, 2)  # noqa: E731
        scores = torch.matmul(shape(self.q(x)), shape(self.k(x)).transpose(3, 2))
        if position_bias is None:
            position_bias = self.compute_bias(x.shape[1])
        scores += position_bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        out = torch.matmul(weights, shape(self.v(x))).transpose(1, 2).contiguous().view(x.shape)
        return self.o(out), position_bias


class T5Block(nn.Module):
    def __init__(self, d: int, has_bias: bool) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = T5Attention(d, has_bias), T5Norm(d), T5Norm(d)
        self.wi_0, self.wi_1 = nn.Linear(d, 24, bias=False), nn.Linear(d, 24, bias=False)
        self.wo = nn.Linear(24, d, bias=False)

    def forward(self, x: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        a, position_bias = self.attention(self.norm1(x), position_bias)
        x = x + a
        y = self.norm2(x)
        return x + self.wo(F.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y)), position_bias


class T5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([T5Block(16, has_bias=i == 0) for i in range(3)])
        self.final_layer_norm = T5Norm(16)

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.block:
            x, bias = layer(x, bias)
        return self.final_layer_norm(x)


T5 = {
    **projections("block.{i}.attention"),
    "attn.norm": "block.{i}.norm1.weight",
    "ffn.gate": "block.{i}.wi_0.weight",
    "ffn.up": "block.{i}.wi_1.weight",
    "ffn.down": "block.{i}.wo.weight",
    "ffn.norm": "block.{i}.norm2.weight",
}


# Swin: windows of an image, every second layer shifted, a table of biases gathered by an index.
def window_partition(x: Tensor, w: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // w, w, W // w, w, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, C)


def window_reverse(windows: Tensor, w: int, H: int, W: int) -> Tensor:
    B = int(windows.shape[0] / (H * W / w / w))
    x = windows.view(B, H // w, W // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim: int, window: int, heads: int = 2) -> None:
        super().__init__()
        self.window, self.num_heads, self.scale = window, heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, shift: int, dim: int = 16, size: int = 4, window: int = 2) -> None:
        super().__init__()
        self.shift, self.size, self.window = shift, size, window
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        mask = None
        if shift:
            image = torch.zeros(1, size, size, 1)
            for n, rows in enumerate((slice(0, -window), slice(-window, -shift), slice(-shift, None))):
                image[:, rows] += n
            windows = window_partition(image, window).view(-1, window * window)
            difference = windows.unsqueeze(1) - windows.unsqueeze(2)
            mask = difference.masked_fill(difference != 0, -100.0)
        self.register_buffer("attn_mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        H = W = self.size
        B, _, C = x.shape
        shortcut = x
        x = self.norm1(x).view(B, H, W, C)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.window).view(-1, self.window**2, C)
        windows = self.attn(windows, mask=self.attn_mask).view(-1, self.window, self.window, C)
        x = window_reverse(windows, self.window, H, W)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x.view(B, H * W, C)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SwinBlock(shift=i % 2) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for blk in self.blocks:
            x = blk(x)
        return x.mean(1)


# The sum takes the attention's output put back in place; the projection is in windows.
SWIN = Stack(
    (0, 1, 2, 3),
    {
        **{f"attn.{r}": f"blocks.{{i}}.attn.qkv.weight[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
        "attn.o": "blocks.{i}.attn.proj.weight",
        "attn.norm": "blocks.{i}.norm1.weight",
        "ffn.up": "blocks.{i}.mlp.0.weight",
        "ffn.down": "blocks.{i}.mlp.2.weight",
        "ffn.norm": "blocks.{i}.norm2.weight",
    },
)


# ALiBi with grouped heads and a cap on logits; parallel attention and feed-forward, one norm.
class AlibiBlock(nn.Module):
    def __init__(self, d: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.dh = heads, groups, d // heads
        self.ln = nn.LayerNorm(d, bias=False)
        self.query, self.dense = nn.Linear(d, d), nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * groups * self.dh)
        self.h_to_4h, self.four_h_to_h = nn.Linear(d, 32), nn.Linear(32, d)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        ln = self.ln(x)
        q = self.query(ln).view(b, n, self.groups, self.heads // self.groups, self.dh)
        k, v = self.kv(ln).view(b, n, self.groups, 2 * self.dh).chunk(2, -1)
        logits = torch.einsum("bqgrd,bkgd->bgrqk", q, k) / math.sqrt(self.dh)
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        alibi = self.slopes.view(self.groups, -1, 1, 1) * distance
        logits = 30 * torch.tanh((logits + alibi) / 30)
        logits = logits.masked_fill(distance > 0, torch.finfo(logits.dtype).min)
        out = torch.einsum("bgrqk,bkgd->bqgrd", logits.softmax(-1), v).reshape(b, n, d)
        return x + self.dense(out) + self.four_h_to_h(F.gelu(self.h_to_4h(ln)))


# Rows of `kv` are [group, (k, v), feature].
ALIBI = {
    "attn.q": "blocks.{i}.query.weight",
    "attn.k": "blocks.{i}.kv.weight[0:4, 8:12]",
    "attn.v": "blocks.{i}.kv.weight[4:8, 12:16]",
    "attn.o": "blocks.{i}.dense.weight",
    "attn.norm": "blocks.{i}.ln.weight",
    "ffn.up": "blocks.{i}.h_to_4h.weight",
    "ffn.down": "blocks.{i}.four_h_to_h.weight",
}


class Blocks(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def case(name: str, build: Any, stack: Stack | dict[str, str], inputs: Any = tokens) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", build, inputs, (stack,))


CASES = (
    case("t5_bias", T5Encoder, Stack((0, 1, 2), T5)),
    case("swin", Swin, SWIN, lambda: {"x": torch.randn(2, 16, 16)}),
    case("alibi_parallel", lambda: Blocks(AlibiBlock), ALIBI),
)
