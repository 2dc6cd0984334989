"""RT-DETR's hybrid encoder: layers that read and return an image, and attend over its pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import both, ffn, packed


def sincos_2d(w: int, h: int, dim: int, temperature: float = 10000.0) -> Tensor:
    grid_w, grid_h = torch.arange(w, dtype=torch.float32), torch.arange(h, dtype=torch.float32)
    grid_w, grid_h = torch.meshgrid(grid_w, grid_h, indexing="ij")
    omega = 1.0 / (temperature ** (torch.arange(dim // 4, dtype=torch.float32) / (dim // 4)))
    out_w, out_h = grid_w.flatten()[..., None] @ omega[None], grid_h.flatten()[..., None] @ omega[None]
    return torch.cat([torch.sin(out_w), torch.cos(out_w), torch.sin(out_h), torch.cos(out_h)], 1)[None]


class TransformerEncoderLayer(nn.Module):
    def __init__(self, c1: int, cm: int, num_heads: int, normalize_before: bool) -> None:
        super().__init__()
        self.ma = nn.MultiheadAttention(c1, num_heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(c1, cm), nn.Linear(cm, c1)
        self.norm1, self.norm2 = nn.LayerNorm(c1), nn.LayerNorm(c1)
        self.dropout, self.dropout1, self.dropout2 = nn.Dropout(0.0), nn.Dropout(0.0), nn.Dropout(0.0)
        self.act, self.normalize_before = nn.GELU(), normalize_before

    @staticmethod
    def with_pos_embed(tensor: Tensor, pos: Tensor | None = None) -> Tensor:
        return tensor if pos is None else tensor + pos

    def forward_post(self, src: Tensor, pos: Tensor | None = None) -> Tensor:
        q = k = self.with_pos_embed(src, pos)
        src2 = self.ma(q, k, value=src)[0]
        src = src + self.dropout1(src2)
        src = self.norm1(src)
        src2 = self.fc2(self.dropout(self.act(self.fc1(src))))
        src = src + self.dropout2(src2)
        return self.norm2(src)

    def forward_pre(self, src: Tensor, pos: Tensor | None = None) -> Tensor:
        src2 = self.norm1(src)
        q = k = self.with_pos_embed(src2, pos)
        src2 = self.ma(q, k, value=src2)[0]
        src = src + self.dropout1(src2)
        src2 = self.norm2(src)
        src2 = self.fc2(self.dropout(self.act(self.fc1(src2))))
        return src + self.dropout2(src2)

    def forward(self, src: Tensor, pos: Tensor | None = None) -> Tensor:
        if self.normalize_before:
            return self.forward_pre(src, pos)
        return self.forward_post(src, pos)


class AIFI(TransformerEncoderLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        c, h, w = x.shape[1:]
        pos_embed = sincos_2d(w, h, c)
        x = super().forward(x.flatten(2).permute(0, 2, 1), pos=pos_embed.to(device=x.device, dtype=x.dtype))
        return x.permute(0, 2, 1).view([-1, c, h, w]).contiguous()


class HybridEncoder(nn.Module):
    def __init__(self, dim: int, normalize_before: bool = False) -> None:
        super().__init__()
        self.input_proj = nn.Sequential(nn.Conv2d(8, dim, 1, bias=False), nn.BatchNorm2d(dim))
        self.encoder = nn.ModuleList([AIFI(dim, 2 * dim, 2, normalize_before) for _ in range(2)])
        self.head = nn.Conv2d(dim, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_proj(x)
        for layer in self.encoder:
            x = layer(x)
        return self.head(x)


TABLE = both(
    packed("encoder.{i}.ma.in_proj_weight!", 16, o="encoder.{i}.ma.out_proj", norm="encoder.{i}.norm1"),
    ffn("encoder.{i}.fc1", "encoder.{i}.fc2", "encoder.{i}.norm2"),
)
# Queries are the states plus positions, which no module returns.
POST = {"attn.x": None, "ffn.x": "encoder.{i}.fc1"}

CASES = (
    Case(
        "hand-written/aifi",
        "hand-written",
        lambda: HybridEncoder(16),
        lambda: {"x": torch.randn(2, 8, 4, 6)},
        (Stack((0, 1), TABLE, POST),),
    ),
    Case(
        "hand-written/aifi_pre_norm",
        "hand-written",
        lambda: HybridEncoder(16, normalize_before=True),
        lambda: {"x": torch.randn(2, 8, 4, 6)},
        (Stack((0, 1), TABLE, POST),),
    ),
)
