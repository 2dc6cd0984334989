"""Sequences: relative positions by skewing, time first, parameters in a dictionary, quantized
weights, keys of other layers, nodes over time. The role tables were written before peftc had seen
the code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.hand_written.blind_blocks import mlp
from benchmarks.foreign_models.tables import attention, both, ffn, hand_written, sequence, split_kv, tokens

D, H = 16, 2
B = "blocks.{i}"


# Music Transformer: scores of relative positions by skewing.
class RelativeGlobalAttention(nn.Module):
    def __init__(self, max_len: int = 16) -> None:
        super().__init__()
        self.max_len = max_len
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.Er = nn.Parameter(torch.randn(max_len, D // H))
        self.register_buffer("mask", torch.tril(torch.ones(max_len, max_len))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        k_t = self.key(x).reshape(b, n, H, -1).permute(0, 2, 3, 1)
        v = self.value(x).reshape(b, n, H, -1).transpose(1, 2)
        q = self.query(x).reshape(b, n, H, -1).transpose(1, 2)
        er_t = self.Er[self.max_len - n :, :].transpose(0, 1)
        srel = self.skew(torch.matmul(q, er_t))
        attn = (torch.matmul(q, k_t) + srel) / math.sqrt(q.size(-1))
        attn = F.softmax(attn.masked_fill(self.mask[:, :, :n, :n] == 0, float("-inf")), dim=-1)
        return self.out(torch.matmul(attn, v).transpose(1, 2).reshape(b, n, -1))

    def skew(self, qer: Tensor) -> Tensor:
        padded = F.pad(qer, (1, 0))
        b, h, rows, cols = padded.shape
        return padded.reshape(b, h, cols, rows)[:, :, 1:, :]


class MusicBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rga, self.pre, self.suf = RelativeGlobalAttention(), nn.Linear(D, D // 2), nn.Linear(D // 2, D)
        self.layernorm1, self.layernorm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        out1 = self.layernorm1(self.rga(x) + x)
        return self.layernorm2(out1 + self.suf(F.relu(self.pre(out1))))


class MusicTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(50, D), nn.Linear(D, 50)
        self.blocks = nn.ModuleList([MusicBlock(), MusicBlock()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(D)
        for block in self.blocks:
            x = block(x)
        return self.fc(x)


# fairseq: time first, heads in the batch, norms before or behind by a flag.
class FairseqAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = D, H, D // H
        self.scaling = self.head_dim**-0.5
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True):
        tgt_len, bsz, embed_dim = query.size()
        assert embed_dim == self.embed_dim
        q = self.q_proj(query)
        k = self.k_proj(key)
        v = self.v_proj(value)
        q *= self.scaling
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        src_len = k.size(1)
        weights = torch.bmm(q, k.transpose(1, 2))
        assert list(weights.size()) == [bsz * self.num_heads, tgt_len, src_len]
        if key_padding_mask is not None:
            weights = weights.view(bsz, self.num_heads, tgt_len, src_len)
            weights = weights.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
            weights = weights.view(bsz * self.num_heads, tgt_len, src_len)
        probs = F.softmax(weights, dim=-1)
        attn = torch.bmm(probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        attn = self.out_proj(attn)
        if need_weights:
            return attn, weights.view(bsz, self.num_heads, tgt_len, src_len).mean(dim=1)
        return attn, None


class FairseqLayer(nn.Module):
    def __init__(self, normalize_before: bool) -> None:
        super().__init__()
        self.normalize_before = normalize_before
        self.self_attn, self.self_attn_layer_norm = FairseqAttention(), nn.LayerNorm(D)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.LayerNorm(D)

    def maybe_layer_norm(self, layer_norm, x, before=False, after=False):
        assert before ^ after
        return layer_norm(x) if after ^ self.normalize_before else x

    def forward(self, x, encoder_padding_mask):
        residual = x
        x = self.maybe_layer_norm(self.self_attn_layer_norm, x, before=True)
        x, _ = self.self_attn(query=x, key=x, value=x, key_padding_mask=encoder_padding_mask)
        x = F.dropout(x, p=0.1, training=self.training)
        x = residual + x
        x = self.maybe_layer_norm(self.self_attn_layer_norm, x, after=True)
        residual = x
        x = self.maybe_layer_norm(self.final_layer_norm, x, before=True)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        x = residual + x
        return self.maybe_layer_norm(self.final_layer_norm, x, after=True)


class FairseqEncoder(nn.Module):
    def __init__(self, normalize_before: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, D, padding_idx=0)
        self.layers = nn.ModuleList([])
        self.layers.extend([FairseqLayer(normalize_before) for _ in range(2)])
        self.layer_norm = nn.LayerNorm(D) if normalize_before else None

    def forward(self, src_tokens):
        mask = src_tokens.eq(0)
        x = self.embed_tokens(src_tokens).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.layer_norm is None else self.layer_norm(x)


# All weights in one dictionary, and a loop over the numbers of layers.
class Functional(nn.Module):
    def __init__(self, n_layer: int = 2) -> None:
        super().__init__()
        self.n_layer = n_layer
        sizes = {"wq": (D, D), "wk": (D, D), "wv": (D, D), "wo": (D, D), "fc1": (2 * D, D), "fc2": (D, 2 * D)}
        self.params = nn.ParameterDict(
            {f"layer{i}_{name}": torch.randn(size) * 0.1 for i in range(n_layer) for name, size in sizes.items()}
        )
        self.wte = nn.Embedding(50, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for i in range(self.n_layer):
            h = F.rms_norm(x, (D,))
            q, k, v = (
                F.linear(h, self.params[f"layer{i}_{n}"]).unflatten(-1, (H, -1)).transpose(1, 2)
                for n in ("wq", "wk", "wv")
            )
            att = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.linear(att, self.params[f"layer{i}_wo"])
            h = F.relu(F.linear(F.rms_norm(x, (D,)), self.params[f"layer{i}_fc1"])).square()
            x = x + F.linear(h, self.params[f"layer{i}_fc2"])
        return F.linear(x, self.wte.weight)


# BitNet b1.58: weights of three values and activations of 8 bits, with straight-through gradients.
class BitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        x_norm = F.rms_norm(x, (x.shape[-1],))
        x_quant = x_norm + (activation_quant(x_norm) - x_norm).detach()
        w_quant = w + (weight_quant(w) - w).detach()
        return F.linear(x_quant, w_quant)


def activation_quant(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127) / scale


def weight_quant(w: Tensor) -> Tensor:
    scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
    return (w * scale).round().clamp_(-1, 1) / scale


class BitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (BitLinear(D, D, bias=False) for _ in range(4))
        self.up, self.down = BitLinear(D, 2 * D, bias=False), BitLinear(2 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


class BitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BitBlock(), BitBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Cross-layer attention: every second layer reads the keys and values of the one before.
class SharingBlock(nn.Module):
    def __init__(self, has_kv: bool) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D) if has_kv else None
        self.out, self.mlp = nn.Linear(D, D), mlp(D)
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (H, -1)).transpose(1, 2)
        if self.kv is not None:
            k, v = self.kv(h).chunk(2, -1)
            kv = k.unflatten(-1, (H, -1)).transpose(1, 2), v.unflatten(-1, (H, -1)).transpose(1, 2)
        assert kv is not None
        y = F.scaled_dot_product_attention(q, *kv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), kv


class CrossLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SharingBlock(i % 2 == 0) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        kv = None
        for block in self.blocks:
            x, kv = block(x, kv)
        return x


# Traffic: nodes of a graph over time, (batch, nodes, time, features); attention along either.
class AxisAttention(nn.Module):
    def __init__(self, equation: tuple[str, str], axis: int) -> None:
        super().__init__()
        self.scores, self.mix = equation
        self.axis = axis
        self.values, self.keys, self.queries = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(D, D)

    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        b, n, t, c = query.shape
        v, k, q = (
            f(x).view(b, n, t, H, c // H) for f, x in ((self.values, value), (self.keys, key), (self.queries, query))
        )
        energy = torch.einsum(self.scores, q, k)
        attention = torch.softmax(energy / (D ** (1 / 2)), dim=self.axis)
        return self.fc_out(torch.einsum(self.mix, attention, v).reshape(b, n, t, c))


class AxisBlock(nn.Module):
    def __init__(self, equation: tuple[str, str], axis: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = AxisAttention(equation, axis), nn.LayerNorm(D), nn.LayerNorm(D)
        self.feed_forward = mlp(D)

    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        x = self.norm1(self.attention(value, key, query) + query)
        return self.norm2(self.feed_forward(x) + x)


class STBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spatial = AxisBlock(("bqthd,bkthd->bqkth", "bqkth,bkthd->bqthd"), 2)
        self.temporal = AxisBlock(("bnqhd,bnkhd->bnqkh", "bnqkh,bnkhd->bnqhd"), 3)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        x1 = self.norm1(self.spatial(value, key, query) + query)
        return self.norm2(self.temporal(x1, x1, x1) + x1)


class STTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([STBlock(), STBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x)
        return x


L = "layers.{i}"
FAIRSEQ = attention(
    **{r: f"{L}.self_attn.{n}" for r, n in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True)},
    norm=f"{L}.self_attn_layer_norm",
) | ffn(f"{L}.fc1", f"{L}.fc2", f"{L}.final_layer_norm")
AXES = both(
    *(
        attention(
            q=f"{L}.{at}.attention.queries",
            k=f"{L}.{at}.attention.keys",
            v=f"{L}.{at}.attention.values",
            o=f"{L}.{at}.attention.fc_out",
            norm=f"{L}.{at}.norm1",
        )
        for at in ("spatial", "temporal")
    ),
    *(ffn(f"{L}.{at}.feed_forward.0", f"{L}.{at}.feed_forward.2", f"{L}.{at}.norm2") for at in ("spatial", "temporal")),
)

# Behind sums of the stream with itself: of the sub-layer before, or of the one behind.
OUTER = {role: (f"{L}.norm1.weight", f"{L}.norm2.weight") for role in ("attn.norm", "ffn.norm")}

CASES = (
    hand_written(
        "music_transformer",
        MusicTransformer,
        tokens("ids"),
        Stack(
            (0, 1),
            attention(
                **{r: f"{B}.rga.{n}" for r, n in zip("qkvo", ("query", "key", "value", "out"), strict=True)},
                norm=f"{B}.layernorm1",
            )
            | ffn(f"{B}.pre", f"{B}.suf", f"{B}.layernorm2"),
        ),
    ),
    hand_written("fairseq_pre_norm", lambda: FairseqEncoder(True), tokens("src_tokens"), Stack((0, 1), FAIRSEQ)),
    hand_written("fairseq_post_norm", lambda: FairseqEncoder(False), tokens("src_tokens"), Stack((0, 1), FAIRSEQ)),
    hand_written(
        "parameter_dict",
        Functional,
        tokens("ids"),
        Stack(
            (0, 1),
            attention(**{role: f"params.layer{{i}}_w{role}!" for role in "qkvo"})
            | ffn("params.layer{i}_fc1!", "params.layer{i}_fc2!"),
            {"attn.x": None, "attn.h": None, "ffn.x": None, "ffn.h": None},
        ),
    ),
    hand_written(
        "bitnet",
        BitNet,
        sequence(),
        Stack((0, 1), attention(**{role: f"{B}.w{role}" for role in "qkvo"}) | ffn(f"{B}.up", f"{B}.down")),
    ),
    hand_written(
        "cross_layer_keys",
        CrossLayer,
        sequence(),
        Stack(
            (0, 2),
            split_kv(f"{B}.q", f"{B}.kv", D, o=f"{B}.out", norm=f"{B}.norm1")
            | ffn(f"{B}.mlp.0", f"{B}.mlp.2", f"{B}.norm2"),
        ),
        Stack(
            (1, 3),
            attention(q=f"{B}.q", o=f"{B}.out", norm=f"{B}.norm1") | ffn(f"{B}.mlp.0", f"{B}.mlp.2", f"{B}.norm2"),
        ),
    ),
    hand_written(
        "axes_of_nodes", STTransformer, lambda: {"x": torch.randn(2, 4, 6, D)}, Stack((0, 1), AXES, optional=OUTER)
    ),
)
