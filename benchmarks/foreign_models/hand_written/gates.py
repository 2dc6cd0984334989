"""Diffusion transformers with gates from a condition: DiT, PixArt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def thirds(at: str, width: int = 16) -> dict[str, str]:
    return {f"attn.{r}": f"{at}.weight[{width * n}:{width * (n + 1)}]" for n, r in enumerate("qkv")}


# DiT: six modulations from one Linear, gates of zero at first, norms without parameters.
class TimmAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class TimmMlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DiTBlock(nn.Module):
    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = TimmAttention(hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = TimmMlp(hidden_size, 32)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size, bias=True))
        nn.init.constant_(self.adaLN_modulation[-1].weight, 0)
        nn.init.constant_(self.adaLN_modulation[-1].bias, 0)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(2)])
        self.norm_final = nn.LayerNorm(16, elementwise_affine=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(16, 32))
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


DIT = Stack(
    (0, 1),
    thirds("blocks.{i}.attn.qkv")
    | {
        "attn.o": "blocks.{i}.attn.proj.weight",
        "ffn.up": "blocks.{i}.mlp.fc1.weight",
        "ffn.down": "blocks.{i}.mlp.fc2.weight",
    },
    {"attn.h": None, "ffn.h": None},
)


# PixArt: one table of modulations a block, beside those of the time step; a cross attention.
class Cross(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_linear = nn.Linear(dim, dim)
        self.kv_linear = nn.Linear(dim, dim * 2)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        B, N, C = x.shape
        q = self.q_linear(x).view(B, -1, 2, C // 2).transpose(1, 2)
        k, v = self.kv_linear(cond).view(B, -1, 2, 2, C // 2).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class PixArtBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = TimmAttention(dim)
        self.cross_attn = Cross(dim)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = TimmMlp(dim, 32)
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        B = x.shape[0]
        modulation = (self.scale_shift_table[None] + t.reshape(B, 6, -1)).chunk(6, dim=1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        x = x + gate_msa * self.attn(self.norm1(x) * (1 + scale_msa) + shift_msa)
        x = x + self.cross_attn(x, y)
        return x + gate_mlp * self.mlp(self.norm2(x) * (1 + scale_mlp) + shift_mlp)


class PixArt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PixArtBlock() for _ in range(2)])
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(16, 96))

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        t0 = self.t_block(t)
        for block in self.blocks:
            x = block(x, y, t0)
        return x


PIXART = Stack(
    (0, 1),
    {name.replace("attn.", "attn.self."): text for name, text in thirds("blocks.{i}.attn.qkv").items()}
    | {
        "attn.self.o": "blocks.{i}.attn.proj.weight",
        "attn.cross.q": "blocks.{i}.cross_attn.q_linear.weight",
        "attn.cross.k": "blocks.{i}.cross_attn.kv_linear.weight[0:16]",
        "attn.cross.v": "blocks.{i}.cross_attn.kv_linear.weight[16:32]",
        "attn.cross.o": "blocks.{i}.cross_attn.proj.weight",
        "ffn.up": "blocks.{i}.mlp.fc1.weight",
        "ffn.down": "blocks.{i}.mlp.fc2.weight",
    },
    {"attn.self.h": None, "ffn.h": None},
)


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16), "c": torch.randn(2, 16)}


def pixart() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16), "y": torch.randn(2, 4, 16), "t": torch.randn(2, 16)}


CASES = (
    Case("hand-written/dit", "hand-written", DiT, tokens, (DIT,)),
    Case("hand-written/pixart", "hand-written", PixArt, pixart, (PIXART,)),
)
