"""What people find first: attention-is-all-you-need-pytorch, BERT-pytorch, ViT-pytorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, ffn, sequence


# attention-is-all-you-need-pytorch: residual and norm are inside the sub-layer; `+=`.
class ScaledDotProductAttention(nn.Module):
    def __init__(self, temperature: float, attn_dropout: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9)
        attn = self.dropout(F.softmax(attn, dim=-1))
        output = torch.matmul(attn, v)
        return output, attn


class ResidualAttention(nn.Module):
    def __init__(self, n_head: int, d_model: int, d_k: int) -> None:
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_k
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.fc = nn.Linear(n_head * d_k, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5)
        self.dropout = nn.Dropout(0.1)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        d_k, d_v, n_head = self.d_k, self.d_v, self.n_head
        sz_b, len_q, len_k, len_v = q.size(0), q.size(1), k.size(1), v.size(1)
        residual = q
        q = self.w_qs(q).view(sz_b, len_q, n_head, d_k)
        k = self.w_ks(k).view(sz_b, len_k, n_head, d_k)
        v = self.w_vs(v).view(sz_b, len_v, n_head, d_v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if mask is not None:
            mask = mask.unsqueeze(1)
        q, attn = self.attention(q, k, v, mask=mask)
        q = q.transpose(1, 2).contiguous().view(sz_b, len_q, -1)
        q = self.dropout(self.fc(q))
        q += residual
        q = self.layer_norm(q)
        return q, attn


class ResidualFeedForward(nn.Module):
    def __init__(self, d_in: int, d_hid: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_in, d_hid)
        self.w_2 = nn.Linear(d_hid, d_in)
        self.layer_norm = nn.LayerNorm(d_in, eps=1e-6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.w_2(F.relu(self.w_1(x)))
        x = self.dropout(x)
        x += residual
        x = self.layer_norm(x)
        return x


class JadoreEncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slf_attn = ResidualAttention(2, 16, 8)
        self.pos_ffn = ResidualFeedForward(16, 32)

    def forward(self, enc_input: Tensor, slf_attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        enc_output, enc_slf_attn = self.slf_attn(enc_input, enc_input, enc_input, mask=slf_attn_mask)
        return self.pos_ffn(enc_output), enc_slf_attn


class JadoreDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slf_attn = ResidualAttention(2, 16, 8)
        self.enc_attn = ResidualAttention(2, 16, 8)
        self.pos_ffn = ResidualFeedForward(16, 32)

    def forward(self, dec_input: Tensor, enc_output: Tensor, slf_mask: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        dec_output, dec_slf_attn = self.slf_attn(dec_input, dec_input, dec_input, mask=slf_mask)
        dec_output, dec_enc_attn = self.enc_attn(dec_output, enc_output, enc_output, mask=mask)
        return self.pos_ffn(dec_output), dec_slf_attn, dec_enc_attn


class Jadore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.src_word_emb, self.trg_word_emb = nn.Embedding(50, 16, padding_idx=0), nn.Embedding(50, 16, padding_idx=0)
        self.encoder = nn.ModuleList([JadoreEncoderLayer() for _ in range(2)])
        self.decoder = nn.ModuleList([JadoreDecoderLayer() for _ in range(2)])
        self.layer_norm = nn.LayerNorm(16, eps=1e-6)
        self.trg_word_prj = nn.Linear(16, 50, bias=False)
        self.trg_word_prj.weight = self.trg_word_emb.weight

    def forward(self, src_seq: Tensor, trg_seq: Tensor) -> Tensor:
        src_mask = (src_seq != 0).unsqueeze(-2)
        n = trg_seq.size(1)
        trg_mask = (trg_seq != 0).unsqueeze(-2) & (1 - torch.triu(torch.ones((1, n, n)), diagonal=1)).bool()
        enc_output = self.layer_norm(self.src_word_emb(src_seq))
        for enc_layer in self.encoder:
            enc_output, _ = enc_layer(enc_output, slf_attn_mask=src_mask)
        dec_output = self.trg_word_emb(trg_seq)
        for dec_layer in self.decoder:
            dec_output, _slf, _enc = dec_layer(dec_output, enc_output, slf_mask=trg_mask, mask=src_mask)
        logit = self.trg_word_prj(dec_output)
        return (logit * 16**-0.5).view(-1, logit.size(2))


def jadore_attention(kind: str, at: str) -> Any:
    return attention(kind, q=f"{at}.w_qs", k=f"{at}.w_ks", v=f"{at}.w_vs", o=f"{at}.fc", norm=f"{at}.layer_norm")


def jadore_ffn(at: str) -> Any:
    return ffn(f"{at}.w_1", f"{at}.w_2", f"{at}.layer_norm")


JADORE = (
    Stack((0, 1), jadore_attention("self", "encoder.{i}.slf_attn") | jadore_ffn("encoder.{i}.pos_ffn")),
    Stack(
        (0, 1),
        jadore_attention("self", "decoder.{i}.slf_attn")
        | jadore_attention("cross", "decoder.{i}.enc_attn")
        | jadore_ffn("decoder.{i}.pos_ffn"),
    ),
)


# BERT-pytorch: `.forward` called by name, lambdas, a list of three Linears in a zip.
class BertNorm(nn.Module):
    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class BertGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class BertAttention(nn.Module):
    def __init__(self, h: int, d_model: int) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linear_layers = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(3)])
        self.output_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(p=0.1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        batch_size = query.size(0)
        query, key, value = [
            linear(x).view(batch_size, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linear_layers, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(self.dropout(F.softmax(scores, dim=-1)), value)
        x = x.transpose(1, 2).contiguous().view(batch_size, -1, self.h * self.d_k)
        return self.output_linear(x)


class BertFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout, self.activation = nn.Dropout(0.1), BertGelu()

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.activation(self.w_1(x))))


class BertSublayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.dropout = BertNorm(size), nn.Dropout(0.1)

    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class BertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = BertAttention(2, 16), BertFeedForward(16, 64)
        self.input_sublayer, self.output_sublayer = BertSublayer(16), BertSublayer(16)
        self.dropout = nn.Dropout(p=0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.input_sublayer(x, lambda _x: self.attention.forward(_x, _x, _x, mask=mask))
        x = self.output_sublayer(x, self.feed_forward)
        return self.dropout(x)


class BertPytorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.transformer_blocks = nn.ModuleList([BertBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).unsqueeze(1).repeat(1, x.size(1), 1).unsqueeze(1)
        x = self.embedding(x)
        for transformer in self.transformer_blocks:
            x = transformer.forward(x, mask)
        return x


BERT = Stack(
    (0, 1),
    attention(
        q="transformer_blocks.{i}.attention.linear_layers.0",
        k="transformer_blocks.{i}.attention.linear_layers.1",
        v="transformer_blocks.{i}.attention.linear_layers.2",
        o="transformer_blocks.{i}.attention.output_linear",
        norm="transformer_blocks.{i}.input_sublayer.norm.a_2!",
    )
    | ffn(
        "transformer_blocks.{i}.feed_forward.w_1",
        "transformer_blocks.{i}.feed_forward.w_2",
        "transformer_blocks.{i}.output_sublayer.norm.a_2!",
    ),
)


# ViT-pytorch: a `vis` flag, tuples of states and weights, a name for the input that is added later.
class VisAttention(nn.Module):
    def __init__(self, vis: bool) -> None:
        super().__init__()
        self.vis, self.num_attention_heads, self.attention_head_size, self.all_head_size = vis, 2, 8, 16
        self.query, self.key = nn.Linear(16, self.all_head_size), nn.Linear(16, self.all_head_size)
        self.value, self.out = nn.Linear(16, self.all_head_size), nn.Linear(16, 16)
        self.attn_dropout, self.proj_dropout, self.softmax = nn.Dropout(0.0), nn.Dropout(0.0), nn.Softmax(dim=-1)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        x = x.view(*new_x_shape)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_probs = self.softmax(attention_scores / math.sqrt(self.attention_head_size))
        weights = attention_probs if self.vis else None
        context_layer = torch.matmul(self.attn_dropout(attention_probs), value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*(context_layer.size()[:-2] + (self.all_head_size,)))
        return self.proj_dropout(self.out(context_layer)), weights


class VisMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act_fn, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), F.gelu, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.act_fn(self.fc1(x)))
        return self.dropout(self.fc2(x))


class VisBlock(nn.Module):
    def __init__(self, vis: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(16, eps=1e-6), nn.LayerNorm(16, eps=1e-6)
        self.ffn, self.attn = VisMlp(), VisAttention(vis)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = x
        x = self.attention_norm(x)
        x, weights = self.attn(x)
        x = x + h
        h = x
        x = self.ffn_norm(x)
        x = self.ffn(x)
        x = x + h
        return x, weights


class VisEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList()
        self.encoder_norm = nn.LayerNorm(16, eps=1e-6)
        for _ in range(2):
            self.layer.append(copy.deepcopy(VisBlock(vis=True)))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, list[Tensor]]:
        attn_weights = []
        for layer_block in self.layer:
            hidden_states, weights = layer_block(hidden_states)
            attn_weights.append(weights)
        return self.encoder_norm(hidden_states), attn_weights


VIS = Stack(
    (0, 1),
    attention(
        q="layer.{i}.attn.query",
        k="layer.{i}.attn.key",
        v="layer.{i}.attn.value",
        o="layer.{i}.attn.out",
        norm="layer.{i}.attention_norm",
    )
    | ffn("layer.{i}.ffn.fc1", "layer.{i}.ffn.fc2", "layer.{i}.ffn_norm"),
)


def pair() -> dict[str, Any]:
    return {"src_seq": torch.randint(1, 50, (2, 6)), "trg_seq": torch.randint(1, 50, (2, 5))}


CASES = (
    Case("hand-written/jadore_transformer", "hand-written", Jadore, pair, JADORE),
    Case(
        "hand-written/bert_pytorch", "hand-written", BertPytorch, lambda: {"x": torch.randint(1, 50, (2, 6))}, (BERT,)
    ),
    Case("hand-written/vit_pytorch", "hand-written", VisEncoder, sequence("hidden_states"), (VIS,)),
)
