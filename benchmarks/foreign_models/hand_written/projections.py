"""Projections that are no nn.Linear: einsum, raw parameters, F.linear by keywords, 1×1
convolutions; and functions called by keywords, sums in place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


class Stacked(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block: Any, depth: int = 2, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(**options) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Everything by keywords.
class ByKeywords(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(input=x, normalized_shape=(16,), weight=self.ln1.weight, bias=self.ln1.bias)
        q = F.linear(input=y, weight=self.wq.weight, bias=self.wq.bias)
        k = F.linear(bias=self.wk.bias, weight=self.wk.weight, input=y)
        v = F.linear(y, weight=self.wv.weight, bias=self.wv.bias)
        q, k, v = (torch.transpose(input=t.unflatten(dim=-1, sizes=(2, 8)), dim0=1, dim1=2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(key=k, query=q, value=v, scale=0.3)
        a = torch.flatten(input=a.transpose(dim0=1, dim1=2), start_dim=2)
        x = torch.add(input=x, other=self.wo(input=a))
        y = self.ln2(input=x)
        y = F.gelu(input=F.linear(input=y, weight=self.w1.weight, bias=self.w1.bias), approximate="tanh")
        return torch.add(x, other=F.linear(input=y, weight=self.w2.weight, bias=self.w2.bias), alpha=1)


# Most of the modules are never called: their weights are read.
KEYWORDS = Stack(
    (0, 1),
    {
        **{f"attn.{r}": f"blocks.{{i}}.w{r}.weight" for r in "qkvo"},
        "attn.norm": "blocks.{i}.ln1.weight",
        "ffn.up": "blocks.{i}.w1.weight",
        "ffn.down": "blocks.{i}.w2.weight",
        "ffn.norm": "blocks.{i}.ln2.weight",
    },
    {"attn.x": None, "ffn.x": "blocks.{i}.ln2:out", "ffn.h": None},
)


# Weights as (dim, heads, dim_head) in einsum, as in JAX.
class EinsumHeads(nn.Module):
    def __init__(self, d: int = 16, h: int = 2, k: int = 8, f: int = 32) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.randn(d, h, k) / 4)
        self.wk = nn.Parameter(torch.randn(d, h, k) / 4)
        self.wv = nn.Parameter(torch.randn(d, h, k) / 4)
        self.wo = nn.Parameter(torch.randn(h, k, d) / 4)
        self.w_in = nn.Parameter(torch.randn(d, f) / 4)
        self.w_out = nn.Parameter(torch.randn(f, d) / 4)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q = einsum("bnd,dhk->bhnk", y, self.wq)
        k = einsum("bnd,dhk->bhnk", y, self.wk)
        v = einsum("bnd,dhk->bhnk", y, self.wv)
        logits = einsum("bhik,bhjk->bhij", q, k) / math.sqrt(q.shape[-1])
        o = einsum("bhij,bhjk->bhik", logits.softmax(dim=-1), v)
        x = x + einsum("bhnk,hkd->bnd", o, self.wo)
        y = F.relu(einsum("bnd,df->bnf", self.ln2(x), self.w_in))
        return x + einsum("bnf,fd->bnd", y, self.w_out)


EINSUM = Stack(
    (0, 1),
    {
        **{f"attn.{r}": f"blocks.{{i}}.w{r}(d h k -> h k | d)" for r in "qkv"},
        "attn.o": "blocks.{i}.wo(h k d -> d | h k)",
        "attn.norm": "blocks.{i}.ln1.weight",
        "ffn.up": "blocks.{i}.w_in.T",
        "ffn.down": "blocks.{i}.w_out.T",
        "ffn.norm": "blocks.{i}.ln2.weight",
    },
    {"attn.x": "blocks.{i}.ln1:out", "attn.h": None, "ffn.x": "blocks.{i}.ln2:out", "ffn.h": None},
)


# One parameter for q, k and v: (3, heads, dim_head, dim), with biases.
class PackedRaw(nn.Module):
    def __init__(self, d: int = 16, h: int = 4) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.w_qkv = nn.Parameter(torch.randn(3, h, d // h, d) / 4)
        self.b_qkv = nn.Parameter(torch.randn(3, h, d // h) / 4)
        self.proj = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        q, k, v = torch.einsum("bnd,shkd->sbhnk", y, self.w_qkv) + self.b_qkv[:, None, :, None]
        o = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(o.transpose(1, 2).flatten(2))


PACKED = {
    **{f"attn.{r}": f"blocks.{{i}}.w_qkv(s h k d -> s h k | d)[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
    "attn.o": "blocks.{i}.proj.weight",
    "attn.norm": "blocks.{i}.ln.weight",
}


# Raw matrices with `@`, stored (in, out), and in-place sums on the stream.
class RawInPlace(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.g1 = nn.Parameter(torch.ones(d))
        self.g2 = nn.Parameter(torch.ones(d))
        self.wq = nn.Parameter(torch.randn(d, d) / 4)
        self.wkv = nn.Parameter(torch.randn(d, d) / 4)
        self.wo = nn.Parameter(torch.randn(d, d) / 4)
        self.up, self.down = nn.Parameter(torch.randn(d, 24) / 4), nn.Parameter(torch.randn(24, d) / 4)
        self.bias = nn.Parameter(torch.zeros(24))

    @staticmethod
    def rms(x: Tensor, g: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g

    def forward(self, x: Tensor) -> Tensor:
        y = self.rms(x, self.g1)
        q = (y @ self.wq).unflatten(-1, (4, 4)).transpose(1, 2)  # 4 heads; keys and values have 2
        k, v = (y @ self.wkv).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        w = torch.softmax(torch.matmul(q, k.mT).mul_(0.5), dim=-1)
        a = torch.matmul(w, v).transpose(1, 2).reshape(x.shape) @ self.wo
        a += x
        y = self.rms(a, self.g2)
        h = F.silu(torch.addmm(self.bias, y.flatten(0, 1), self.up)).view(*y.shape[:2], -1) @ self.down
        return h.add_(a)


RAW = Stack(
    (0, 1),
    {
        "attn.q": "blocks.{i}.wq.T",
        "attn.k": "blocks.{i}.wkv.T[0:8]",
        "attn.v": "blocks.{i}.wkv.T[8:16]",
        "attn.o": "blocks.{i}.wo.T",
        "attn.norm": "blocks.{i}.g1",
        "ffn.up": "blocks.{i}.up.T",
        "ffn.down": "blocks.{i}.down.T",
        "ffn.norm": "blocks.{i}.g2",
    },
    {"attn.x": None, "attn.h": None, "ffn.x": None, "ffn.h": None},
)


# Heads interleaved: (heads, 3, dim_head) in one Linear, taken apart by reshape and select.
class Interleaved(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, n, 2, 3, d // 2)
        q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv.select(3, 2)
        a = torch.einsum("bihd,bjhd->bhij", q, k).div(math.sqrt(d // 2)).softmax(-1)
        return x + self.out(torch.einsum("bhij,bjhd->bihd", a, v).reshape(b, n, d))


INTERLEAVED = {
    "attn.q": "blocks.{i}.qkv.weight[0:8, 24:32]",
    "attn.k": "blocks.{i}.qkv.weight[8:16, 32:40]",
    "attn.v": "blocks.{i}.qkv.weight[16:24, 40:48]",
    "attn.o": "blocks.{i}.out.weight",
    "attn.norm": "blocks.{i}.norm.weight",
}


# Parallel attention and ffn from one fused projection (PaLM), with a gate and multi-query keys.
class FusedParallel(nn.Module):
    def __init__(self, d: int = 16, h: int = 4, f: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.h, self.splits = h, (d, d // h, d // h, 2 * f)
        self.fused = nn.Linear(d, sum(self.splits), bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_out = nn.Sequential(nn.Dropout(0.0), nn.Linear(f, d, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v, ff = self.fused(y).split(self.splits, dim=-1)
        q = q.unflatten(-1, (self.h, -1)).transpose(1, 2)
        sim = torch.einsum("b h i d, b j d -> b h i j", q * 0.5, k)
        out = torch.einsum("b h i j, b j d -> b h i d", sim.softmax(-1), v)
        value, gate = ff.chunk(2, dim=-1)
        return self.attn_out(out.transpose(1, 2).flatten(2)) + self.ff_out(F.silu(gate) * value) + x


FUSED = Stack(
    (0, 1),
    {
        "attn.q": "blocks.{i}.fused.weight[0:16]",
        "attn.k": "blocks.{i}.fused.weight[16:20]",
        "attn.v": "blocks.{i}.fused.weight[20:24]",
        "attn.o": "blocks.{i}.attn_out.weight",
        "attn.norm": "blocks.{i}.norm.weight",
        "ffn.up": "blocks.{i}.fused.weight[24:48]",
        "ffn.gate": "blocks.{i}.fused.weight[48:72]",
        "ffn.down": "blocks.{i}.ff_out.1.weight",
    },
)


# Images: q, k and v by one 1×1 convolution, a feed-forward part of 1×1 convolutions.
class ConvAttention(nn.Module):
    def __init__(self, d: int = 16, h: int = 2) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, d)
        self.qkv = nn.Conv2d(d, 3 * d, 1, bias=False)
        self.proj = nn.Conv2d(d, d, kernel_size=1)
        self.h = h

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        q, k, v = (t.reshape(b, self.h, c // self.h, -1) for t in self.qkv(self.norm(x)).chunk(3, dim=1))
        sim = torch.einsum("bhdi,bhdj->bhij", q * 0.3, k)
        out = torch.einsum("bhij,bhdj->bhdi", sim.softmax(dim=-1), v)
        return x + self.proj(out.reshape(b, c, height, width))


CONV_ATTENTION = {
    **{f"attn.{r}": f"blocks.{{i}}.qkv.weight[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
    "attn.o": "blocks.{i}.proj.weight",
    "attn.norm": "blocks.{i}.norm.weight",
}


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def images() -> dict[str, Any]:
    return {"x": torch.randn(2, 16, 3, 4)}


def case(name: str, block: Any, stack: Stack | dict[str, str], inputs: Any = tokens) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", lambda: Stacked(block), inputs, (stack,))


CASES = (
    case("by_keywords", ByKeywords, KEYWORDS),
    case("einsum_heads", EinsumHeads, EINSUM),
    case("packed_raw_parameter", PackedRaw, PACKED),
    case("raw_in_place", RawInPlace, RAW),
    case("interleaved_heads", Interleaved, INTERLEAVED),
    case("fused_parallel", FusedParallel, FUSED),
    case("conv_attention", ConvAttention, CONV_ATTENTION, images),
)
