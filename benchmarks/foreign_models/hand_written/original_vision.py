"""DINOv2 with samples that skip layers; LeViT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, ffn, glu, hand_written, image, packed


def drop_path(x, drop_prob: float = 0.0, training: bool = False):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)
    random_tensor.floor_()
    output = x.div(keep_prob) * random_tensor
    return output


class DropPath(nn.Module):
    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)

    def extra_repr(self) -> str:
        return f"p={self.drop_prob}"


def to_2tuple(x):
    return (x, x)


class PatchEmbed(nn.Module):
    def __init__(self, img_size=16, patch_size=4, in_chans=3, embed_dim=16):
        super().__init__()
        img_size = to_2tuple(img_size)
        patch_size = to_2tuple(patch_size)
        self.patch_shape = (img_size[0] // patch_size[0], img_size[1] // patch_size[1])
        self.img_size = img_size
        self.patch_size = patch_size
        self.num_patches = self.patch_shape[0] * self.patch_shape[1]
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x, **kwargs):
        B, C, H, W = x.shape
        assert self.img_size == (H, W), "Input image size doesn't match model"
        x = self.proj(x).flatten(2).transpose(1, 2)
        return x


# DINOv2 (dinov2/layers)
class LayerScale(nn.Module):
    def __init__(self, dim, init_values=1e-1, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class DinoAttention(nn.Module):
    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim, bias=True)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


XFORMERS_AVAILABLE = False


class MemEffAttention(DinoAttention):
    def forward(self, x: Tensor, attn_bias=None) -> Tensor:
        if not XFORMERS_AVAILABLE:
            if attn_bias is not None:
                raise AssertionError("xFormers is required for using nested tensors")
            return super().forward(x)
        raise NotImplementedError


class SwiGLUFFN(nn.Module):
    def __init__(self, in_features, hidden_features):
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features)
        self.w3 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        x12 = self.w12(x)
        x1, x2 = x12.chunk(2, dim=-1)
        hidden = F.silu(x1) * x2
        return self.w3(hidden)


def drop_add_residual_stochastic_depth(x: Tensor, residual_func, sample_drop_ratio: float = 0.0) -> Tensor:
    b, n, d = x.shape
    sample_subset_size = max(int(b * (1 - sample_drop_ratio)), 1)
    brange = (torch.randperm(b, device=x.device))[:sample_subset_size]
    x_subset = x[brange]
    residual = residual_func(x_subset)
    x_flat = x.flatten(1)
    residual = residual.flatten(1)
    residual_scale_factor = b / sample_subset_size
    x_plus_residual = torch.index_add(x_flat, 0, brange, residual.to(dtype=x.dtype), alpha=residual_scale_factor)
    return x_plus_residual.view_as(x)


class DinoBlock(nn.Module):
    def __init__(self, dim, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = MemEffAttention(dim)
        self.ls1 = LayerScale(dim)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = SwiGLUFFN(dim, 24)
        self.ls2 = LayerScale(dim)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.sample_drop_ratio = drop_path

    def forward(self, x: Tensor) -> Tensor:
        def attn_residual_func(x: Tensor) -> Tensor:
            return self.ls1(self.attn(self.norm1(x)))

        def ffn_residual_func(x: Tensor) -> Tensor:
            return self.ls2(self.mlp(self.norm2(x)))

        if self.training and self.sample_drop_ratio > 0.1:
            x = drop_add_residual_stochastic_depth(
                x, residual_func=attn_residual_func, sample_drop_ratio=self.sample_drop_ratio
            )
            x = drop_add_residual_stochastic_depth(
                x, residual_func=ffn_residual_func, sample_drop_ratio=self.sample_drop_ratio
            )
        elif self.training and self.sample_drop_ratio > 0.0:
            x = x + self.drop_path1(attn_residual_func(x))
            x = x + self.drop_path1(ffn_residual_func(x))
        else:
            x = x + attn_residual_func(x)
            x = x + ffn_residual_func(x)
        return x


class NestedTensorBlock(DinoBlock):
    def forward_nested(self, x_list):
        assert isinstance(self.attn, MemEffAttention)
        raise NotImplementedError

    def forward(self, x_or_x_list):
        if isinstance(x_or_x_list, Tensor):
            return super().forward(x_or_x_list)
        elif isinstance(x_or_x_list, list):
            if not XFORMERS_AVAILABLE:
                raise AssertionError("xFormers is required for using nested tensors")
            return self.forward_nested(x_or_x_list)
        else:
            raise AssertionError


class DinoV2(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 16))
        self.register_tokens = nn.Parameter(torch.randn(1, 2, 16))
        self.mask_token = nn.Parameter(torch.zeros(1, 16))
        blocks_list = [NestedTensorBlock(16, drop) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks_list)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Identity()

    def prepare_tokens_with_masks(self, x, masks=None):
        B, nc, w, h = x.shape
        x = self.patch_embed(x)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.to(x.dtype).unsqueeze(0), x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.pos_embed
        x = torch.cat((x[:, :1], self.register_tokens.expand(x.shape[0], -1, -1), x[:, 1:]), dim=1)
        return x

    def forward_features(self, x, masks=None):
        x = self.prepare_tokens_with_masks(x, masks)
        for blk in self.blocks:
            x = blk(x)
        x_norm = self.norm(x)
        return {"x_norm_clstoken": x_norm[:, 0], "x_norm_patchtokens": x_norm[:, 3:], "x_prenorm": x, "masks": masks}

    def forward(self, *args, is_training=False, **kwargs):
        ret = self.forward_features(*args, **kwargs)
        if is_training:
            return ret
        else:
            return self.head(ret["x_norm_clstoken"])


DINO = Stack(
    (0, 1),
    packed("blocks.{i}.attn.qkv", 16, o="blocks.{i}.attn.proj", norm="blocks.{i}.norm1")
    | glu("blocks.{i}.mlp.w12", 24, "blocks.{i}.mlp.w3", "blocks.{i}.norm2", gate_first=True),
    {"attn.h": "blocks.{i}.ls1", "ffn.h": "blocks.{i}.ls2"},
)


# LeViT: Linear+BN, attention biases, ratio, Residual wrapper
class Linear_BN(torch.nn.Sequential):
    def __init__(self, a, b, bn_weight_init=1):
        super().__init__()
        self.add_module("c", torch.nn.Linear(a, b, bias=False))
        bn = torch.nn.BatchNorm1d(b)
        torch.nn.init.constant_(bn.weight, bn_weight_init)
        self.add_module("bn", bn)

    def forward(self, x):
        linear, bn = self._modules.values()
        x = linear(x)
        return bn(x.flatten(0, 1)).reshape_as(x)


class LevitResidual(torch.nn.Module):
    def __init__(self, m, drop):
        super().__init__()
        self.m = m
        self.drop = drop

    def forward(self, x):
        if self.training and self.drop > 0:
            return (
                x + self.m(x) * torch.rand(x.size(0), 1, 1, device=x.device).ge_(self.drop).div(1 - self.drop).detach()
            )
        else:
            return x + self.m(x)


class LevitAttention(torch.nn.Module):
    def __init__(self, dim, key_dim, num_heads=2, attn_ratio=2, resolution=4):
        super().__init__()
        self.num_heads = num_heads
        self.scale = key_dim**-0.5
        self.key_dim = key_dim
        self.nh_kd = key_dim * num_heads
        self.d = int(attn_ratio * key_dim)
        self.dh = int(attn_ratio * key_dim) * num_heads
        h = self.dh + self.nh_kd * 2
        self.qkv = Linear_BN(dim, h)
        self.proj = torch.nn.Sequential(nn.Hardswish(), Linear_BN(self.dh, dim))
        points = [(i, j) for i in range(resolution) for j in range(resolution)]
        N = len(points)
        attention_offsets = {}
        idxs = []
        for p1 in points:
            for p2 in points:
                offset = (abs(p1[0] - p2[0]), abs(p1[1] - p2[1]))
                if offset not in attention_offsets:
                    attention_offsets[offset] = len(attention_offsets)
                idxs.append(attention_offsets[offset])
        self.attention_biases = torch.nn.Parameter(torch.randn(num_heads, len(attention_offsets)))
        self.register_buffer("attention_bias_idxs", torch.LongTensor(idxs).view(N, N))

    @torch.no_grad()
    def train(self, mode=True):
        super().train(mode)
        if mode and hasattr(self, "ab"):
            del self.ab
        else:
            self.ab = self.attention_biases[:, self.attention_bias_idxs]

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv.view(B, N, self.num_heads, -1).split([self.key_dim, self.key_dim, self.d], dim=3)
        q = q.permute(0, 2, 1, 3)
        k = k.permute(0, 2, 1, 3)
        v = v.permute(0, 2, 1, 3)
        attn = q @ k.transpose(-2, -1) * self.scale + (
            self.attention_biases[:, self.attention_bias_idxs] if self.training else self.ab
        )
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, self.dh)
        x = self.proj(x)
        return x


class LeViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        blocks = []
        for _ in range(2):
            blocks.append(LevitResidual(LevitAttention(16, 4), 0.1))
            h = 32
            blocks.append(
                LevitResidual(
                    torch.nn.Sequential(Linear_BN(16, h), torch.nn.Hardswish(), Linear_BN(h, 16, bn_weight_init=0.5)),
                    0.1,
                )
            )
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x):
        x = self.patch_embed(x)
        x = self.blocks(x)
        return x.mean(1)


# Rows of qkv are [head, (q 4, k 4, v 8)]. Batch norms stand behind each Linear.
LEVIT = (
    Stack(
        (0, 2),
        attention(
            q="blocks.{i}.m.qkv.c[0:4, 16:20]",
            k="blocks.{i}.m.qkv.c[4:8, 20:24]",
            v="blocks.{i}.m.qkv.c[8:16, 24:32]",
            o="blocks.{i}.m.proj.1.c",
        ),
        {"attn.h": "blocks.{i}.m.proj.1"},
        optional={
            "attn.norm": ("blocks.{i}.m.qkv.bn.weight", "blocks.{i}.m.proj.1.bn.weight"),
            "attn.q.norm": "blocks.{i}.m.qkv.bn.weight",
            "attn.k.norm": "blocks.{i}.m.qkv.bn.weight",
            "attn.v.norm": "blocks.{i}.m.qkv.bn.weight",
        },
    ),
    Stack(
        (1, 3),
        ffn("blocks.{i}.m.0.c", "blocks.{i}.m.2.c", ("blocks.{i}.m.0.bn", "blocks.{i}.m.2.bn")),
        {"ffn.h": "blocks.{i}.m.2"},
    ),
)


CASES = (
    hand_written("dinov2_original", DinoV2, image(16), DINO),
    hand_written("dinov2_drop_path", lambda: DinoV2(0.3), image(16), DINO),
    hand_written("levit_original", LeViT, image(16), *LEVIT),
)
