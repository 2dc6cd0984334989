"""DeepSeek's latent attention, plain and absorbed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, ffn, hand_written, tokens


# DeepSeek-V3 inference/model.py: MLA, naive and absorbed
class DSLinear(nn.Module):
    dtype = None

    def __init__(self, in_features, out_features, bias=False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.2)
        self.register_parameter("scale", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features))
        else:
            self.register_parameter("bias", None)

    def forward(self, x):
        return ds_linear(x, self.weight, self.bias)


def ds_linear(x, weight, bias=None, scale_fmt=None):
    if weight.element_size() > 1:
        return F.linear(x, weight, bias)
    raise NotImplementedError


class DSRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)


def ds_rotary(x, freqs_cis):
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, x.size(1), 1, x.size(-1))
    y = torch.view_as_real(x * freqs_cis).flatten(3)
    return y.to(dtype)


class MLA(nn.Module):
    def __init__(self, attn_impl, n_heads=2, dim=16):
        super().__init__()
        self.attn_impl = attn_impl
        self.dim, self.n_local_heads = dim, n_heads
        self.q_lora_rank, self.kv_lora_rank = 6, 8
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 8, 4, 6
        self.qk_head_dim = 12
        self.wq_a = DSLinear(dim, 6)
        self.q_norm = DSRMSNorm(6)
        self.wq_b = DSLinear(6, n_heads * 12)
        self.wkv_a = DSLinear(dim, 8 + 4)
        self.kv_norm = DSRMSNorm(8)
        self.wkv_b = DSLinear(8, n_heads * (8 + 6))
        self.wo = DSLinear(n_heads * 6, dim)
        self.softmax_scale = self.qk_head_dim**-0.5

    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, seqlen, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x)))
        q = q.view(bsz, seqlen, self.n_local_heads, self.qk_head_dim)
        q_nope, q_pe = torch.split(q, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe = ds_rotary(q_pe, freqs_cis)
        kv = self.wkv_a(x)
        kv, k_pe = torch.split(kv, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = ds_rotary(k_pe.unsqueeze(2), freqs_cis)
        if self.attn_impl == "naive":
            q = torch.cat([q_nope, q_pe], dim=-1)
            kv = self.wkv_b(self.kv_norm(kv))
            kv = kv.view(bsz, seqlen, self.n_local_heads, self.qk_nope_head_dim + self.v_head_dim)
            k_nope, v = torch.split(kv, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_local_heads, -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        else:
            wkv_b = self.wkv_b.weight
            wkv_b = wkv_b.view(self.n_local_heads, -1, self.kv_lora_rank)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.qk_nope_head_dim])
            kv = self.kv_norm(kv)
            scores = (
                torch.einsum("bshc,btc->bsht", q_nope, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe.squeeze(2))
            ) * self.softmax_scale
        if mask is not None:
            scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        if self.attn_impl == "naive":
            x = torch.einsum("bsht,bthd->bshd", scores, v)
        else:
            x = torch.einsum("bsht,btc->bshc", scores, kv)
            x = torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -self.v_head_dim :])
        x = self.wo(x.flatten(2))
        return x


class DSMLP(nn.Module):
    def __init__(self, dim, inter_dim):
        super().__init__()
        self.w1 = DSLinear(dim, inter_dim)
        self.w2 = DSLinear(inter_dim, dim)
        self.w3 = DSLinear(dim, inter_dim)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DSBlock(nn.Module):
    def __init__(self, layer_id, impl):
        super().__init__()
        self.attn = MLA(impl)
        self.ffn = DSMLP(16, 24)
        self.attn_norm = DSRMSNorm(16)
        self.ffn_norm = DSRMSNorm(16)

    def forward(self, x, start_pos, freqs_cis, mask):
        x = x + self.attn(self.attn_norm(x), start_pos, freqs_cis, mask)
        x = x + self.ffn(self.ffn_norm(x))
        return x


class DeepSeek(nn.Module):
    def __init__(self, impl):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(2):
            self.layers.append(DSBlock(layer_id, impl))
        self.norm = DSRMSNorm(16)
        self.head = DSLinear(16, 50)
        freqs = torch.outer(torch.arange(32), 1.0 / (10000.0 ** (torch.arange(0, 4, 2) / 4)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)

    def forward(self, tokens, start_pos=0):
        seqlen = tokens.size(1)
        h = self.embed(tokens)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen].to(torch.complex64)
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device).triu_(1)
        for layer in self.layers:
            h = layer(h, start_pos, freqs_cis, mask)
        h = self.norm(h)[:, -1]
        logits = self.head(h)
        return logits


MLA_OPTIONAL = {
    "attn.q.norm": "layers.{i}.attn.q_norm.weight",
    "attn.k.norm": "layers.{i}.attn.kv_norm.weight",
    "attn.norm": ("layers.{i}.attn.q_norm.weight", "layers.{i}.attn.kv_norm.weight"),
}


DS_FFN = ffn("layers.{i}.ffn.w3", "layers.{i}.ffn.w2", "layers.{i}.ffn_norm", "layers.{i}.ffn.w1")


# Rows of wkv_b are [head, (k 8, v 6), feature].
MLA_NAIVE = Stack(
    (0, 1),
    attention(
        q="layers.{i}.attn.wq_b",
        k="layers.{i}.attn.wkv_b[0:8, 14:22]",
        v="layers.{i}.attn.wkv_b[8:14, 22:28]",
        o="layers.{i}.attn.wo",
        norm="layers.{i}.attn_norm",
    )
    | DS_FFN,
    {"attn.x": "layers.{i}.attn_norm:out"},
    optional=MLA_OPTIONAL,
)


# Absorbed: k and v are rows of wkv_b applied to queries and to the mixed latents. Whether these are
# sites, or the latent itself is k and v (wkv_a), is a matter of reading.
MLA_ABSORBED = Stack(
    (0, 1),
    attention(q="layers.{i}.attn.wq_b", o="layers.{i}.attn.wo", norm="layers.{i}.attn_norm") | DS_FFN,
    {"attn.x": "layers.{i}.attn_norm:out"},
    optional=MLA_OPTIONAL
    | {
        "attn.k": (
            "layers.{i}.attn.wkv_b.weight[0:8, 14:22]",
            "layers.{i}.attn.wkv_a.weight",
            "layers.{i}.attn.wkv_a.weight[0:8]",
        ),
        "attn.v": ("layers.{i}.attn.wkv_b.weight[8:14, 22:28]", "layers.{i}.attn.wkv_a.weight[0:8]"),
    },
)


CASES = (
    hand_written("deepseek_mla_naive", lambda: DeepSeek("naive"), tokens("tokens"), MLA_NAIVE),
    hand_written("deepseek_mla_absorbed", lambda: DeepSeek("absorb"), tokens("tokens"), MLA_ABSORBED),
)
