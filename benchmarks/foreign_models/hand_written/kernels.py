"""Attention kernels under other names, as shims around xformers and flash-attn have them, in plain
torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


# xformers' layout: (batch, tokens, heads, features).
def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = query * scale
    attn = torch.einsum("bmhk,bnhk->bhmn", query, key)
    if attn_bias is not None:
        attn = attn + attn_bias
    attn = F.dropout(attn.softmax(-1), p)
    return torch.einsum("bhmn,bnhk->bmhk", attn, value)


# flash-attn's: (batch, tokens, heads, features), and packed (batch, tokens, 3, heads, features).
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale)
    return out.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    q, k, v = qkv.unbind(dim=2)
    return flash_attn_func(q, k, v, dropout_p, causal=causal)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sequences one behind the other: (tokens, heads, features)."""
    positions = torch.arange(q.shape[0], device=q.device)
    owner = torch.bucketize(positions, cu_seqlens[1:], right=True)
    mask = owner[:, None] == owner[None, :]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


class SwiGLUPacked(nn.Module):
    """dinov2's: one Linear for gate and value."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(d, 2 * f)
        self.w3 = nn.Linear(f, d)

    def forward(self, x: Tensor) -> Tensor:
        x12 = self.w12(x)
        x1, x2 = x12.chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


SWIGLU = {
    "ffn.gate": "blocks.{i}.mlp.w12.weight[0:24]",
    "ffn.up": "blocks.{i}.mlp.w12.weight[24:48]",
    "ffn.down": "blocks.{i}.mlp.w3.weight",
    "ffn.norm": "blocks.{i}.norm2.weight",
}


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class MemEffAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, attn_bias: Any = None) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = torch.unbind(qkv, 2)
        x = memory_efficient_attention(q, k, v, attn_bias=attn_bias)
        x = x.reshape([B, N, C])
        return self.proj(x)


class DinoBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = MemEffAttention(dim), SwiGLUPacked(dim, 24)
        self.ls1, self.ls2 = LayerScale(dim), LayerScale(dim)

    def forward(self, x: Tensor) -> Tensor:
        def attn_residual_func(x: Tensor) -> Tensor:
            return self.ls1(self.attn(self.norm1(x)))

        def ffn_residual_func(x: Tensor) -> Tensor:
            return self.ls2(self.mlp(self.norm2(x)))

        x = x + attn_residual_func(x)
        return x + ffn_residual_func(x)


def thirds(at: str, width: int = 16) -> dict[str, str]:
    return {f"attn.{r}": f"{at}.weight[{width * n}:{width * (n + 1)}]" for n, r in enumerate("qkv")}


DINO = Stack(
    (0, 1),
    thirds("blocks.{i}.attn.qkv")
    | {"attn.o": "blocks.{i}.attn.proj.weight", "attn.norm": "blocks.{i}.norm1.weight"}
    | SWIGLU,
    {"attn.h": "blocks.{i}.ls1", "ffn.h": "blocks.{i}.ls2"},
)


# A llama with flash-attn: grouped queries, RoPE in the layout of the kernel.
def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.double()).type_as(x) * self.weight


class FlashBlock(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.dh = heads, kv, dim // heads
        self.wqkv = nn.Linear(dim, (heads + 2 * kv) * self.dh, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.w1, self.w3, self.w2 = nn.Linear(dim, 24), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.wqkv(self.norm1(x))
        q = qkv[..., : self.heads * self.dh].view(b, n, self.heads, self.dh)
        kv = qkv[..., self.heads * self.dh :].view(b, n, 2, self.kv, self.dh)
        freqs = torch.outer(torch.arange(n), 1e4 ** -torch.linspace(0, 1, self.dh // 2)).to(x.dtype)[:, None]
        q = apply_rotary(q, freqs.cos(), freqs.sin())
        k = apply_rotary(kv[:, :, 0], freqs.cos(), freqs.sin())
        out = flash_attn_func(q, k, kv[:, :, 1], causal=True)
        h = x + self.wo(out.reshape(b, n, -1))
        y = self.norm2(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


FLASH = {
    "attn.q": "blocks.{i}.wqkv.weight[0:16]",
    "attn.k": "blocks.{i}.wqkv.weight[16:24]",
    "attn.v": "blocks.{i}.wqkv.weight[24:32]",
    "attn.o": "blocks.{i}.wo.weight",
    "attn.norm": "blocks.{i}.norm1.weight",
    "ffn.gate": "blocks.{i}.w1.weight",
    "ffn.up": "blocks.{i}.w3.weight",
    "ffn.down": "blocks.{i}.w2.weight",
    "ffn.norm": "blocks.{i}.norm2.weight",
}


# Packed flash attention, post-norm, the block a function of (x, residual) as flash-attn's own.
class PackedBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 32), nn.Linear(32, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, n, d = hidden_states.shape
        qkv = self.Wqkv(hidden_states).view(b, n, 3, 2, d // 2)
        context = flash_attn_qkvpacked_func(qkv, causal=True).reshape(b, n, d)
        hidden_states = self.norm1(self.out_proj(context) + hidden_states)
        mlp_out = self.fc2(F.gelu(self.fc1(hidden_states), approximate="tanh"))
        return self.norm2(mlp_out + hidden_states)


PACKED = thirds("blocks.{i}.Wqkv") | {
    "attn.o": "blocks.{i}.out_proj.weight",
    "attn.norm": "blocks.{i}.norm1.weight",
    "ffn.up": "blocks.{i}.fc1.weight",
    "ffn.down": "blocks.{i}.fc2.weight",
    "ffn.norm": "blocks.{i}.norm2.weight",
}


# Unpadded: sequences one behind the other, (tokens, d), with their borders.
class VarlenBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.Wi, self.Wo = nn.Linear(dim, 2 * 24, bias=False), nn.Linear(24, dim, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.Wqkv(self.norm1(x)).view(x.shape[0], 3, 2, -1).unbind(1)
        x = x + self.out_proj(flash_attn_varlen_func(q, k, v, cu_seqlens).flatten(1))
        inner, gate = self.Wi(self.norm2(x)).chunk(2, dim=-1)
        return x + self.Wo(F.gelu(inner) * gate)


VARLEN = thirds("blocks.{i}.Wqkv") | {
    "attn.o": "blocks.{i}.out_proj.weight",
    "attn.norm": "blocks.{i}.norm1.weight",
    "ffn.gate": "blocks.{i}.Wi.weight[0:24]",
    "ffn.up": "blocks.{i}.Wi.weight[24:48]",
    "ffn.down": "blocks.{i}.Wo.weight",
    "ffn.norm": "blocks.{i}.norm2.weight",
}


# Diffusion U-Nets' (CompVis): an autograd-free sliced attention that loops over the batch.
class SlicedAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.0)])
        self.heads = heads

    def batch_to_head(self, t: Tensor) -> Tensor:
        b, n, d = t.shape
        return t.reshape(b, n, self.heads, d // self.heads).permute(0, 2, 1, 3).reshape(b * self.heads, n, -1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        y = self.norm(x)
        q, k, v = map(self.batch_to_head, (self.to_q(y), self.to_k(y), self.to_v(y)))
        scores = torch.baddbmm(
            torch.empty(q.shape[0], n, n, dtype=q.dtype),
            q,
            k.transpose(-1, -2),
            beta=0,
            alpha=1 / math.sqrt(q.shape[-1]),
        )
        hidden = torch.bmm(scores.softmax(dim=-1), v)
        hidden = hidden.reshape(b, self.heads, n, -1).permute(0, 2, 1, 3).reshape(b, n, d)
        hidden = self.to_out[0](hidden)
        hidden = self.to_out[1](hidden)
        return hidden + x


SLICED = {f"attn.{r}": f"blocks.{{i}}.to_{r}.weight" for r in "qkv"} | {
    "attn.o": "blocks.{i}.to_out.0.weight",
    "attn.norm": "blocks.{i}.norm.weight",
}


class Blocks(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        for blk in self.blocks:
            x = blk(x, **more)
        return self.norm(x)


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def unpadded() -> dict[str, Any]:
    return {"x": torch.randn(7, 16), "cu_seqlens": torch.tensor([0, 3, 7])}


def case(name: str, block: Any, stack: Stack | dict[str, str], inputs: Any = tokens) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", lambda: Blocks(block), inputs, (stack,))


CASES = (
    case("xformers_shim", DinoBlock, DINO),
    case("flash_attn_shim", FlashBlock, FLASH),
    case("flash_attn_packed", PackedBlock, PACKED),
    case("flash_attn_varlen", VarlenBlock, VARLEN, unpadded),
    case("baddbmm_attention", SlicedAttention, SLICED),
)
