"""Blocks whose positions are in biases, rotations and windows. The role tables were written before
peftc had seen the code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, ffn, glu, hand_written, sequence

B = "blocks.{i}"


# T5: the first layer's bias of positions goes to the next layers.
class BiasedLayer(nn.Module):
    def __init__(self, first: bool, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.wi_0, self.wi_1 = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.wo = nn.Linear(32, width, bias=False)
        if first:
            self.relative = nn.Embedding(16, 2)
        self.first = first

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        b, n, _ = x.shape
        if bias is None and self.first:
            place = torch.arange(n, device=x.device)
            bias = self.relative((place[None] - place[:, None]).clamp(-8, 7) + 8).permute(2, 0, 1).unsqueeze(0)
        y = self.norm1(x)
        q, k, v = (f(y).view(b, n, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        x = x + self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, 16))
        y = self.norm2(x)
        return x + self.wo(F.gelu(self.wi_0(y)) * self.wi_1(y)), bias


class BiasedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BiasedLayer(i == 0) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


# Gemma-like: windows in every second layer, norms on both sides, a cap on scores.
class Sandwich(nn.Module):
    def __init__(self, window: int, width: int = 16) -> None:
        super().__init__()
        self.window = window
        self.pre1, self.post1, self.pre2, self.post2 = (nn.RMSNorm(width) for _ in range(4))
        self.q_proj, self.o_proj = nn.Linear(width, 32, bias=False), nn.Linear(32, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, 8, bias=False), nn.Linear(width, 8, bias=False)
        self.gate_up, self.down = nn.Linear(width, 64, bias=False), nn.Linear(32, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pre1(x)
        b, n, _ = x.shape
        q = self.q_proj(y).view(b, n, 4, 8)
        k, v = self.k_proj(y).view(b, n, 1, 8), self.v_proj(y).view(b, n, 1, 8)
        angle = torch.arange(n, dtype=x.dtype)[:, None] / 10.0 ** torch.arange(4, dtype=x.dtype)
        cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), dim=-1) * sin for t in (q, k))
        k, v = (t[:, :, :, None].expand(b, n, 1, 4, 8).reshape(b, n, 4, 8) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
        scores = 20.0 * torch.tanh(scores / 20.0)
        apart = torch.arange(n)[:, None] - torch.arange(n)
        scores = scores.masked_fill((apart < 0) | (apart >= self.window), torch.finfo(scores.dtype).min)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = x + self.post1(self.o_proj(out))
        gate, up = self.gate_up(self.pre2(x)).split(32, dim=-1)
        return x + self.post2(self.down(F.gelu(gate, approximate="tanh") * up))


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sandwich(window) for window in (3, 100))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# vLLM: a norm adds what the layer before has left to add, and returns both.
class AddingNorm(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6) * self.weight, residual


class DeferredLayer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.input_norm, self.post_norm = AddingNorm(width), AddingNorm(width)
        self.qkv_proj, self.o_proj = nn.Linear(width, 32, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up_proj, self.down_proj = nn.Linear(width, 64, bias=False), nn.Linear(32, width, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm(x, residual)
        q, k, v = self.qkv_proj(x).split([16, 8, 8], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x, residual = self.post_norm(self.o_proj(x.transpose(1, 2).flatten(2)), residual)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up), residual


class Deferred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DeferredLayer() for _ in range(2))
        self.norm = AddingNorm()

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.norm(x, residual)[0]


CASES = (
    hand_written(
        "deferred_residual",
        Deferred,
        sequence(),
        Stack(
            (0, 1),
            attention(
                q=f"{B}.qkv_proj[0:16]",
                k=f"{B}.qkv_proj[16:24]",
                v=f"{B}.qkv_proj[24:32]",
                o=f"{B}.o_proj",
                norm=f"{B}.input_norm",
            )
            | glu(f"{B}.gate_up_proj", 32, f"{B}.down_proj", f"{B}.post_norm", gate_first=True),
        ),
    ),
    hand_written(
        "t5_bias_handed_on",
        BiasedEncoder,
        sequence(),
        Stack(
            (0, 1),
            attention(**{r: f"{B}.{r}" for r in "qkvo"}, norm=f"{B}.norm1")
            | ffn(f"{B}.wi_1", f"{B}.wo", f"{B}.norm2", f"{B}.wi_0"),
        ),
    ),
    hand_written(
        "capped_windows",
        Windows,
        sequence(),
        Stack(
            (0, 1),
            attention(**{r: f"{B}.{r}_proj" for r in "qkvo"}, norm=(f"{B}.pre1", f"{B}.post1"))
            | glu(f"{B}.gate_up", 32, f"{B}.down", (f"{B}.pre2", f"{B}.post2"), gate_first=True),
            {"attn.h": f"{B}.post1", "ffn.h": f"{B}.post2"},
        ),
    ),
)
