"""Queries that are learned: DETR, Set Transformer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, both, ffn, packed, sequence


# DETR: positions are added to queries and keys, not to values; a stack of outputs.
class DetrDecoderLayer(nn.Module):
    def __init__(self, normalize_before: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(16, 2, dropout=0.1)
        self.multihead_attn = nn.MultiheadAttention(16, 2, dropout=0.1)
        self.linear1, self.dropout, self.linear2 = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.dropout1, self.dropout2, self.dropout3 = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)
        self.activation, self.normalize_before = F.relu, normalize_before

    def with_pos_embed(self, tensor: Tensor, pos: Tensor | None) -> Tensor:
        return tensor if pos is None else tensor + pos

    def forward_post(self, tgt: Tensor, memory: Tensor, pos: Tensor | None, query_pos: Tensor | None) -> Tensor:
        q = k = self.with_pos_embed(tgt, query_pos)
        tgt2 = self.self_attn(q, k, value=tgt, attn_mask=None, key_padding_mask=None)[0]
        tgt = self.norm1(tgt + self.dropout1(tgt2))
        tgt2 = self.multihead_attn(
            query=self.with_pos_embed(tgt, query_pos), key=self.with_pos_embed(memory, pos), value=memory
        )[0]
        tgt = self.norm2(tgt + self.dropout2(tgt2))
        tgt2 = self.linear2(self.dropout(self.activation(self.linear1(tgt))))
        return self.norm3(tgt + self.dropout3(tgt2))

    def forward_pre(self, tgt: Tensor, memory: Tensor, pos: Tensor | None, query_pos: Tensor | None) -> Tensor:
        tgt2 = self.norm1(tgt)
        q = k = self.with_pos_embed(tgt2, query_pos)
        tgt = tgt + self.dropout1(self.self_attn(q, k, value=tgt2)[0])
        tgt2 = self.norm2(tgt)
        tgt2 = self.multihead_attn(
            query=self.with_pos_embed(tgt2, query_pos), key=self.with_pos_embed(memory, pos), value=memory
        )[0]
        tgt = tgt + self.dropout2(tgt2)
        tgt2 = self.norm3(tgt)
        return tgt + self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(tgt2)))))

    def forward(
        self, tgt: Tensor, memory: Tensor, pos: Tensor | None = None, query_pos: Tensor | None = None
    ) -> Tensor:
        if self.normalize_before:
            return self.forward_pre(tgt, memory, pos, query_pos)
        return self.forward_post(tgt, memory, pos, query_pos)


class Detr(nn.Module):
    def __init__(self, normalize_before: bool) -> None:
        super().__init__()
        self.query_embed = nn.Embedding(5, 16)
        self.layers = nn.ModuleList([DetrDecoderLayer(normalize_before) for _ in range(2)])
        self.norm = nn.LayerNorm(16)

    def forward(self, memory: Tensor, pos: Tensor) -> Tensor:
        query_pos = self.query_embed.weight.unsqueeze(1).repeat(1, memory.shape[1], 1)
        output, intermediate = torch.zeros_like(query_pos), []
        for layer in self.layers:
            output = layer(output, memory, pos=pos, query_pos=query_pos)
            intermediate.append(self.norm(output))
        return torch.stack(intermediate)


DETR = both(
    *(
        packed(
            f"layers.{{i}}.{at}.in_proj_weight!",
            16,
            kind=kind,
            o=f"layers.{{i}}.{at}.out_proj",
            norm=f"layers.{{i}}.{norm}",
        )
        for kind, at, norm in (("self", "self_attn", "norm1"), ("cross", "multihead_attn", "norm2"))
    ),
    ffn("layers.{i}.linear1", "layers.{i}.linear2", "layers.{i}.norm3"),
)


def detr(name: str, pre: bool) -> Case:
    inputs = lambda: {"memory": torch.randn(6, 2, 16), "pos": torch.randn(6, 2, 16)}  # noqa: E731
    return Case(f"hand-written/{name}", "hand-written", lambda: Detr(pre), inputs, (Stack((0, 1), DETR),))


# Set Transformer: heads are chunks in the batch; the residual is the query's projection; fc_o and
# its activation are added to the result, instead of an output projection.
class MAB(nn.Module):
    def __init__(self, dim_Q: int, dim_K: int, dim_V: int, num_heads: int, ln: bool) -> None:
        super().__init__()
        self.dim_V, self.num_heads = dim_V, num_heads
        self.fc_q, self.fc_k, self.fc_v = nn.Linear(dim_Q, dim_V), nn.Linear(dim_K, dim_V), nn.Linear(dim_K, dim_V)
        if ln:
            self.ln0, self.ln1 = nn.LayerNorm(dim_V), nn.LayerNorm(dim_V)
        self.fc_o = nn.Linear(dim_V, dim_V)

    def forward(self, Q: Tensor, K: Tensor) -> Tensor:
        Q = self.fc_q(Q)
        K, V = self.fc_k(K), self.fc_v(K)
        dim_split = self.dim_V // self.num_heads
        Q_ = torch.cat(Q.split(dim_split, 2), 0)
        K_ = torch.cat(K.split(dim_split, 2), 0)
        V_ = torch.cat(V.split(dim_split, 2), 0)
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(self.dim_V), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)  # noqa: E741
        O = O if getattr(self, "ln0", None) is None else self.ln0(O)  # noqa: E741
        O = O + F.relu(self.fc_o(O))  # noqa: E741
        O = O if getattr(self, "ln1", None) is None else self.ln1(O)  # noqa: E741
        return O


class SAB(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, num_heads: int, ln: bool = False) -> None:
        super().__init__()
        self.mab = MAB(dim_in, dim_in, dim_out, num_heads, ln=ln)

    def forward(self, X: Tensor) -> Tensor:
        return self.mab(X, X)


class ISAB(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, num_heads: int, num_inds: int, ln: bool = False) -> None:
        super().__init__()
        self.I = nn.Parameter(torch.randn(1, num_inds, dim_out))
        self.mab0, self.mab1 = (
            MAB(dim_out, dim_in, dim_out, num_heads, ln),
            MAB(dim_in, dim_out, dim_out, num_heads, ln),
        )

    def forward(self, X: Tensor) -> Tensor:
        H = self.mab0(self.I.repeat(X.size(0), 1, 1), X)
        return self.mab1(X, H)


class SetTransformer(nn.Module):
    def __init__(self, induced: bool) -> None:
        super().__init__()
        blocks = [ISAB(16, 16, 2, 3) if induced else SAB(16, 16, 2, ln=True) for _ in range(2)]
        self.enc = nn.Sequential(*blocks)
        self.dec = nn.Linear(16, 5)

    def forward(self, X: Tensor) -> Tensor:
        return self.dec(self.enc(X)).mean(1)


def mab(at: str, kind: str) -> dict[str, object]:
    return dict(attention(kind, q=f"{at}.fc_q", k=f"{at}.fc_k", v=f"{at}.fc_v"))


# `fc_o` is a Linear with an activation behind it: no o, and no ffn of two Linears either.
SAB_STACK = Stack(
    (0, 1),
    mab("enc.{i}.mab", "self") | {"attn.norm": "enc.{i}.mab.ln0.weight"},
    {"attn.x": None, "attn.h": None},
    {
        "attn.self.o": "enc.{i}.mab.fc_o.weight",
        "ffn.up": "enc.{i}.mab.fc_o.weight",
        "ffn.down": "enc.{i}.mab.fc_o.weight",
        "ffn.norm": "enc.{i}.mab.ln1.weight",
    },
)

CASES = (
    detr("detr_post_norm", pre=False),
    detr("detr_pre_norm", pre=True),
    Case("hand-written/set_transformer", "hand-written", lambda: SetTransformer(False), sequence("X"), (SAB_STACK,)),
)
