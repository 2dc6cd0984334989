"""Whole blocks as research code writes them: caches, shared layers, branches, routed tokens.
The role tables were written before peftc had seen the code.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.hand_written.projections import Stacked
from benchmarks.foreign_models.tables import ffn, glu, hand_written, packed, sequence, split_kv

B = "blocks.{i}"


class SelfAttention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def self_attention(at: str = f"{B}.attn", norm: Any = f"{B}.norm1", kind: str = "") -> Any:
    return packed(f"{at}.qkv", 16, kind=kind, o=f"{at}.proj", norm=norm)


MLP = ffn(f"{B}.mlp.0", f"{B}.mlp.2", f"{B}.norm2")


# Keys and values of the context are computed once and kept in a dict that the caller hands on.
class CachedCross(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attn = SelfAttention(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor, context: Tensor, cache: dict[Any, Any] | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), causal=True)
        q = rearrange(self.q(self.norm2(x)), "b n (h d) -> b h n d", h=2)
        if cache is not None and self in cache:
            k, v = cache[self]
        else:
            k, v = rearrange(self.kv(context), "b n (c h d) -> c b h n d", c=2, h=2)
            if cache is not None:
                cache[self] = k, v
        x = x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))
        return x + self.mlp(self.norm3(x))


class CachedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachedCross() for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        cache: dict[Any, Any] = {}
        for block in self.blocks:
            x = block(x, context, cache)
        return x


# An ffn whose first projection is a convolution over tokens, cut in value and gate.
class ConvGLU(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width)
        self.inner, self.outer = nn.Conv1d(width, 64, 1), nn.Conv1d(32, width, 1)
        self.mixing = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x))
        value, gate = self.inner(self.norm2(x).transpose(1, 2)).chunk(2, dim=1)
        return x + self.scale2 * self.outer(self.mixing(value) * F.silu(gate)).transpose(1, 2)


# One block, three times, told by an embedding which time it is.
class TiedBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = SelfAttention(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TiedLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.steps = TiedBlock(), nn.Embedding(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = self.block(x + self.steps.weight[i])
        return x


# DeepSeek-V3: sigmoid scores with a bias of selection, experts one by one, and one for all tokens.
class Expert(nn.Module):
    def __init__(self, width: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class BiasedGate(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        indices = torch.topk(scores + self.bias, 2, dim=-1)[1]
        weights = scores.gather(1, indices)
        return weights / weights.sum(dim=-1, keepdim=True), indices


class SharedMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared_experts = BiasedGate(), Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, 16)
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=4).tolist()
        for i in range(4):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        z = self.shared_experts(x)
        return (y + z).view(shape)


class SharedMoEBlock(TiedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = SharedMoE()


# adaLN-zero for three sub-layers, from one vector.
class NineChunks(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.attn = SelfAttention(width)
        self.wq, self.wkv, self.wo = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.w12, self.w3 = nn.Linear(width, 64), nn.Linear(32, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 9 * width))

    def forward(self, x: Tensor, context: Tensor, c: Tensor) -> Tensor:
        parts = self.modulation(c).unsqueeze(1).chunk(9, dim=-1)
        (s1, b1, g1), (s2, b2, g2), (s3, b3, g3) = parts[:3], parts[3:6], parts[6:]
        x = x + g1 * self.attn(self.norms[0](x) * (1 + s1) + b1)
        q = self.q_norm(self.wq(self.norms[1](x) * (1 + s2) + b2).unflatten(-1, (2, 8)))
        k, v = self.wkv(context).unflatten(-1, (2, 2, 8)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, self.k_norm(k), v))
        x = x + g2 * self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y, gate = self.w12(self.norms[2](x) * (1 + s3) + b3).chunk(2, dim=-1)
        return x + g3 * self.w3(F.silu(y) * gate)


class NineChunksModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NineChunks() for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, context, c)
        return x


# E-Branchformer: attention beside a gated convolution; both are put together and projected.
class Branches(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm_attn, self.norm_conv, self.norm2, self.norm_gate = (nn.LayerNorm(width) for _ in range(4))
        self.attn = SelfAttention(width)
        self.inner, self.outer = nn.Linear(width, 32), nn.Linear(16, width)
        self.depth = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.fusion = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.merge, self.mlp = nn.Linear(32, width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        first = self.attn(self.norm_attn(x))
        residual, gate = F.gelu(self.inner(self.norm_conv(x))).chunk(2, dim=-1)
        gate = self.depth(self.norm_gate(gate).transpose(1, 2)).transpose(1, 2)
        second = self.outer(residual * gate)
        both = torch.cat((first, second), dim=-1)
        both = both + self.fusion(both.transpose(1, 2)).transpose(1, 2)
        x = x + self.merge(both)
        return x + self.mlp(self.norm2(x))


# Mixture of depths: a router picks half of the tokens for a block; the others pass by it.
class Depths(TiedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).squeeze(-1)
        chosen = torch.topk(weights, x.shape[1] // 2, dim=1, sorted=False).indices.sort(dim=1).values
        index = chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        y = x.gather(1, index)
        y = y + self.attn(self.norm1(y))
        y = y + self.mlp(self.norm2(y))
        gate = weights.gather(1, chosen).sigmoid().unsqueeze(-1)
        return x.scatter_add(1, index, gate * (y - x.gather(1, index)))


def conditioned() -> dict[str, Any]:
    return {"x": torch.randn(2, 8, 16), "context": torch.randn(2, 5, 16), "c": torch.randn(2, 16)}


WEIGHTS = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
EXPERT = {f"ffn.experts.{r}": f"{B}.mlp.experts.{{0..3}}.{w}.weight" for r, w in WEIGHTS}
SHARED = {f"ffn.shared.{r}": f"{B}.mlp.shared_experts.{w}.weight" for r, w in WEIGHTS}
ROUTER = {"ffn.router": f"{B}.mlp.gate.weight", "ffn.norm": f"{B}.norm2.weight"}

CASES = (
    hand_written(
        "cached_cross",
        CachedDecoder,
        lambda: {"x": torch.randn(2, 8, 16), "context": torch.randn(2, 5, 16)},
        Stack(
            (0, 1),
            self_attention(kind="self")
            | split_kv(f"{B}.q", f"{B}.kv", 16, "cross", o=f"{B}.out", norm=f"{B}.norm2")
            | ffn(f"{B}.mlp.0", f"{B}.mlp.2", f"{B}.norm3"),
        ),
    ),
    hand_written(
        "conv_glu",
        lambda: Stacked(ConvGLU),
        sequence(),
        Stack(
            (0, 1),
            self_attention() | glu(f"{B}.inner", 32, f"{B}.outer", f"{B}.norm2"),
            {"attn.h": None, "ffn.h": None},
        ),
    ),
    hand_written(
        "tied_loop",
        TiedLoop,
        sequence(),
        Stack(
            ("block",),
            self_attention("{i}.attn", "{i}.norm1") | ffn("{i}.mlp.0", "{i}.mlp.2", "{i}.norm2"),
        ),
    ),
    hand_written(
        "deepseek_v3_moe",
        lambda: Stacked(SharedMoEBlock),
        sequence(),
        Stack((0, 1), self_attention() | EXPERT | SHARED | ROUTER, {"ffn.x": f"{B}.mlp", "ffn.h": f"{B}.mlp"}),
    ),
    hand_written(
        "adaln_nine",
        NineChunksModel,
        conditioned,
        Stack(
            (0, 1),
            self_attention(norm="", kind="self")
            | split_kv(f"{B}.wq", f"{B}.wkv", 16, "cross", o=f"{B}.wo", q_norm=f"{B}.q_norm", k_norm=f"{B}.k_norm")
            | glu(f"{B}.w12", 32, f"{B}.w3", gate_first=True),
            {"attn.self.h": None, "attn.cross.h": None, "ffn.h": None},
        ),
    ),
    hand_written(
        "e_branchformer",
        lambda: Stacked(Branches),
        sequence(),
        Stack(
            (0, 1),
            self_attention(norm=f"{B}.norm_attn") | MLP,
            {"attn.h": None},
            optional={
                "mixer.norm": (f"{B}.norm_conv.weight", f"{B}.norm_gate.weight"),
                "attn.norm": (f"{B}.norm_conv.weight", f"{B}.norm_gate.weight"),
                "ffn.norm": (f"{B}.norm_conv.weight", f"{B}.norm_gate.weight"),
                "attn.o": f"{B}.merge.weight",
                "ffn.up": f"{B}.inner.weight[0:16]",
                "ffn.gate": f"{B}.inner.weight[16:32]",
                "ffn.down": f"{B}.outer.weight",
            },
        ),
    ),
    hand_written(
        "mixture_of_depths",
        lambda: Stacked(Depths),
        sequence(),
        Stack((0, 1), self_attention() | MLP, optional={"ffn.router": f"{B}.router.weight"}),
    ),
)
