"""Attention without softmax: gated units (FLASH), HSTU, and torchscale's retention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import einsum, nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, ffn, hand_written, tokens


# lucidrains/FLASH-pytorch: GAU
class OffsetScale(nn.Module):
    def __init__(self, dim, heads=1):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(heads, dim))
        self.beta = nn.Parameter(torch.zeros(heads, dim))
        nn.init.normal_(self.gamma, std=0.02)

    def forward(self, x):
        out = einsum("... d, h d -> ... h d", x, self.gamma) + self.beta
        return out.unbind(dim=-2)


class ReLUSquared(nn.Module):
    def forward(self, x):
        return F.relu(x) ** 2


class GAU(nn.Module):
    def __init__(self, *, dim, query_key_dim=8, expansion_factor=2.0, add_residual=True, causal=True, dropout=0.0):
        super().__init__()
        hidden_dim = int(expansion_factor * dim)
        self.norm = nn.LayerNorm(dim)
        self.causal = causal
        self.dropout = nn.Dropout(dropout)
        self.attn_fn = ReLUSquared()
        self.to_hidden = nn.Sequential(nn.Linear(dim, hidden_dim * 2), nn.SiLU())
        self.to_qk = nn.Sequential(nn.Linear(dim, query_key_dim), nn.SiLU())
        self.offsetscale = OffsetScale(query_key_dim, heads=2)
        self.to_out = nn.Sequential(nn.Linear(hidden_dim, dim), nn.Dropout(dropout))
        self.add_residual = add_residual

    def forward(self, x, rel_pos_bias=None, mask=None):
        seq_len, device = x.shape[-2], x.device
        normed_x = self.norm(x)
        v, gate = self.to_hidden(normed_x).chunk(2, dim=-1)
        qk = self.to_qk(normed_x)
        q, k = self.offsetscale(qk)
        sim = einsum("b i d, b j d -> b i j", q, k)
        if rel_pos_bias is not None:
            sim = sim + rel_pos_bias(sim)
        attn = self.attn_fn(sim / seq_len)
        attn = self.dropout(attn)
        if mask is not None:
            attn = attn.masked_fill(~mask[:, None, :], 0.0)
        if self.causal:
            causal_mask = torch.ones((seq_len, seq_len), dtype=torch.bool, device=device).triu(1)
            attn = attn.masked_fill(causal_mask, 0.0)
        out = einsum("b i j, b j d -> b i d", attn, v)
        out = out * gate
        out = self.to_out(out)
        if self.add_residual:
            out = out + x
        return out


class GAUTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_emb = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([GAU(dim=16) for _ in range(2)])
        self.to_logits = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 50))

    def forward(self, x):
        x = self.token_emb(x)
        for gau in self.layers:
            x = gau(x)
        return self.to_logits(x)


# facebookresearch/generative-recommenders modeling/sequential/hstu.py, with dense sequences
class RelativeBucketedBias(nn.Module):
    def __init__(self, max_seq_len):
        super().__init__()
        self._max_seq_len = max_seq_len
        self._pos_w = nn.Parameter(torch.empty(2 * max_seq_len - 1).normal_(mean=0, std=0.02))

    def forward(self, all_timestamps):
        N = self._max_seq_len
        t = F.pad(self._pos_w[: 2 * N - 1], [0, N]).repeat(N)
        t = t[..., :-N].reshape(1, N, 3 * N - 2)
        r = (2 * N - 1) // 2
        return t[:, :, r:-r]


class SequentialTransductionUnit(nn.Module):
    def __init__(self, embedding_dim=16, linear_hidden_dim=8, attention_dim=4, num_heads=2, max_seq_len=8):
        super().__init__()
        self._embedding_dim = embedding_dim
        self._num_heads = num_heads
        self._linear_dim = linear_hidden_dim
        self._attention_dim = attention_dim
        self._rel_attn_bias = RelativeBucketedBias(max_seq_len)
        self._uvqk = nn.Parameter(
            torch.empty((embedding_dim, linear_hidden_dim * 2 * num_heads + attention_dim * num_heads * 2)).normal_(
                mean=0, std=0.2
            )
        )
        self._o = nn.Linear(linear_hidden_dim * num_heads, embedding_dim)
        self._eps = 1e-6

    def _norm_input(self, x):
        return F.layer_norm(x, normalized_shape=[self._embedding_dim], eps=self._eps)

    def _norm_attn_output(self, x):
        return F.layer_norm(x, normalized_shape=[self._linear_dim * self._num_heads], eps=self._eps)

    def forward(self, x, all_timestamps, invalid_attn_mask):
        B, n, _ = x.size()
        normed_x = self._norm_input(x)
        batched_mm_output = torch.matmul(normed_x, self._uvqk)
        batched_mm_output = F.silu(batched_mm_output)
        u, v, q, k = torch.split(
            batched_mm_output,
            [
                self._linear_dim * self._num_heads,
                self._linear_dim * self._num_heads,
                self._attention_dim * self._num_heads,
                self._attention_dim * self._num_heads,
            ],
            dim=-1,
        )
        qk_attn = torch.einsum(
            "bnhd,bmhd->bhnm",
            q.view(B, n, self._num_heads, self._attention_dim),
            k.view(B, n, self._num_heads, self._attention_dim),
        )
        qk_attn = qk_attn + self._rel_attn_bias(all_timestamps).unsqueeze(1)
        qk_attn = F.silu(qk_attn) / n
        qk_attn = qk_attn * invalid_attn_mask.unsqueeze(0).unsqueeze(0)
        attn_output = torch.einsum(
            "bhnm,bmhd->bnhd", qk_attn, v.reshape(B, n, self._num_heads, self._linear_dim)
        ).reshape(B, n, self._num_heads * self._linear_dim)
        o_input = u * self._norm_attn_output(attn_output)
        new_outputs = self._o(F.dropout(o_input, p=0.0, training=self.training)) + x
        return new_outputs


class HSTU(nn.Module):
    def __init__(self):
        super().__init__()
        self._embedding = nn.Embedding(50, 16)
        self._attention_layers = nn.ModuleList([SequentialTransductionUnit() for _ in range(2)])
        mask = torch.triu(torch.ones((8, 8), dtype=torch.bool), diagonal=1)
        self.register_buffer("_attn_mask", mask)

    def forward(self, x):
        x = self._embedding(x)
        invalid_attn_mask = 1.0 - self._attn_mask.to(x.dtype)
        for layer in self._attention_layers:
            x = layer(x, None, invalid_attn_mask)
        return F.normalize(x, p=2.0, dim=-1)


# microsoft/torchscale: multiscale_retention.py, gate_linear_unit.py, retnet.py
class TorchscaleRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, elementwise_affine=True):
        super().__init__()
        self.normalized_shape = dim
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        if self.elementwise_affine:
            self.weight = nn.Parameter(torch.ones(dim))
        else:
            self.register_parameter("weight", None)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        if self.weight is not None:
            output = output * self.weight
        return output


def rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)


def theta_shift(x, sin, cos):
    return (x * cos) + (rotate_every_two(x) * sin)


class MultiScaleRetention(nn.Module):
    def __init__(self, embed_dim, value_dim, num_heads):
        super().__init__()
        self.embed_dim, self.value_dim, self.num_heads = embed_dim, value_dim, num_heads
        self.head_dim = self.value_dim // num_heads
        self.key_dim = self.embed_dim // num_heads
        self.scaling = self.key_dim**-0.5
        self.gate_fn = F.silu
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, value_dim, bias=False)
        self.g_proj = nn.Linear(embed_dim, value_dim, bias=False)
        self.out_proj = nn.Linear(value_dim, embed_dim, bias=False)
        self.group_norm = TorchscaleRMSNorm(self.head_dim, elementwise_affine=False)

    def parallel_forward(self, qr, kr, v, mask):
        bsz, tgt_len, embed_dim = v.size()
        vr = v.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)
        qk_mat = qr @ kr.transpose(-1, -2)
        qk_mat = qk_mat * mask
        # invariant after normalization
        qk_mat = qk_mat / qk_mat.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1, max=5e4)
        output = torch.matmul(qk_mat, vr)
        output = output.transpose(1, 2)
        return output

    def forward(self, x, rel_pos):
        bsz, tgt_len, _ = x.size()
        (sin, cos), inner_mask = rel_pos
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        g = self.g_proj(x)
        k *= self.scaling
        q = q.view(bsz, tgt_len, self.num_heads, self.key_dim).transpose(1, 2)
        k = k.view(bsz, tgt_len, self.num_heads, self.key_dim).transpose(1, 2)
        qr = theta_shift(q, sin, cos)
        kr = theta_shift(k, sin, cos)
        output = self.parallel_forward(qr, kr, v, inner_mask)
        output = self.group_norm(output).reshape(bsz, tgt_len, self.head_dim * self.num_heads)
        output = self.gate_fn(g) * output
        output = self.out_proj(output)
        return output


class TorchscaleGLU(nn.Module):
    def __init__(self, embed_dim, ffn_dim):
        super().__init__()
        self.embed_dim = embed_dim
        self.activation_fn = F.silu
        self.fc1 = nn.Linear(self.embed_dim, ffn_dim, bias=False)
        self.fc2 = nn.Linear(ffn_dim, self.embed_dim, bias=False)
        self.gate = nn.Linear(self.embed_dim, ffn_dim, bias=False)

    def forward(self, x):
        x_shape = x.shape
        x = x.reshape(-1, x.size(-1))
        g = self.gate(x)
        x = self.fc1(x)
        x = self.activation_fn(x) * g
        x = self.fc2(x)
        x = x.view(x_shape)
        return x


class RetNetRelPos(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, embed_dim // heads // 2))
        angle = angle.unsqueeze(-1).repeat(1, 2).flatten()
        decay = torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float)))
        self.register_buffer("angle", angle)
        self.register_buffer("decay", decay)

    def forward(self, slen):
        index = torch.arange(slen).to(self.decay)
        sin = torch.sin(index[:, None] * self.angle[None, :])
        cos = torch.cos(index[:, None] * self.angle[None, :])
        mask = torch.tril(torch.ones(slen, slen).to(self.decay))
        mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
        mask = torch.exp(mask * self.decay[:, None, None])
        mask = torch.nan_to_num(mask)
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        return ((sin, cos), mask)


class RetNetLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout_module = torch.nn.Dropout(0.0)
        self.retention = MultiScaleRetention(16, 32, 2)
        self.retention_layer_norm = TorchscaleRMSNorm(16)
        self.ffn = TorchscaleGLU(16, 24)
        self.final_layer_norm = TorchscaleRMSNorm(16)
        self.alpha = 1.0

    def residual_connection(self, x, residual):
        return residual * self.alpha + x

    def forward(self, x, retention_rel_pos=None):
        residual = x
        x = self.retention_layer_norm(x)
        x = self.retention(x, rel_pos=retention_rel_pos)
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)
        residual = x
        x = self.final_layer_norm(x)
        x = self.ffn(x)
        x = self.residual_connection(x, residual)
        return x


class RetNetDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([RetNetLayer() for _ in range(2)])
        self.layer_norm = TorchscaleRMSNorm(16)
        self.retnet_rel_pos = RetNetRelPos(16, 2)
        self.output_projection = nn.Linear(16, 50, bias=False)

    def forward(self, prev_output_tokens):
        slen = prev_output_tokens.size(1)
        retention_rel_pos = self.retnet_rel_pos(slen)
        x = self.embed_tokens(prev_output_tokens)
        inner_states = [x]
        for idx, layer in enumerate(self.layers):
            x = layer(x, retention_rel_pos=retention_rel_pos)
            inner_states.append(x)
        x = self.layer_norm(x)
        return self.output_projection(x), {"inner_states": inner_states}


# One Linear for query and key, which are scaled apart; the other half of `to_hidden` is a gate.
GAU_LAYER = attention(
    q="layers.{i}.to_qk.0",
    k="layers.{i}.to_qk.0",
    v="layers.{i}.to_hidden.0[0:32]",
    o="layers.{i}.to_out.0",
    norm="layers.{i}.norm",
)
# u (a gate), v, q, k, stored (in, out).
HSTU_LAYER = {
    "attn.v": "_attention_layers.{i}._uvqk.T[16:32]",
    "attn.q": "_attention_layers.{i}._uvqk.T[32:40]",
    "attn.k": "_attention_layers.{i}._uvqk.T[40:48]",
    "attn.o": "_attention_layers.{i}._o.weight",
}
RETNET = attention(
    **{role: f"layers.{{i}}.retention.{role}_proj" for role in "qkv"},
    o="layers.{i}.retention.out_proj",
    norm="layers.{i}.retention_layer_norm",
) | ffn("layers.{i}.ffn.gate", "layers.{i}.ffn.fc2", "layers.{i}.final_layer_norm", "layers.{i}.ffn.fc1")

CASES = (
    hand_written("flash_gau", GAUTransformer, tokens(), Stack((0, 1), GAU_LAYER)),
    hand_written("hstu", HSTU, tokens(), Stack((0, 1), HSTU_LAYER, {"attn.x": "_attention_layers.{i}"})),
    hand_written("torchscale_retnet", RetNetDecoder, tokens("prev_output_tokens"), Stack((0, 1), RETNET)),
)
