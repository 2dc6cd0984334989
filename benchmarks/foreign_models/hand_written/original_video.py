"""TimeSformer: attention over time, then in each frame, with one class token for all frames."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import both, ffn, hand_written, packed


# facebookresearch/TimeSformer vit.py: divided space-time attention
class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class TimeAttention(nn.Module):
    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        return self.proj_drop(x)


class TimeBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = TimeAttention(dim)
        self.temporal_norm1 = nn.LayerNorm(dim)
        self.temporal_attn = TimeAttention(dim)
        self.temporal_fc = nn.Linear(dim, dim)
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 2 * dim)

    def forward(self, x, B, T, W):
        num_spatial_tokens = (x.size(1) - 1) // T
        H = num_spatial_tokens // W
        ## Temporal
        xt = x[:, 1:, :]
        xt = rearrange(xt, "b (h w t) m -> (b h w) t m", b=B, h=H, w=W, t=T)
        res_temporal = self.drop_path(self.temporal_attn(self.temporal_norm1(xt)))
        res_temporal = rearrange(res_temporal, "(b h w) t m -> b (h w t) m", b=B, h=H, w=W, t=T)
        res_temporal = self.temporal_fc(res_temporal)
        xt = x[:, 1:, :] + res_temporal
        ## Spatial
        init_cls_token = x[:, 0, :].unsqueeze(1)
        cls_token = init_cls_token.repeat(1, T, 1)
        cls_token = rearrange(cls_token, "b t m -> (b t) m", b=B, t=T).unsqueeze(1)
        xs = xt
        xs = rearrange(xs, "b (h w t) m -> (b t) (h w) m", b=B, h=H, w=W, t=T)
        xs = torch.cat((cls_token, xs), 1)
        res_spatial = self.drop_path(self.attn(self.norm1(xs)))
        ### Taking care of CLS token
        cls_token = res_spatial[:, 0, :]
        cls_token = rearrange(cls_token, "(b t) m -> b t m", b=B, t=T)
        cls_token = torch.mean(cls_token, 1, True)  ## averaging for every frame
        res_spatial = res_spatial[:, 1:, :]
        res_spatial = rearrange(res_spatial, "(b t) (h w) m -> b (h w t) m", b=B, h=H, w=W, t=T)
        res = res_spatial
        x = xt
        ## Mlp
        x = torch.cat((init_cls_token, x), 1) + torch.cat((cls_token, res), 1)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class TimeSformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, kernel_size=8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 16))
        self.time_embed = nn.Parameter(torch.randn(1, 3, 16))
        self.blocks = nn.ModuleList([TimeBlock(16) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        B, C, T, H, W = x.shape
        x = rearrange(x, "b c t h w -> (b t) c h w")
        x = self.patch_embed(x)
        W = x.size(-1)
        x = x.flatten(2).transpose(1, 2)
        cls_tokens = self.cls_token.expand(x.size(0), -1, -1)
        x = torch.cat((cls_tokens, x), dim=1)
        x = x + self.pos_embed
        cls_tokens = x[:B, 0, :].unsqueeze(1)
        x = x[:, 1:]
        x = rearrange(x, "(b t) n m -> (b n) t m", b=B, t=T)
        x = x + self.time_embed
        x = rearrange(x, "(b n) t m -> b (n t) m", b=B, t=T)
        x = torch.cat((cls_tokens, x), dim=1)
        for blk in self.blocks:
            x = blk(x, B, T, W)
        x = self.norm(x)
        return self.head(x[:, 0])


# A further Linear behind the first attention; the class token's result is a mean over frames.
TIMESFORMER = both(
    packed("blocks.{i}.temporal_attn.qkv", 16, o="blocks.{i}.temporal_attn.proj", norm="blocks.{i}.temporal_norm1"),
    packed("blocks.{i}.attn.qkv", 16, o="blocks.{i}.attn.proj", norm="blocks.{i}.norm1"),
    ffn("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc2", "blocks.{i}.norm2"),
)

CASES = (
    hand_written(
        "timesformer",
        TimeSformer,
        lambda: {"x": torch.randn(2, 3, 3, 16, 16)},
        Stack((0, 1), TIMESFORMER, {"attn.h": None}),
    ),
)
