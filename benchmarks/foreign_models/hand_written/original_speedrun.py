"""The record runs of nanoGPT (modded-nanogpt): one parameter of scalars, values of embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import ffn, hand_written


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self):
        std = 0.5 * (self.in_features**-0.5)
        bound = (3**0.5) * std
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    def __init__(self, dim, max_seq_len):
        super().__init__()
        angular_freq = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4, dtype=torch.float32)
        angular_freq = torch.cat([angular_freq, angular_freq.new_zeros(dim // 4)])
        t = torch.arange(max_seq_len, dtype=torch.float32)
        theta = torch.einsum("i,j -> ij", t, angular_freq)
        self.cos = nn.Buffer(theta.cos(), persistent=False)
        self.sin = nn.Buffer(theta.sin(), persistent=False)

    def forward(self, x_BTHD):
        assert self.cos.size(0) >= x_BTHD.size(-3)
        cos, sin = self.cos[None, : x_BTHD.size(-3), None, :], self.sin[None, : x_BTHD.size(-3), None, :]
        x1, x2 = x_BTHD.to(dtype=torch.float32).chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x1 * (-sin) + x2 * cos
        return torch.cat((y1, y2), 3).type_as(x_BTHD)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, num_heads, max_seq_len, head_dim=8):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        hdim = num_heads * head_dim
        std = 0.5 * (dim**-0.5)
        bound = (3**0.5) * std
        self.qkv_w = nn.Parameter(torch.empty(3, hdim, dim).uniform_(-bound, bound))
        self.rotary = Rotary(head_dim, max_seq_len)
        self.c_proj = CastedLinear(hdim, dim)
        self.attn_scale = 0.12

    def forward(self, x, ve, lambdas):
        B, T = x.size(0), x.size(1)
        assert B == 1, "Must use batch size = 1 for FlexAttention"
        q, k, v = (
            F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x))
            .view(B, T, 3 * self.num_heads, self.head_dim)
            .chunk(3, dim=-2)
        )
        q, k = norm(q), norm(k)
        q, k = self.rotary(q), self.rotary(k)
        if ve is not None:
            v = lambdas[0] * v + lambdas[1] * ve.view_as(v)
        else:
            v = lambdas[0] * v
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.attn_scale
        ).transpose(1, 2)
        y = y.contiguous().view(B, T, self.num_heads * self.head_dim)
        y = self.c_proj(y)
        return y


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        hdim = 4 * dim
        self.c_fc = CastedLinear(dim, hdim)
        self.c_proj = CastedLinear(hdim, dim)

    def forward(self, x):
        x = self.c_fc(x)
        x = F.relu(x).square()
        x = self.c_proj(x)
        return x


class Block(nn.Module):
    def __init__(self, dim, num_heads, max_seq_len, layer_idx):
        super().__init__()
        # skip attention of one block
        self.attn = CausalSelfAttention(dim, num_heads, max_seq_len) if layer_idx != 2 else None
        self.mlp = MLP(dim)

    def forward(self, x, ve, x0, lambdas, sa_lambdas):
        x = lambdas[0] * x + lambdas[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), ve, sa_lambdas)
        x = x + self.mlp(norm(x))
        return x


class SpeedrunGPT(nn.Module):
    def __init__(self, vocab_size=50, num_layers=4, num_heads=2, model_dim=16, max_seq_len=32):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, model_dim)
        self.value_embeds = nn.ModuleList([nn.Embedding(vocab_size, model_dim) for _ in range(1)])
        self.blocks = nn.ModuleList([Block(model_dim, num_heads, max_seq_len, i) for i in range(num_layers)])
        self.lm_head = CastedLinear(model_dim, vocab_size)
        assert num_layers % 2 == 0
        self.scalars = nn.Parameter(
            torch.cat(
                [
                    torch.ones(num_layers),  # skip_weights
                    *[torch.tensor([1.0, 0.1]) for _ in range(num_layers)],  # block lambdas
                    *[torch.tensor([0.5, 0.5]) for _ in range(num_layers)],  # SA lambdas
                ]
            )
        )

    def forward(self, input_seq):
        assert input_seq.ndim == 1
        ve = [value_embed(input_seq) for value_embed in self.value_embeds]
        ve = [ve[0]] + [None] * (len(self.blocks) - 2) + [ve[0]]
        assert len(ve) == len(self.blocks)
        x = x0 = norm(self.embed(input_seq)[None])
        skip_connections = []
        skip_weights = self.scalars[: (len(self.blocks) // 2)]
        lambdas = self.scalars[1 * len(self.blocks) : 3 * len(self.blocks)].view(-1, 2)
        sa_lambdas = self.scalars[3 * len(self.blocks) : 5 * len(self.blocks)].view(-1, 2)
        n = len(self.blocks) // 2
        for i in range(len(self.blocks)):
            if i >= n:
                x = x + skip_weights[i - n] * skip_connections.pop()
            x = self.blocks[i](x, ve[i], x0, lambdas[i], sa_lambdas[i])
            if i < n:
                skip_connections.append(x)
        x = norm(x)
        logits = self.lm_head(x)
        return 30 * torch.sigmoid(logits / (7.5 * x.size(-1) ** 0.5))


MLP_ROLES = ffn("blocks.{i}.mlp.c_fc", "blocks.{i}.mlp.c_proj")
ATTENTION = {
    "attn.q": "blocks.{i}.attn.qkv_w@0",
    "attn.k": "blocks.{i}.attn.qkv_w@1",
    "attn.v": "blocks.{i}.attn.qkv_w@2",
    "attn.o": "blocks.{i}.attn.c_proj.weight",
}

CASES = (
    hand_written(
        "modded_nanogpt",
        SpeedrunGPT,
        lambda: {"input_seq": torch.randint(1, 50, (8,))},
        Stack((0, 1, 3), ATTENTION | MLP_ROLES, {"attn.x": "blocks.{i}.attn"}),
        Stack((2,), MLP_ROLES),
    ),
)
