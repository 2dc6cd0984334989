"""gpt-oss: one sequence without a batch, sinks, and experts that are gathered for each token."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import hand_written


# gpt_oss/torch/model.py: one sequence without a batch; sinks; experts gathered by token
class OssRMSNorm(nn.Module):
    def __init__(self, num_features, eps=1e-05):
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(num_features))

    def forward(self, x):
        assert x.shape[-1] == self.num_features
        t, dtype = x.float(), x.dtype
        t = t * torch.rsqrt(torch.mean(t**2, dim=-1, keepdim=True) + self.eps)
        return (t * self.scale).to(dtype)


def apply_rotary_emb(x, cos, sin):
    cos = cos.unsqueeze(-2).to(x.dtype)
    sin = sin.unsqueeze(-2).to(x.dtype)
    x1, x2 = torch.chunk(x, 2, dim=-1)
    o1 = x1 * cos - x2 * sin
    o2 = x2 * cos + x1 * sin
    return torch.cat((o1, o2), dim=-1)


class OssRotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def _compute_cos_sin(self, num_tokens):
        freq = self.base ** (torch.arange(0, self.head_dim, 2, dtype=torch.float) / self.head_dim)
        t = torch.arange(num_tokens, dtype=torch.float32)
        freqs = torch.einsum("i,j->ij", t, 1.0 / freq)
        return freqs.cos(), freqs.sin()

    def forward(self, query, key):
        num_tokens = query.shape[0]
        cos, sin = self._compute_cos_sin(num_tokens)
        query_shape = query.shape
        query = query.view(num_tokens, -1, self.head_dim)
        query = apply_rotary_emb(query, cos, sin)
        query = query.reshape(query_shape)
        key_shape = key.shape
        key = key.view(num_tokens, -1, self.head_dim)
        key = apply_rotary_emb(key, cos, sin)
        key = key.reshape(key_shape)
        return query, key


def sdpa(Q, K, V, S, sm_scale, sliding_window=0):
    n_tokens, n_heads, q_mult, d_head = Q.shape
    assert K.shape == (n_tokens, n_heads, d_head)
    assert V.shape == (n_tokens, n_heads, d_head)
    K = K[:, :, None, :].expand(-1, -1, q_mult, -1)
    V = V[:, :, None, :].expand(-1, -1, q_mult, -1)
    S = S.reshape(n_heads, q_mult, 1, 1).expand(-1, -1, n_tokens, -1)
    mask = torch.triu(Q.new_full((n_tokens, n_tokens), -float("inf")), diagonal=1)
    if sliding_window > 0:
        mask += torch.tril(mask.new_full((n_tokens, n_tokens), -float("inf")), diagonal=-sliding_window)
    QK = torch.einsum("qhmd,khmd->hmqk", Q, K)
    QK *= sm_scale
    QK += mask[None, None, :, :]
    QK = torch.cat([QK, S], dim=-1)
    W = torch.softmax(QK, dim=-1)
    W = W[..., :-1]
    attn = torch.einsum("hmqk,khmd->qhmd", W, V)
    return attn.reshape(n_tokens, -1)


class OssAttentionBlock(nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.head_dim, self.num_attention_heads, self.num_key_value_heads = 8, 4, 2
        self.sliding_window = 4 if layer_idx % 2 == 0 else 0
        self.sinks = nn.Parameter(torch.randn(4))
        self.norm = OssRMSNorm(16)
        qkv_dim = self.head_dim * (self.num_attention_heads + 2 * self.num_key_value_heads)
        self.qkv = nn.Linear(16, qkv_dim)
        self.out = nn.Linear(self.head_dim * self.num_attention_heads, 16)
        self.sm_scale = 1 / math.sqrt(self.head_dim)
        self.rope = OssRotary(self.head_dim)

    def forward(self, x):
        t = self.norm(x)
        qkv = self.qkv(t)
        q = qkv[:, : self.num_attention_heads * self.head_dim].contiguous()
        k = qkv[
            :,
            self.num_attention_heads * self.head_dim : (self.num_attention_heads + self.num_key_value_heads)
            * self.head_dim,
        ].contiguous()
        v = qkv[
            :,
            (self.num_attention_heads + self.num_key_value_heads) * self.head_dim : (
                self.num_attention_heads + 2 * self.num_key_value_heads
            )
            * self.head_dim,
        ].contiguous()
        q = q.view(-1, self.num_key_value_heads, self.num_attention_heads // self.num_key_value_heads, self.head_dim)
        k = k.view(-1, self.num_key_value_heads, self.head_dim)
        v = v.view(-1, self.num_key_value_heads, self.head_dim)
        q, k = self.rope(q, k)
        t = sdpa(q, k, v, self.sinks, self.sm_scale, self.sliding_window)
        t = self.out(t)
        t = x + t
        return t


def swiglu(x, alpha=1.702, limit=7.0):
    x_glu, x_linear = x[..., ::2], x[..., 1::2]
    x_glu = x_glu.clamp(min=None, max=limit)
    x_linear = x_linear.clamp(min=-limit, max=limit)
    out_glu = x_glu * torch.sigmoid(alpha * x_glu)
    return out_glu * (x_linear + 1)


class OssMLPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.experts_per_token, self.swiglu_limit = 4, 2, 7.0
        self.norm = OssRMSNorm(16)
        self.gate = nn.Linear(16, 4)
        self.mlp1_weight = nn.Parameter(torch.randn(4, 24, 16) * 0.2)
        self.mlp1_bias = nn.Parameter(torch.randn(4, 24) * 0.2)
        self.mlp2_weight = nn.Parameter(torch.randn(4, 16, 12) * 0.2)
        self.mlp2_bias = nn.Parameter(torch.randn(4, 16) * 0.2)

    def forward(self, x):
        t = self.norm(x)
        g = self.gate(t)
        experts = torch.topk(g, k=self.experts_per_token, dim=-1, sorted=True)
        expert_weights = torch.nn.functional.softmax(experts.values, dim=1)
        expert_indices = experts.indices

        # MLP #1
        mlp1_weight = self.mlp1_weight[expert_indices, ...]
        mlp1_bias = self.mlp1_bias[expert_indices, ...]
        t = torch.einsum("beck,bk->bec", mlp1_weight, t) + mlp1_bias
        t = swiglu(t, limit=self.swiglu_limit)

        # MLP #2
        mlp2_weight = self.mlp2_weight[expert_indices, ...]
        mlp2_bias = self.mlp2_bias[expert_indices, ...]
        t = torch.einsum("beck,bek->bec", mlp2_weight, t)
        t += mlp2_bias

        # Weighted sum of experts
        t = torch.einsum("bec,be->bc", t, expert_weights)
        return x + t


class OssBlock(nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.attn = OssAttentionBlock(layer_idx)
        self.mlp = OssMLPBlock()

    def forward(self, x):
        x = self.attn(x)
        x = self.mlp(x)
        return x


class GptOss(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.block = nn.ModuleList([OssBlock(layer_idx) for layer_idx in range(2)])
        self.norm = OssRMSNorm(16)
        self.unembedding = nn.Linear(16, 50, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.block:
            x = block(x)
        x = self.norm(x)
        return self.unembedding(x)


OSS = {
    "attn.q": "block.{i}.attn.qkv.weight[0:32]",
    "attn.k": "block.{i}.attn.qkv.weight[32:48]",
    "attn.v": "block.{i}.attn.qkv.weight[48:64]",
    "attn.o": "block.{i}.attn.out.weight",
    "attn.norm": "block.{i}.attn.norm.scale",
    "ffn.norm": "block.{i}.mlp.norm.scale",
    "ffn.router": "block.{i}.mlp.gate.weight",
    "ffn.experts.gate": "block.{i}.mlp.mlp1_weight@{0..3}[" + ", ".join(f"{n}:{n + 1}" for n in range(0, 24, 2)) + "]",
    "ffn.experts.up": "block.{i}.mlp.mlp1_weight@{0..3}[" + ", ".join(f"{n}:{n + 1}" for n in range(1, 24, 2)) + "]",
    "ffn.experts.down": "block.{i}.mlp.mlp2_weight@{0..3}",
}

CASES = (
    hand_written(
        "gpt_oss",
        GptOss,
        lambda: {"x": torch.randint(1, 50, (8,))},
        Stack((0, 1), OSS, {"ffn.x": "block.{i}.mlp.norm:out", "ffn.h": None}),
    ),
)
