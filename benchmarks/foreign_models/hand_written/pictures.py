"""Images and pairs: latent diffusion's spatial transformer, CSWin, CvT, Restormer, Evoformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, both, ffn, glu, packed, sequence


def default(val: Any, d: Any) -> Any:
    return d if val is None else val


# Latent diffusion: an image becomes tokens inside of the module that has the list of blocks; heads
# in the batch; context or self.
class GEGLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class LdmFeedForward(nn.Module):
    def __init__(self, dim: int, mult: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(GEGLU(dim, dim * mult), nn.Dropout(0.0), nn.Linear(dim * mult, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class CrossAttention(nn.Module):
    def __init__(self, query_dim: int, context_dim: int | None = None, heads: int = 2, dim_head: int = 8) -> None:
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(0.0))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = self.heads
        q = self.to_q(x)
        context = default(context, x)
        k, v = self.to_k(context), self.to_v(context)
        q, k, v = (
            t.view(t.shape[0], t.shape[1], h, -1).permute(0, 2, 1, 3).reshape(t.shape[0] * h, t.shape[1], -1)
            for t in (q, k, v)
        )
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = einsum("b i j, b j d -> b i d", attn, v)
        out = out.view(-1, h, out.shape[1], out.shape[2]).permute(0, 2, 1, 3).flatten(2)
        return self.to_out(out)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.attn1, self.ff, self.attn2 = CrossAttention(dim), LdmFeedForward(dim), CrossAttention(dim, context_dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context=context) + x
        x = self.ff(self.norm3(x)) + x
        return x


class SpatialTransformer(nn.Module):
    def __init__(self, in_channels: int, context_dim: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(num_groups=4, num_channels=in_channels, eps=1e-6)
        self.proj_in = nn.Conv2d(in_channels, 16, kernel_size=1)
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock(16, context_dim) for _ in range(depth)])
        self.proj_out = nn.Conv2d(16, in_channels, kernel_size=1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        b, c, h, w = x.shape
        x_in = x
        x = self.proj_in(self.norm(x))
        x = x.permute(0, 2, 3, 1).reshape(b, h * w, c)
        for block in self.transformer_blocks:
            x = block(x, context=context)
        x = x.reshape(b, h, w, c).permute(0, 3, 1, 2)
        return self.proj_out(x) + x_in


def ldm(kind: str, at: str, norm: str) -> Roles:
    at = f"transformer_blocks.{{i}}.{at}"
    roles = {role: f"{at}.to_{role}" for role in "qkv"} | {"o": f"{at}.to_out.0"}
    return attention(kind, norm=f"transformer_blocks.{{i}}.{norm}", **roles)


LDM = both(
    ldm("self", "attn1", "norm1"),
    ldm("cross", "attn2", "norm2"),
    glu("transformer_blocks.{i}.ff.net.0.proj", 32, "transformer_blocks.{i}.ff.net.2", "transformer_blocks.{i}.norm3"),
)


# CSWin: half of the channels attend in columns, half in rows, in two modules that have no weights
# but a convolution of the values; the projections are the block's.
class LePEAttention(nn.Module):
    def __init__(self, dim: int, resolution: int, vertical: bool) -> None:
        super().__init__()
        self.resolution, self.num_heads, self.scale = resolution, 1, dim**-0.5
        self.H_sp, self.W_sp = (resolution, 1) if vertical else (1, resolution)
        self.get_v = nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim)

    def windows(self, x: Tensor) -> Tensor:
        B, _, C = x.shape
        H = W = self.resolution
        x = x.transpose(-2, -1).contiguous().view(B, C, H // self.H_sp, self.H_sp, W // self.W_sp, self.W_sp)
        return x.permute(0, 2, 4, 3, 5, 1).contiguous().reshape(-1, self.H_sp * self.W_sp, C)

    def im2cswin(self, x: Tensor) -> Tensor:
        x = self.windows(x)
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3).contiguous()

    def get_lepe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.windows(x)
        image = x.transpose(-2, -1).contiguous().view(-1, x.shape[2], self.H_sp, self.W_sp)
        lepe = self.get_v(image).reshape(-1, self.num_heads, x.shape[2], x.shape[1]).permute(0, 1, 3, 2).contiguous()
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3).contiguous(), lepe

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv[0], qkv[1], qkv[2]
        H = W = self.resolution
        B, L, C = q.shape
        q, k = self.im2cswin(q), self.im2cswin(k)
        v, lepe = self.get_lepe(v)
        attn = F.softmax((q * self.scale) @ k.transpose(-2, -1), dim=-1, dtype=q.dtype)
        x = (attn @ v) + lepe
        x = x.transpose(1, 2).reshape(-1, H // self.H_sp, W // self.W_sp, self.H_sp, self.W_sp, C)
        x = x.permute(0, 1, 3, 2, 4, 5) if x.shape[0] == B else x.view(B, H // self.H_sp, W // self.W_sp, *x.shape[3:])
        return x.reshape(B, L, C)


class CSWinBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm1, self.norm2 = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.LayerNorm(16),
        )
        self.attns = nn.ModuleList([LePEAttention(8, 4, vertical=n == 0) for n in range(2)])
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        B, _, C = x.shape
        img = self.norm1(x)
        qkv = self.qkv(img).reshape(B, -1, 3, C).permute(2, 0, 1, 3)
        x1 = self.attns[0](qkv[:, :, :, : C // 2])
        x2 = self.attns[1](qkv[:, :, :, C // 2 :])
        attened_x = self.proj(torch.cat([x1, x2], dim=2))
        x = x + attened_x
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class CSWin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.ModuleList([CSWinBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for blk in self.stage1:
            x = blk(x)
        return x


CSWIN = packed("stage1.{i}.qkv", 16, o="stage1.{i}.proj", norm="stage1.{i}.norm1") | ffn(
    "stage1.{i}.fc1", "stage1.{i}.fc2", "stage1.{i}.norm2"
)


# Restormer: attention over channels, whose weights are (d, d); depthwise convolutions behind q, k
# and v, and between the two projections of the gated ffn; a norm that is computed on tokens.
class ImageNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        mu, sigma = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        x = (x - mu) / torch.sqrt(sigma + 1e-5) * self.weight + self.bias
        return x.transpose(1, 2).unflatten(2, (h, w))


class RestormerBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2, self.temperature = ImageNorm(dim), ImageNorm(dim), nn.Parameter(torch.ones(2, 1, 1))
        self.qkv, self.project_out = nn.Conv2d(dim, dim * 3, 1, bias=False), nn.Conv2d(dim, dim, 1, bias=False)
        self.qkv_dwconv = nn.Conv2d(dim * 3, dim * 3, kernel_size=3, padding=1, groups=dim * 3, bias=False)
        self.project_in, self.ffn_out = nn.Conv2d(dim, 48, 1, bias=False), nn.Conv2d(24, dim, 1, bias=False)
        self.dwconv = nn.Conv2d(48, 48, kernel_size=3, padding=1, groups=48, bias=False)

    def attn(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv_dwconv(self.qkv(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(b, 2, c // 2, h * w) for t in (q, k, v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return self.project_out((attn @ v).reshape(b, c, h, w))

    def ffn(self, x: Tensor) -> Tensor:
        x1, x2 = self.dwconv(self.project_in(x)).chunk(2, dim=1)
        return self.ffn_out(F.gelu(x1) * x2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


RESTORMER = packed("{i}.qkv", 16, o="{i}.project_out", norm="{i}.norm1") | glu(
    "{i}.project_in", 24, "{i}.ffn_out", "{i}.norm2", gate_first=True
)


# Evoformer's pair stack: attention over rows, then over columns, with a bias from the pairs and a
# gate before the output projection.
class TriangleAttention(nn.Module):
    def __init__(self, starting: bool, c_in: int = 16, no_heads: int = 2) -> None:
        super().__init__()
        self.starting, self.no_heads, self.layer_norm = starting, no_heads, nn.LayerNorm(c_in)
        self.linear = nn.Linear(c_in, no_heads, bias=False)
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(c_in, c_in, bias=False) for _ in range(3))
        self.linear_o, self.linear_g = nn.Linear(c_in, c_in), nn.Linear(c_in, c_in)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.no_heads, -1).transpose(-2, -3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.starting:
            x = x.transpose(-2, -3)
        x = self.layer_norm(x)
        triangle_bias = self.linear(x).permute(0, 3, 1, 2).unsqueeze(-4)
        q, k, v = self.heads(self.linear_q(x)), self.heads(self.linear_k(x)), self.heads(self.linear_v(x))
        a = torch.matmul(q / q.shape[-1] ** 0.5, k.transpose(-1, -2))
        a += triangle_bias
        o = torch.matmul(F.softmax(a, dim=-1), v).transpose(-2, -3)
        g = torch.sigmoid(self.linear_g(x)).view(*x.shape[:-1], self.no_heads, -1)
        x = self.linear_o((o * g).reshape(*x.shape[:-1], -1))
        if not self.starting:
            x = x.transpose(-2, -3)
        return x


class PairTransition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.linear_1, self.relu = nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU()
        self.linear_2 = nn.Linear(32, 16)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear_2(self.relu(self.linear_1(self.layer_norm(z))))


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tri_att_start, self.tri_att_end = TriangleAttention(True), TriangleAttention(False)
        self.pair_transition, self.dropout = PairTransition(), nn.Dropout(0.0)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.dropout(self.tri_att_start(z))
        z = z + self.dropout(self.tri_att_end(z))
        return z + self.pair_transition(z)


class PairStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PairBlock() for _ in range(2)])

    def forward(self, z: Tensor) -> Tensor:
        for b in self.blocks:
            z = b(z)
        return z


def triangle(at: str) -> Roles:
    roles = {role: f"blocks.{{i}}.{at}.linear_{role}" for role in "qkvo"}
    return attention(norm=f"blocks.{{i}}.{at}.layer_norm", **roles)


PAIRS = both(
    triangle("tri_att_start"),
    triangle("tri_att_end"),
    ffn(
        "blocks.{i}.pair_transition.linear_1",
        "blocks.{i}.pair_transition.linear_2",
        "blocks.{i}.pair_transition.layer_norm",
    ),
)


def image(name: str = "x") -> dict[str, Any]:
    return {name: torch.randn(2, 16, 4, 4)}


CASES = (
    Case(
        "hand-written/ldm_spatial",
        "hand-written",
        lambda: SpatialTransformer(16, 12, depth=2),
        lambda: image() | {"context": torch.randn(2, 5, 12)},
        (Stack((0, 1), LDM),),
    ),
    Case("hand-written/cswin", "hand-written", CSWin, sequence(length=16), (Stack((0, 1), CSWIN),)),
    Case(
        "hand-written/restormer",
        "hand-written",
        lambda: nn.Sequential(RestormerBlock(), RestormerBlock()),
        lambda: image("input"),
        (Stack((0, 1), RESTORMER),),
    ),
    Case(
        "hand-written/triangle_attention",
        "hand-written",
        PairStack,
        lambda: {"z": torch.randn(2, 4, 4, 16)},
        (Stack((0, 1), PAIRS),),
    ),
)
