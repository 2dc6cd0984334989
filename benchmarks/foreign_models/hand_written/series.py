"""Sequences of items and time series: SASRec, Informer, PatchTST; Fourier mixing."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, ffn, packed, sequence


# SASRec: four lists side by side; the residual is the norm of the stream; an ffn of convolutions
# over (batch, features, tokens) that adds its input itself; padding is zero behind each layer.
class PointWiseFeedForward(nn.Module):
    def __init__(self, hidden_units: int, dropout_rate: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout1 = nn.Dropout(p=dropout_rate)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout2 = nn.Dropout(p=dropout_rate)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.dropout2(self.conv2(self.relu(self.dropout1(self.conv1(inputs.transpose(-1, -2))))))
        outputs = outputs.transpose(-1, -2)
        outputs += inputs
        return outputs


class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item_emb, self.pos_emb = nn.Embedding(51, 16, padding_idx=0), nn.Embedding(9, 16)
        self.attention_layernorms, self.attention_layers = nn.ModuleList(), nn.ModuleList()
        self.forward_layernorms, self.forward_layers = nn.ModuleList(), nn.ModuleList()
        self.last_layernorm = nn.LayerNorm(16, eps=1e-8)
        for _ in range(2):
            self.attention_layernorms.append(nn.LayerNorm(16, eps=1e-8))
            self.attention_layers.append(nn.MultiheadAttention(16, 2, 0.0))
            self.forward_layernorms.append(nn.LayerNorm(16, eps=1e-8))
            self.forward_layers.append(PointWiseFeedForward(16, 0.0))

    def forward(self, log_seqs: Tensor) -> Tensor:
        seqs = self.item_emb(log_seqs)
        seqs *= 16**0.5
        positions = torch.arange(log_seqs.shape[1]).expand(log_seqs.shape)
        seqs += self.pos_emb(positions)
        timeline_mask = log_seqs == 0
        seqs *= ~timeline_mask.unsqueeze(-1)
        tl = seqs.shape[1]
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
        for i in range(len(self.attention_layers)):
            seqs = torch.transpose(seqs, 0, 1)
            Q = self.attention_layernorms[i](seqs)
            mha_outputs, _ = self.attention_layers[i](Q, seqs, seqs, attn_mask=attention_mask)
            seqs = Q + mha_outputs
            seqs = torch.transpose(seqs, 0, 1)
            seqs = self.forward_layernorms[i](seqs)
            seqs = self.forward_layers[i](seqs)
            seqs *= ~timeline_mask.unsqueeze(-1)
        return self.last_layernorm(seqs)


# x of an attention is what q, k and v read; here q reads the norm of what k and v read.
SASREC = Stack(
    (0, 1),
    packed(
        "attention_layers.{i}.in_proj_weight!",
        16,
        o="attention_layers.{i}.out_proj",
        norm="attention_layernorms.{i}",
    )
    | ffn("forward_layers.{i}.conv1", "forward_layers.{i}.conv2", "forward_layernorms.{i}"),
)


# Informer: einsums over (b, l, h, e); a chain `y = x = norm(x)`; convolutions between the layers.
class FullAttention(nn.Module):
    def __init__(self, output_attention: bool = False) -> None:
        super().__init__()
        self.output_attention, self.dropout = output_attention, nn.Dropout(0.0)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        _b, _l, _h, E = queries.shape
        scale = 1.0 / sqrt(E)
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        A = self.dropout(torch.softmax(scale * scores, dim=-1))
        V = torch.einsum("bhls,bshd->blhd", A, values)
        if self.output_attention:
            return (V.contiguous(), A)
        return (V.contiguous(), None)


class AttentionLayer(nn.Module):
    def __init__(self, attention: nn.Module, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.inner_attention, self.n_heads = attention, n_heads
        self.query_projection, self.key_projection = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.value_projection, self.out_projection = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        B, L, _ = queries.shape
        _, S, _ = keys.shape
        H = self.n_heads
        queries = self.query_projection(queries).view(B, L, H, -1)
        keys = self.key_projection(keys).view(B, S, H, -1)
        values = self.value_projection(values).view(B, S, H, -1)
        out, attn = self.inner_attention(queries, keys, values)
        return self.out_projection(out.view(B, L, -1)), attn


class InformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = AttentionLayer(FullAttention(), 16, 2)
        self.conv1, self.conv2 = nn.Conv1d(16, 32, kernel_size=1), nn.Conv1d(32, 16, kernel_size=1)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(16), nn.LayerNorm(16), nn.Dropout(0.0)
        self.activation = F.gelu

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        new_x, attn = self.attention(x, x, x)
        x = x + self.dropout(new_x)
        y = x = self.norm1(x)
        y = self.dropout(self.activation(self.conv1(y.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        return self.norm2(x + y), attn


class Distilling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downConv = nn.Conv1d(16, 16, kernel_size=3, padding=1, padding_mode="circular")
        self.norm, self.activation = nn.BatchNorm1d(16), nn.ELU()
        self.maxPool = nn.MaxPool1d(kernel_size=3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downConv(x.permute(0, 2, 1))
        return self.maxPool(self.activation(self.norm(x))).transpose(1, 2)


class Informer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_layers = nn.ModuleList([InformerLayer() for _ in range(3)])
        self.conv_layers = nn.ModuleList([Distilling() for _ in range(2)])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        attns = []
        for attn_layer, conv_layer in zip(self.attn_layers, self.conv_layers, strict=False):
            x, attn = attn_layer(x)
            x = conv_layer(x)
            attns.append(attn)
        x, attn = self.attn_layers[-1](x)
        attns.append(attn)
        return self.norm(x), attns


INFORMER = Stack(
    (0, 1, 2),
    attention(
        q="attn_layers.{i}.attention.query_projection",
        k="attn_layers.{i}.attention.key_projection",
        v="attn_layers.{i}.attention.value_projection",
        o="attn_layers.{i}.attention.out_projection",
        norm="attn_layers.{i}.norm1",
    )
    | ffn("attn_layers.{i}.conv1", "attn_layers.{i}.conv2", "attn_layers.{i}.norm2"),
)


# PatchTST: scores of the layer before are added to those of the next; batch norms between two
# transposes; dimensions (batch · variables, patches, d).
class Transpose(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.dims)


class PatchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.d_k, self.d_v = 2, 8, 8
        self.W_Q, self.W_K, self.W_V = (nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(8**-0.5), requires_grad=False)
        self.to_out = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0))

    def forward(
        self, Q: Tensor, K: Tensor | None = None, V: Tensor | None = None, prev: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        bs = Q.size(0)
        if K is None:
            K = Q
        if V is None:
            V = Q
        q_s = self.W_Q(Q).view(bs, -1, self.n_heads, self.d_k).transpose(1, 2)
        k_s = self.W_K(K).view(bs, -1, self.n_heads, self.d_k).permute(0, 2, 3, 1)
        v_s = self.W_V(V).view(bs, -1, self.n_heads, self.d_v).transpose(1, 2)
        attn_scores = torch.matmul(q_s, k_s) * self.scale
        if prev is not None:
            attn_scores = attn_scores + prev
        attn_weights = F.softmax(attn_scores, dim=-1)
        output = torch.matmul(attn_weights, v_s)
        output = output.transpose(1, 2).contiguous().view(bs, -1, self.n_heads * self.d_v)
        return self.to_out(output), attn_weights, attn_scores


class PatchLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = PatchAttention()
        self.dropout_attn, self.dropout_ffn = nn.Dropout(0.0), nn.Dropout(0.0)
        self.norm_attn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(16), Transpose(1, 2))
        self.ff = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16))
        self.norm_ffn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(16), Transpose(1, 2))

    def forward(self, src: Tensor, prev: Tensor | None = None) -> tuple[Tensor, Tensor]:
        src2, _attn, scores = self.self_attn(src, src, src, prev)
        src = src + self.dropout_attn(src2)
        src = self.norm_attn(src)
        src2 = self.ff(src)
        src = src + self.dropout_ffn(src2)
        return self.norm_ffn(src), scores


class PatchTST(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_P = nn.Linear(4, 16)
        self.layers = nn.ModuleList([PatchLayer() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        n_vars = x.shape[1]
        u = self.W_P(x.unfold(dimension=-1, size=4, step=2))
        u = torch.reshape(u, (u.shape[0] * u.shape[1], u.shape[2], u.shape[3]))
        output, scores = u, None
        for mod in self.layers:
            output, scores = mod(output, prev=scores)
        z = torch.reshape(output, (-1, n_vars, output.shape[-2], output.shape[-1]))
        return z.permute(0, 1, 3, 2)


PATCH_TST = Stack(
    (0, 1),
    attention(
        q="layers.{i}.self_attn.W_Q",
        k="layers.{i}.self_attn.W_K",
        v="layers.{i}.self_attn.W_V",
        o="layers.{i}.self_attn.to_out.0",
        norm="layers.{i}.norm_attn.1",
    )
    | ffn("layers.{i}.ff.0", "layers.{i}.ff.3", "layers.{i}.norm_ffn.1"),
)


# FNet: tokens are mixed by a Fourier transform, which has no weights.
class FNetLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing_layer_norm, self.output_layer_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.feed_forward, self.output_dense = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        fft_output = torch.fft.fft(torch.fft.fft(hidden_states, dim=-1), dim=-2).real
        fft_output = self.mixing_layer_norm(fft_output + hidden_states)
        intermediate_output = F.gelu(self.feed_forward(fft_output))
        output = self.output_dense(intermediate_output)
        return self.output_layer_norm(output + fft_output)


class FNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([FNetLayer() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer_module in self.layer:
            x = layer_module(x)
        return x


FNET = Stack(
    (0, 1),
    ffn("layer.{i}.feed_forward", "layer.{i}.output_dense", "layer.{i}.output_layer_norm")
    | {"mixer.norm": "layer.{i}.mixing_layer_norm.weight"},
)


def items() -> dict[str, Any]:
    return {"log_seqs": torch.cat([torch.zeros(2, 2, dtype=torch.long), torch.randint(1, 50, (2, 6))], 1)}


CASES = (
    Case("hand-written/sasrec", "hand-written", SASRec, items, (SASREC,)),
    Case("hand-written/informer", "hand-written", Informer, sequence(length=12), (INFORMER,), lambda out: out[0]),
    Case("hand-written/patch_tst", "hand-written", PatchTST, lambda: {"x": torch.randn(2, 3, 12)}, (PATCH_TST,)),
    Case("hand-written/fnet", "hand-written", FNet, sequence(), (FNET,)),
)
