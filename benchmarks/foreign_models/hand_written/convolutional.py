"""Feed-forward parts of convolutions, images through attention, conformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


# PVT and SegFormer: tokens, a depthwise convolution between the Linears, spatial reduction of keys.
class DWConv(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, 1, 1, bias=True, groups=dim)

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        B, N, C = x.shape
        x = x.transpose(1, 2).view(B, C, H, W)
        x = self.dwconv(x)
        return x.flatten(2).transpose(1, 2)


class MixFFN(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = DWConv(hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        x = self.fc1(x)
        x = self.dwconv(x, H, W)
        x = self.act(x)
        return self.fc2(x)


class ReducedAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 2, sr_ratio: int = 2) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, dim * 2)
        self.proj = nn.Linear(dim, dim)
        self.sr = nn.Conv2d(dim, dim, kernel_size=sr_ratio, stride=sr_ratio)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        B, N, C = x.shape
        q = self.q(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        x_ = self.sr(x.permute(0, 2, 1).reshape(B, C, H, W)).reshape(B, C, -1).permute(0, 2, 1)
        x_ = self.norm(x_)
        kv = self.kv(x_).reshape(B, -1, 2, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        k, v = kv[0], kv[1]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class SegBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = ReducedAttention(dim)
        self.mlp = MixFFN(dim, 32)

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        x = x + self.attn(self.norm1(x), H, W)
        return x + self.mlp(self.norm2(x), H, W)


class SegStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.block = nn.ModuleList([SegBlock() for _ in range(2)])
        self.norm = nn.LayerNorm(16)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        B, _, H, W = x.shape
        x = x.flatten(2).transpose(1, 2)
        for blk in self.block:
            x = blk(x, H, W)
        return self.norm(x).reshape(B, H, W, -1).permute(0, 3, 1, 2).contiguous()


# The norm of the reduced keys belongs to neither q nor k: a site of it is right, and none is, too.
SEG = Stack(
    (0, 1),
    {
        "attn.q": "block.{i}.attn.q.weight",
        "attn.k": "block.{i}.attn.kv.weight[0:16]",
        "attn.v": "block.{i}.attn.kv.weight[16:32]",
        "attn.o": "block.{i}.attn.proj.weight",
        "attn.norm": "block.{i}.norm1.weight",
        "ffn.up": "block.{i}.mlp.fc1.weight",
        "ffn.down": "block.{i}.mlp.fc2.weight",
        "ffn.norm": "block.{i}.norm2.weight",
    },
    optional={"attn.norm": "block.{i}.attn.norm.weight", "attn.k.norm": "block.{i}.attn.norm.weight"},
)


# FastSpeech: post-norm, a feed-forward part of two convolutions over tokens, kernels 9 and 1.
class FFTBlock(nn.Module):
    def __init__(self, d: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.fc = nn.Linear(d, d)
        self.layer_norm = nn.LayerNorm(d)
        self.w_1 = nn.Conv1d(d, hidden, kernel_size=9, padding=4)
        self.w_2 = nn.Conv1d(hidden, d, kernel_size=1, padding=0)
        self.pos_ffn_norm = nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n_head, b, length = 2, x.size(0), x.size(1)
        split = lambda t: t.view(b, length, n_head, -1).permute(2, 0, 1, 3).contiguous().view(n_head * b, length, -1)  # noqa: E731
        q, k, v = split(self.w_qs(x)), split(self.w_ks(x)), split(self.w_vs(x))
        attn = torch.bmm(q, k.transpose(1, 2)) / 8**0.5
        if mask is not None:
            attn = attn.masked_fill(mask.repeat(n_head, 1, 1), -1e9)
        output = torch.bmm(torch.softmax(attn, dim=2), v)
        output = output.view(n_head, b, length, -1).permute(1, 2, 0, 3).contiguous().view(b, length, -1)
        x = self.layer_norm(self.fc(output) + x)
        output = self.w_2(F.relu(self.w_1(x.transpose(1, 2)))).transpose(1, 2)
        return self.pos_ffn_norm(output + x)


FASTSPEECH = {
    "attn.q": "layer_stack.{i}.w_qs.weight",
    "attn.k": "layer_stack.{i}.w_ks.weight",
    "attn.v": "layer_stack.{i}.w_vs.weight",
    "attn.o": "layer_stack.{i}.fc.weight",
    "attn.norm": "layer_stack.{i}.layer_norm.weight",
    "ffn.up": "layer_stack.{i}.w_1.weight",
    "ffn.down": "layer_stack.{i}.w_2.weight",
    "ffn.norm": "layer_stack.{i}.pos_ffn_norm.weight",
}


class FastSpeechEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_stack = nn.ModuleList([FFTBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer_stack:
            x = layer(x)
        return x


# Images throughout: 1×1 convolutions around a depthwise one (Restormer), norms of channels.
class ChannelNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GatedDconvFFN(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.project_in = nn.Conv2d(dim, hidden * 2, kernel_size=1, bias=False)
        self.dwconv = nn.Conv2d(hidden * 2, hidden * 2, 3, padding=1, groups=hidden * 2, bias=False)
        self.project_out = nn.Conv2d(hidden, dim, kernel_size=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project_in(x)
        x1, x2 = self.dwconv(x).chunk(2, dim=1)
        x = F.gelu(x1) * x2
        return self.project_out(x)


class ImageAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Conv2d(dim, dim, 1, bias=False) for _ in range(3))
        self.project_out = nn.Conv2d(dim, dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (f(x).view(b, self.heads, c // self.heads, h * w).mT for f in (self.to_q, self.to_k, self.to_v))
        out = F.scaled_dot_product_attention(q, k, v).mT.reshape(b, c, h, w)
        return self.project_out(out)


class ImageBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(dim), ChannelNorm(dim)
        self.attn, self.ffn = ImageAttention(dim), GatedDconvFFN(dim, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class ImageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.encoder = nn.Sequential(*[ImageBlock() for _ in range(2)])
        self.head = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(image))) + image


IMAGE = {
    **{f"attn.{r}": f"encoder.{{i}}.attn.to_{r}.weight" for r in "qkv"},
    "attn.o": "encoder.{i}.attn.project_out.weight",
    "attn.norm": "encoder.{i}.norm1.body.weight",
    "ffn.gate": "encoder.{i}.ffn.project_in.weight[0:24]",
    "ffn.up": "encoder.{i}.ffn.project_in.weight[24:48]",
    "ffn.down": "encoder.{i}.ffn.project_out.weight",
    "ffn.norm": "encoder.{i}.norm2.body.weight",
}


# Conformer: two half feed-forward parts, a convolution module between, a norm at the end.
class ConformerBlock(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.ff1 = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, d))
        self.norm_mha = nn.LayerNorm(d)
        self.mha = nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm_conv = nn.LayerNorm(d)
        self.conv = nn.Sequential(
            nn.Conv1d(d, 2 * d, 1),
            nn.GLU(dim=1),
            nn.Conv1d(d, d, 3, padding=1, groups=d),
            nn.SiLU(),
            nn.Conv1d(d, d, 1),
        )
        self.ff2 = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, d))
        self.norm_final = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        y = self.norm_mha(x)
        x = x + self.mha(y, y, y, need_weights=False)[0]
        x = x + self.conv(self.norm_conv(x).transpose(1, 2)).transpose(1, 2)
        x = x + 0.5 * self.ff2(x)
        return self.norm_final(x)


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Linear(8, 16)
        self.conformer_blocks = nn.ModuleList(ConformerBlock() for _ in range(2))

    def forward(self, mel: Tensor) -> Tensor:
        x = self.subsample(mel)
        for block in self.conformer_blocks:
            x = block(x)
        return x


AT = "conformer_blocks.{i}"
CONFORMER = Stack(
    (0, 1),
    {
        **{f"attn.{r}": f"{AT}.mha.in_proj_weight[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
        "attn.o": f"{AT}.mha.out_proj.weight",
        "attn.norm": f"{AT}.norm_mha.weight",
        "mixer.norm": f"{AT}.norm_conv.weight",
        "ffn.up": (f"{AT}.ff1.1.weight", f"{AT}.ff2.1.weight"),
        "ffn.down": (f"{AT}.ff1.4.weight", f"{AT}.ff2.4.weight"),
        "ffn.norm": (f"{AT}.ff1.0.weight", f"{AT}.ff2.0.weight"),
    },
    {"ffn.h": None},
    optional={"norm": f"{AT}.norm_final.weight", "ffn.norm": f"{AT}.norm_final.weight"},
)


def case(name: str, build: Any, inputs: Any, stack: Stack | dict[str, str]) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", build, inputs, (stack,))


CASES = (
    case("segformer", SegStage, lambda: {"image": torch.randn(2, 3, 16, 16)}, SEG),
    case("fastspeech", FastSpeechEncoder, lambda: {"x": torch.randn(2, 5, 16)}, FASTSPEECH),
    case("image_blocks", ImageModel, lambda: {"image": torch.randn(2, 3, 4, 4)}, IMAGE),
    case("conformer", Conformer, lambda: {"mel": torch.randn(2, 6, 8)}, CONFORMER),
)
