"""Recurrences written out: Griffin, RWKV 4."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, ffn, hand_written, tokens


# RWKV v4 (model.py of RWKV-LM), wkv in plain torch
def run_wkv(w, u, k, v):
    B, T, C = k.shape
    w = -torch.exp(w)
    aa = torch.zeros(B, C, dtype=k.dtype)
    bb = torch.zeros(B, C, dtype=k.dtype)
    pp = torch.full((B, C), -1e38, dtype=k.dtype)
    y = []
    for t in range(T):
        kk, vv = k[:, t], v[:, t]
        ww = u + kk
        p = torch.maximum(pp, ww)
        e1 = torch.exp(pp - p)
        e2 = torch.exp(ww - p)
        y.append((e1 * aa + e2 * vv) / (e1 * bb + e2))
        ww = pp + w
        p = torch.maximum(ww, kk)
        e1 = torch.exp(ww - p)
        e2 = torch.exp(kk - p)
        aa = e1 * aa + e2 * vv
        bb = e1 * bb + e2
        pp = p
    return torch.stack(y, dim=1)


class RWKV_TimeMix(nn.Module):
    def __init__(self, layer_id, n_embd=16, n_layer=2):
        super().__init__()
        self.layer_id = layer_id
        self.ctx_len = 32
        self.n_embd = n_embd
        attn_sz = n_embd
        with torch.no_grad():
            ratio_0_to_1 = layer_id / (n_layer - 1)
            ratio_1_to_almost0 = 1.0 - (layer_id / n_layer)
            decay_speed = torch.ones(attn_sz)
            for h in range(attn_sz):
                decay_speed[h] = -5 + 8 * (h / (attn_sz - 1)) ** (0.7 + 1.3 * ratio_0_to_1)
            self.time_decay = nn.Parameter(decay_speed)
            zigzag = torch.tensor([(i + 1) % 3 - 1 for i in range(attn_sz)]) * 0.5
            self.time_first = nn.Parameter(torch.ones(attn_sz) * math.log(0.3) + zigzag)
            x = torch.ones(1, 1, n_embd)
            for i in range(n_embd):
                x[0, 0, i] = i / n_embd
            self.time_mix_k = nn.Parameter(torch.pow(x, ratio_1_to_almost0))
            self.time_mix_v = nn.Parameter(torch.pow(x, ratio_1_to_almost0) + 0.3 * ratio_0_to_1)
            self.time_mix_r = nn.Parameter(torch.pow(x, 0.5 * ratio_1_to_almost0))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key = nn.Linear(n_embd, attn_sz, bias=False)
        self.value = nn.Linear(n_embd, attn_sz, bias=False)
        self.receptance = nn.Linear(n_embd, attn_sz, bias=False)
        self.output = nn.Linear(attn_sz, n_embd, bias=False)

    def jit_func(self, x):
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xv = x * self.time_mix_v + xx * (1 - self.time_mix_v)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        k = self.key(xk)
        v = self.value(xv)
        r = self.receptance(xr)
        sr = torch.sigmoid(r)
        return sr, k, v

    def forward(self, x):
        B, T, C = x.size()
        sr, k, v = self.jit_func(x)
        rwkv = sr * run_wkv(self.time_decay, self.time_first, k, v)
        rwkv = self.output(rwkv)
        return rwkv


class RWKV_ChannelMix(nn.Module):
    def __init__(self, layer_id, n_embd=16):
        super().__init__()
        self.layer_id = layer_id
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix_k = nn.Parameter(torch.rand(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.rand(1, 1, n_embd))
        hidden_sz = 4 * n_embd
        self.key = nn.Linear(n_embd, hidden_sz, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(hidden_sz, n_embd, bias=False)

    def forward(self, x):
        xx = self.time_shift(x)
        xk = x * self.time_mix_k + xx * (1 - self.time_mix_k)
        xr = x * self.time_mix_r + xx * (1 - self.time_mix_r)
        k = self.key(xk)
        k = torch.square(torch.relu(k))
        kv = self.value(k)
        rkv = torch.sigmoid(self.receptance(xr)) * kv
        return rkv


class RWKVBlock(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.layer_id = layer_id
        self.ln1 = nn.LayerNorm(16)
        self.ln2 = nn.LayerNorm(16)
        if self.layer_id == 0:
            self.ln0 = nn.LayerNorm(16)
        self.att = RWKV_TimeMix(layer_id)
        self.ffn = RWKV_ChannelMix(layer_id)

    def forward(self, x):
        if self.layer_id == 0:
            x = self.ln0(x)
        x = x + self.att(self.ln1(x))
        x = x + self.ffn(self.ln2(x))
        return x


class RWKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.blocks = nn.Sequential(*[RWKVBlock(i) for i in range(2)])
        self.ln_out = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, idx, targets=None):
        x = self.emb(idx)
        x = self.blocks(x)
        x = self.ln_out(x)
        return self.head(x)


# The time mix is a recurrence: a mixer. The channel mix reads the token and the one before, and is
# gated by `receptance` behind `value`: an ffn whose x is no module's input.
RWKV_STACK = Stack(
    (0, 1),
    {"mixer.norm": "blocks.{i}.ln1.weight"} | ffn("blocks.{i}.ffn.key", "blocks.{i}.ffn.value", "blocks.{i}.ln2"),
    {"ffn.x": "blocks.{i}.ffn", "ffn.h": "blocks.{i}.ffn"},
    optional={"ffn.gate": "blocks.{i}.ffn.receptance.weight"},
)


# recurrentgemma (Griffin), torch
class GRMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.width, self.eps = width, eps
        self.scale = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x):
        var = torch.mean(torch.square(x), axis=-1, keepdims=True)
        normed_x = x * torch.rsqrt(var + self.eps)
        scale = torch.reshape(self.scale, [1 for _ in range(x.ndim - 1)] + [-1])
        return normed_x * (scale + 1)


class BlockDiagonalLinear(nn.Module):
    def __init__(self, width, num_blocks):
        super().__init__()
        self.width, self.num_blocks = width, num_blocks
        self.block_width = width // num_blocks
        self.w = nn.Parameter(torch.randn(num_blocks, self.block_width, self.block_width) * 0.3)
        self.b = nn.Parameter(torch.zeros(num_blocks, self.block_width))

    def forward(self, x):
        b, t, _ = x.shape
        x = x.view(b, t, self.num_blocks, -1)
        y = torch.einsum("... h i, h i j -> ... h j", x, self.w) + self.b
        return y.reshape(b, t, self.width)


class RGLRU(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.a_param = nn.Parameter(torch.randn(width))
        self.input_gate = BlockDiagonalLinear(width, num_heads)
        self.a_gate = BlockDiagonalLinear(width, num_heads)

    def __call__(self, x, segment_pos):
        return super().__call__(x, segment_pos)

    def forward(self, x, segment_pos):
        bs, length, _ = x.shape
        assert segment_pos.shape == (bs, length)
        reset = segment_pos == 0
        gate_x = torch.sigmoid(self.input_gate(x))
        gate_a = torch.sigmoid(self.a_gate(x))
        log_a = -8.0 * gate_a * nn.functional.softplus(self.a_param)
        a = torch.exp(log_a)
        a_square = torch.exp(2 * log_a)
        gated_x = x * gate_x
        multiplier = torch.sqrt(1 - a_square + 1e-6)
        multiplier = reset[..., None] + ~reset[..., None] * multiplier
        normalized_x = gated_x * multiplier.type(x.dtype)
        a = a * ~reset[..., None]
        h_t = torch.zeros(bs, x.shape[-1], dtype=x.dtype)
        y = torch.zeros_like(x)
        for t in range(length):
            y[:, t] = a[:, t] * h_t + normalized_x[:, t]
            h_t = y[:, t].clone()
        return y


class GConv1D(nn.Module):
    def __init__(self, width, temporal_width=4):
        super().__init__()
        self.width, self.temporal_width = width, temporal_width
        self.w = nn.Parameter(torch.randn(temporal_width, width) * 0.3)
        self.b = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        output_len = x.shape[1]
        convolution_output = 0.0
        for temporal_shift in range(self.temporal_width):
            start_idx = max(temporal_shift, 0)
            x_window = x[:, : max(output_len - start_idx, 0)]
            x_window = nn.functional.pad(x_window, [0, 0, output_len - x_window.shape[1], 0])
            convolution_output = (
                convolution_output + x_window * self.w[self.temporal_width - temporal_shift - 1][None, None, :]
            )
        return convolution_output + self.b[None, None]


def g_gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


class RecurrentBlock(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.linear_y = nn.Linear(width, width)
        self.linear_x = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)
        self.conv_1d = GConv1D(width)
        self.rg_lru = RGLRU(width, heads)

    def forward(self, x, segment_pos):
        y = self.linear_y(x)
        y = g_gelu(y)
        x = self.linear_x(x)
        x = self.conv_1d(x)
        x = self.rg_lru(x, segment_pos)
        x = x * y
        x = self.linear_out(x)
        return x


class Einsum(nn.Module):
    def __init__(self, w_shape, b_shape, eqn):
        super().__init__()
        self.w = nn.Parameter(torch.randn(w_shape) * 0.2)
        self.b = nn.Parameter(torch.zeros(b_shape))
        self.eqn = eqn

    def forward(self, x):
        return torch.einsum(self.eqn, x, self.w) + self.b


class GMLP(nn.Module):
    def __init__(self, width=16, expanded_width=24):
        super().__init__()
        self.ffw_up = Einsum((2, width, expanded_width), (2, 1, 1, expanded_width), "...td,cdD->c...tD")
        self.ffw_down = nn.Linear(expanded_width, width)

    def forward(self, x):
        out = self.ffw_up(x)
        gate_value = g_gelu(out[0])
        activations = gate_value * out[1]
        return self.ffw_down(activations)


class LocalAttentionBlock(nn.Module):
    def __init__(self, width=16, num_heads=2, window=3):
        super().__init__()
        self.num_heads, self.head_dim, self.window_size = num_heads, width // num_heads, window
        self.proj_q = nn.Linear(width, width, bias=False)
        self.proj_k = nn.Linear(width, self.head_dim, bias=False)
        self.proj_v = nn.Linear(width, self.head_dim, bias=False)
        self.proj_final = nn.Linear(width, width, bias=True)

    def forward(self, x, segment_pos):
        b, t, _ = x.shape
        queries = self.proj_q(x).reshape(b, t, self.num_heads, self.head_dim)
        keys = self.proj_k(x).reshape(b, t, 1, self.head_dim)
        values = self.proj_v(x).reshape(b, t, 1, self.head_dim)
        diff = segment_pos[:, :, None] - segment_pos[:, None, :]
        attn_mask = (diff >= 0) & (diff < self.window_size)
        logits = torch.einsum("bthk,bsik->bhts", queries, keys)
        logits = logits * (self.head_dim**-0.5)
        masked_logits = torch.where(
            attn_mask[:, None], logits, torch.tensor(torch.finfo(torch.float32).min, dtype=logits.dtype)
        )
        probs = nn.functional.softmax(masked_logits, dim=-1).type(x.dtype)
        encoded = torch.einsum("bhts,bsik->bthk", probs, values)
        encoded = encoded.reshape(b, t, -1)
        return self.proj_final(encoded)


class ResidualBlock(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.temporal_pre_norm = GRMSNorm(16)
        if kind == "recurrent":
            self.recurrent_block = RecurrentBlock()
        else:
            self.attention_block = LocalAttentionBlock()
        self.channel_pre_norm = GRMSNorm(16)
        self.mlp_block = GMLP()

    @property
    def temporal_block(self):
        return self.recurrent_block if self.kind == "recurrent" else self.attention_block

    def forward(self, x, segment_pos):
        raw_x = x
        inputs_normalized = self.temporal_pre_norm(raw_x)
        x = self.temporal_block(inputs_normalized, segment_pos)
        residual = x + raw_x
        x = self.channel_pre_norm(residual)
        x = self.mlp_block(x)
        x = x + residual
        return x


class Griffin(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedder = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([ResidualBlock(k) for k in ("recurrent", "recurrent", "attention")])
        self.final_norm = GRMSNorm(16)

    def forward(self, tokens):
        segment_pos = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
        x = self.embedder(tokens)
        for block in self.blocks:
            x = block(x, segment_pos)
        x = self.final_norm(x)
        logits = x @ self.embedder.weight.T
        return torch.tanh(logits / 30.0) * 30.0


GRIFFIN_FFN = {
    "ffn.gate": "blocks.{i}.mlp_block.ffw_up.w@0.T",
    "ffn.up": "blocks.{i}.mlp_block.ffw_up.w@1.T",
    "ffn.down": "blocks.{i}.mlp_block.ffw_down.weight",
    "ffn.norm": "blocks.{i}.channel_pre_norm.scale",
}


GRIFFIN_FFN_STATES = {"ffn.x": "blocks.{i}.mlp_block"}


GRIFFIN = (
    Stack((0, 1), GRIFFIN_FFN | {"mixer.norm": "blocks.{i}.temporal_pre_norm.scale"}, GRIFFIN_FFN_STATES),
    Stack(
        (2,),
        GRIFFIN_FFN
        | attention(
            q="blocks.{i}.attention_block.proj_q",
            k="blocks.{i}.attention_block.proj_k",
            v="blocks.{i}.attention_block.proj_v",
            o="blocks.{i}.attention_block.proj_final",
            norm="blocks.{i}.temporal_pre_norm.scale!",
        ),
        GRIFFIN_FFN_STATES,
    ),
)


CASES = (
    hand_written("griffin", Griffin, tokens("tokens"), *GRIFFIN),
    hand_written("rwkv4", RWKV, tokens("idx"), RWKV_STACK),
)
