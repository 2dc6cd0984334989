"""Grids of tokens: image restoration, area attention, matching, pairs of residues, dual paths.
The role tables were written before peftc had seen the code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.hand_written.blind_blocks import SelfAttention, mlp
from benchmarks.foreign_models.tables import attention, both, ffn, hand_written, image, packed

D, H = 16, 2


# SwinIR: residual groups of window blocks with a convolution behind them; masks for other sizes.
class WindowBlock(nn.Module):
    def __init__(self, resolution: tuple[int, int], shift: int, window: int = 4) -> None:
        super().__init__()
        self.input_resolution, self.shift_size, self.window_size = resolution, shift, window
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp = WindowAttention(window), mlp(D)
        mask = self.calculate_mask(resolution) if shift else None
        self.register_buffer("attn_mask", mask)

    def calculate_mask(self, x_size: tuple[int, int]) -> Tensor:
        h, w = x_size
        img_mask = torch.zeros((1, h, w, 1))
        slices = (
            slice(0, -self.window_size),
            slice(-self.window_size, -self.shift_size),
            slice(-self.shift_size, None),
        )
        cnt = 0
        for hs in slices:
            for ws in slices:
                img_mask[:, hs, ws, :] = cnt
                cnt += 1
        windows = window_partition(img_mask, self.window_size).view(-1, self.window_size**2)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        h, w = x_size
        b, _, c = x.shape
        shortcut = x
        x = self.norm1(x).view(b, h, w, c)
        if self.shift_size > 0:
            shifted = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        else:
            shifted = x
        windows = window_partition(shifted, self.window_size).view(-1, self.window_size**2, c)
        if self.input_resolution == x_size:
            windows = self.attn(windows, mask=self.attn_mask)
        else:
            windows = self.attn(windows, mask=self.calculate_mask(x_size).to(x.device))
        shifted = window_reverse(windows.view(-1, self.window_size, self.window_size, c), self.window_size, h, w)
        if self.shift_size > 0:
            x = torch.roll(shifted, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        else:
            x = shifted
        x = shortcut + x.view(b, h * w, c)
        return x + self.mlp(self.norm2(x))


def window_partition(x: Tensor, size: int) -> Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


def window_reverse(windows: Tensor, size: int, h: int, w: int) -> Tensor:
    b = int(windows.shape[0] / (h * w / size / size))
    x = windows.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


class WindowAttention(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.scale = (D // H) ** -0.5
        self.bias = nn.Parameter(torch.randn(H, window**2, window**2) * 0.1)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1) + self.bias.unsqueeze(0)
        if mask is not None:
            nw = mask.shape[0]
            attn = attn.view(b // nw, nw, H, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, H, n, n)
        attn = self.softmax(attn)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class BasicLayer(nn.Module):
    def __init__(self, resolution: tuple[int, int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WindowBlock(resolution, 0), WindowBlock(resolution, 2)])

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        for block in self.blocks:
            x = block(x, x_size)
        return x


class RSTB(nn.Module):
    def __init__(self, resolution: tuple[int, int]) -> None:
        super().__init__()
        self.residual_group, self.conv = BasicLayer(resolution), nn.Conv2d(D, D, 3, 1, 1)

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        y = self.residual_group(x, x_size).transpose(1, 2).view(x.shape[0], D, *x_size)
        return self.conv(y).flatten(2).transpose(1, 2) + x


class SwinIR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_first, self.conv_last = nn.Conv2d(3, D, 3, 1, 1), nn.Conv2d(D, 3, 3, 1, 1)
        self.conv_after_body = nn.Conv2d(D, D, 3, 1, 1)
        self.layers = nn.ModuleList([RSTB((8, 8)), RSTB((8, 8))])
        self.norm = nn.LayerNorm(D)

    def forward_features(self, x: Tensor) -> Tensor:
        x_size = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, x_size)
        return self.norm(x).transpose(1, 2).view(-1, D, *x_size)

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv_first(x)
        res = self.conv_after_body(self.forward_features(first)) + first
        return x + self.conv_last(res)


# YOLOv12: attention over areas of an image; convolutions with batch norms in the place of Linears.
class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, g: int = 1, act: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, 1, k // 2, groups=g, bias=False)
        self.bn, self.act = nn.BatchNorm2d(c2), nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class AAttn(nn.Module):
    def __init__(self, dim: int, num_heads: int, area: int) -> None:
        super().__init__()
        self.area, self.num_heads, self.head_dim = area, num_heads, dim // num_heads
        self.qkv, self.proj = Conv(dim, 3 * dim, act=False), Conv(dim, dim, act=False)
        self.pe = Conv(dim, dim, 7, g=dim, act=False)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        n = h * w
        qkv = self.qkv(x).flatten(2).transpose(1, 2)
        if self.area > 1:
            qkv = qkv.reshape(b * self.area, n // self.area, c * 3)
            b, n, _ = qkv.shape
        q, k, v = (
            qkv.view(b, n, self.num_heads, self.head_dim * 3).permute(0, 2, 3, 1).split([self.head_dim] * 3, dim=2)
        )
        attn = ((q.transpose(-2, -1) @ k) * (self.head_dim**-0.5)).softmax(dim=-1)
        x = (v @ attn.transpose(-2, -1)).permute(0, 3, 1, 2)
        v = v.permute(0, 3, 1, 2)
        if self.area > 1:
            x = x.reshape(b // self.area, n * self.area, c)
            v = v.reshape(b // self.area, n * self.area, c)
            b, n, _ = x.shape
        x = x.reshape(b, h, w, c).permute(0, 3, 1, 2).contiguous()
        v = v.reshape(b, h, w, c).permute(0, 3, 1, 2).contiguous()
        return self.proj(x + self.pe(v))


class ABlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, area: int) -> None:
        super().__init__()
        self.attn = AAttn(dim, num_heads, area)
        self.mlp = nn.Sequential(Conv(dim, 2 * dim), Conv(2 * dim, dim, act=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class A2C2f(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(D, D), Conv(2 * D, D)
        self.gamma = nn.Parameter(0.01 * torch.ones(D))
        self.m = nn.ModuleList(nn.Sequential(*(ABlock(D, H, 4) for _ in range(2))) for _ in range(1))

    def forward(self, x: Tensor) -> Tensor:
        y = [self.cv1(x)]
        y.extend(m(y[-1]) for m in self.m)
        z = self.cv2(torch.cat(y, 1))
        return x + self.gamma.view(-1, len(self.gamma), 1, 1) * z


class AreaModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, D, 4, 4), A2C2f(), nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


# LoFTR: each layer runs for two images, with itself or with the other one as the source.
class LoFTREncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dim, self.nhead = D // H, H
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.merge = nn.Linear(D, D, bias=False)
        self.mlp = nn.Sequential(nn.Linear(2 * D, 2 * D, bias=False), nn.ReLU(True), nn.Linear(2 * D, D, bias=False))
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        bs = x.size(0)
        query = self.q_proj(x).view(bs, -1, self.nhead, self.dim)
        key = self.k_proj(source).view(bs, -1, self.nhead, self.dim)
        value = self.v_proj(source).view(bs, -1, self.nhead, self.dim)
        scores = torch.einsum("nlhd,nshd->nlsh", query, key)
        weights = torch.softmax(scores / self.dim**0.5, dim=2)
        message = torch.einsum("nlsh,nshd->nlhd", weights, value).contiguous()
        message = self.norm1(self.merge(message.view(bs, -1, self.nhead * self.dim)))
        message = self.norm2(self.mlp(torch.cat([x, message], dim=2)))
        return x + message


class LocalFeatureTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_names = ["self", "cross"] * 2
        self.layers = nn.ModuleList([LoFTREncoderLayer() for _ in self.layer_names])

    def forward(self, feat0: Tensor, feat1: Tensor) -> Tensor:
        for layer, name in zip(self.layers, self.layer_names, strict=True):
            if name == "self":
                feat0, feat1 = layer(feat0, feat0), layer(feat1, feat1)
            else:
                feat0 = layer(feat0, feat1)
                feat1 = layer(feat1, feat0)
        return torch.einsum("nlc,nsc->nls", feat0, feat1)


# Evoformer: pairs of residues; attention along both axes with gates, products of edges.
class TriangleAttention(nn.Module):
    def __init__(self, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.layer_norm, self.linear = nn.LayerNorm(D), nn.Linear(D, H, bias=False)
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.linear_g, self.linear_o = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if not self.starting:
            x = x.transpose(-2, -3)
        x = self.layer_norm(x)
        bias = self.linear(x).permute(0, 3, 1, 2).unsqueeze(1)
        q, k, v = (
            f(x).view(*x.shape[:-1], H, -1).transpose(-2, -3) for f in (self.linear_q, self.linear_k, self.linear_v)
        )
        a = torch.softmax(torch.matmul(q / (D // H) ** 0.5, k.transpose(-1, -2)) + bias, -1)
        o = torch.matmul(a, v).transpose(-2, -3)
        g = torch.sigmoid(self.linear_g(x)).view(*x.shape[:-1], H, -1)
        o = self.linear_o((o * g).flatten(-2))
        return o if self.starting else o.transpose(-2, -3)


class TriangleMultiplication(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(D), nn.LayerNorm(8)
        self.linear_a_p, self.linear_a_g, self.linear_b_p, self.linear_b_g = (nn.Linear(D, 8) for _ in range(4))
        self.linear_z, self.linear_g = nn.Linear(8, D), nn.Linear(D, D)

    def forward(self, z: Tensor) -> Tensor:
        z = self.layer_norm_in(z)
        a = self.linear_a_p(z) * torch.sigmoid(self.linear_a_g(z))
        b = self.linear_b_p(z) * torch.sigmoid(self.linear_b_g(z))
        x = torch.einsum("bikc,bjkc->bijc", a, b)
        return self.linear_z(self.layer_norm_out(x)) * torch.sigmoid(self.linear_g(z))


class PairTransition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.linear_1, self.linear_2 = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear_2(F.relu(self.linear_1(self.layer_norm(z))))


class PairStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tri_mul_out = TriangleMultiplication()
        self.tri_att_start, self.tri_att_end = TriangleAttention(True), TriangleAttention(False)
        self.pair_transition = PairTransition()

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.tri_mul_out(z)
        z = z + self.tri_att_start(z)
        z = z + self.tri_att_end(z)
        return z + self.pair_transition(z)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PairStack(), PairStack()])

    def forward(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z)
        return z


# SepFormer: chunks of a signal; transformers along and across them, with residuals around both.
class PathLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.ffn = nn.LayerNorm(D), nn.LayerNorm(D), SelfAttention(D), mlp(D)

    def forward(self, src: Tensor) -> Tensor:
        src = src + self.attn(self.norm1(src))
        return src + self.ffn(self.norm2(src))


class Path(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([PathLayer(), PathLayer()]), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class DualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.intra_mdl, self.inter_mdl = Path(), Path()
        self.intra_norm, self.inter_norm = nn.GroupNorm(1, D), nn.GroupNorm(1, D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, k, s = x.shape
        intra = x.permute(0, 3, 2, 1).contiguous().view(b * s, k, n)
        intra = self.intra_mdl(intra).view(b, s, k, n).permute(0, 3, 2, 1).contiguous()
        intra = self.intra_norm(intra) + x
        inter = intra.permute(0, 2, 3, 1).contiguous().view(b * k, s, n)
        inter = self.inter_mdl(inter).view(b, k, s, n).permute(0, 3, 1, 2).contiguous()
        return self.inter_norm(inter) + intra


class DualPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dual_mdl = nn.ModuleList([DualBlock(), DualBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.dual_mdl:
            x = block(x)
        return x


RSTB_BLOCK = packed("layers.{i}.attn.qkv", D, o="layers.{i}.attn.proj", norm="layers.{i}.norm1") | ffn(
    "layers.{i}.mlp.0", "layers.{i}.mlp.2", "layers.{i}.norm2"
)
AREA = "body.m.0.{i}"
LOFTR = "layers.{i}"
TRIANGLES = tuple(
    attention(q=f"{at}.linear_q", k=f"{at}.linear_k", v=f"{at}.linear_v", o=f"{at}.linear_o", norm=f"{at}.layer_norm")
    for at in ("blocks.{i}.tri_att_start", "blocks.{i}.tri_att_end")
)
TRANSITION = ffn(*(f"blocks.{{i}}.pair_transition.{n}" for n in ("linear_1", "linear_2", "layer_norm")))
PATH = packed("dual_mdl.{i}.attn.qkv", D, o="dual_mdl.{i}.attn.proj", norm="dual_mdl.{i}.norm1") | ffn(
    "dual_mdl.{i}.ffn.0", "dual_mdl.{i}.ffn.2", "dual_mdl.{i}.norm2"
)

CASES = (
    hand_written(
        "swinir",
        SwinIR,
        image(8),
        Stack(
            tuple(f"{i}.residual_group.blocks.{j}" for i in (0, 1) for j in (0, 1)),
            RSTB_BLOCK,
            {"attn.x": "layers.{i}.norm1:out", "attn.h": None},
        ),
    ),
    hand_written(
        "area_attention",
        AreaModel,
        image(16),
        Stack(
            (0, 1),
            attention(
                q=f"{AREA}.attn.qkv.conv[0:8, 24:32]",
                k=f"{AREA}.attn.qkv.conv[8:16, 32:40]",
                v=f"{AREA}.attn.qkv.conv[16:24, 40:48]",
                o=f"{AREA}.attn.proj.conv",
            )
            | ffn(f"{AREA}.mlp.0.conv", f"{AREA}.mlp.1.conv"),
            {"attn.h": f"{AREA}.attn.proj:nchw", "ffn.h": f"{AREA}.mlp.1:nchw"},
            optional={
                "attn.norm": tuple(f"{AREA}.attn.{n}.bn.weight" for n in ("qkv", "proj", "pe")),
                "attn.q.norm": f"{AREA}.attn.qkv.bn.weight",
                "ffn.norm": (f"{AREA}.mlp.0.bn.weight", f"{AREA}.mlp.1.bn.weight"),
            },
        ),
    ),
    hand_written(
        "loftr",
        LocalFeatureTransformer,
        lambda: {"feat0": torch.randn(2, 6, D), "feat1": torch.randn(2, 5, D)},
        Stack(
            (0, 1, 2, 3),
            attention(
                q=f"{LOFTR}.q_proj",
                k=f"{LOFTR}.k_proj",
                v=f"{LOFTR}.v_proj",
                o=f"{LOFTR}.merge",
            )
            | ffn(f"{LOFTR}.mlp.0", f"{LOFTR}.mlp.2", f"{LOFTR}.norm2"),
            {"attn.h": f"{LOFTR}.merge", "ffn.h": f"{LOFTR}.norm2"},
            # Behind the attention, and before the network that reads it beside the stream.
            optional={"attn.norm": f"{LOFTR}.norm1.weight", "ffn.norm": f"{LOFTR}.norm1.weight"},
        ),
    ),
    hand_written(
        "evoformer_pairs",
        Pairs,
        lambda: {"z": torch.randn(2, 5, 5, D)},
        Stack(
            (0, 1),
            both(*TRIANGLES)
            | TRANSITION
            | {
                "mixer.norm": tuple(f"blocks.{{i}}.tri_mul_out.layer_norm_{n}.weight" for n in ("in", "out")),
            },
        ),
    ),
    hand_written(
        "dual_path",
        DualPath,
        lambda: {"x": torch.randn(2, D, 6, 4)},
        *(
            Stack(tuple(f"{i}.{part}.layers.{j}" for i in (0, 1) for j in (0, 1)), PATH)
            for part in ("intra_mdl", "inter_mdl")
        ),
    ),
)
