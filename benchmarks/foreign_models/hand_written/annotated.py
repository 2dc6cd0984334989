"""The Annotated Transformer."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


# The Annotated Transformer: clones, four linears in a list, residual connections that take lambdas.
def clones(module: nn.Module, N: int) -> nn.ModuleList:
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


class LayerNorm(nn.Module):
    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, dropout: Any = None) -> Any:
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        del query, key, value
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.w_1(x).relu()))


class EncoderLayer(nn.Module):
    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module, dropout: float) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)
        self.size = size

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size: int, self_attn: nn.Module, src_attn: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, 0.1), 3)

    def forward(self, x: Tensor, memory: Tensor, src_mask: Any, tgt_mask: Any) -> Tensor:
        m = memory
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Stacked(nn.Module):
    def __init__(self, layer: Any, N: int) -> None:
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        attn, ff = MultiHeadedAttention(2, 16), PositionwiseFeedForward(16, 32)
        c = copy.deepcopy
        self.encoder = Stacked(EncoderLayer(16, c(attn), c(ff), 0.1), 2)
        self.decoder = Stacked(DecoderLayer(16, c(attn), c(attn), c(ff)), 2)
        self.src_embed = nn.Embedding(50, 16)
        self.tgt_embed = nn.Embedding(50, 16)
        self.generator = nn.Linear(16, 50)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        src_mask = (src != 0).unsqueeze(-2)
        n = tgt.size(1)
        tgt_mask = torch.triu(torch.ones(1, n, n), diagonal=1).type(torch.uint8) == 0
        memory = self.encoder(self.src_embed(src) * 4.0, src_mask)
        out = self.decoder(self.tgt_embed(tgt) * 4.0, memory, src_mask, tgt_mask)
        return F.log_softmax(self.generator(out), dim=-1)


def annotated_attention(kind: str, at: str, norm: int) -> dict[str, str]:
    roles = {f"attn.{kind}.{r}": f"{at}.linears.{n}.weight" for n, r in enumerate("qkvo")}
    return roles | {f"attn.{kind}.norm": f"{at.rpartition('.')[0]}.sublayer.{norm}.norm.a_2"}


def annotated_ffn(at: str, norm: int) -> dict[str, str]:
    return {
        "ffn.up": f"{at}.feed_forward.w_1.weight",
        "ffn.down": f"{at}.feed_forward.w_2.weight",
        "ffn.norm": f"{at}.sublayer.{norm}.norm.a_2",
    }


ENCODER = "encoder.layers.{i}"
DECODER = "decoder.layers.{i}"
ANNOTATED = (
    Stack((0, 1), annotated_attention("self", f"{ENCODER}.self_attn", 0) | annotated_ffn(ENCODER, 1)),
    Stack(
        (0, 1),
        annotated_attention("self", f"{DECODER}.self_attn", 0)
        | annotated_attention("cross", f"{DECODER}.src_attn", 1)
        | annotated_ffn(DECODER, 2),
    ),
)


def pair() -> dict[str, Any]:
    return {"src": torch.randint(1, 50, (2, 6)), "tgt": torch.randint(1, 50, (2, 5))}


CASES = (Case("hand-written/annotated_transformer", "hand-written", Annotated, pair, ANNOTATED),)
