"""xLSTM: one Linear, of which small matrices compute queries, keys and values."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import glu, hand_written, sequence


# xLSTM: mLSTM block (parallel), NX-AI style
class MultiHeadLayerNorm(nn.Module):
    def __init__(self, ndim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ndim))
        self.eps = 1e-5

    @property
    def weight_proxy(self):
        return 1.0 + self.weight

    def forward(self, input):
        assert input.dim() == 4, "Input must be 4D tensor (B, NH, S, DH)"
        B, NH, S, DH = input.shape
        gn_in_1 = input.transpose(1, 2)
        gn_in_2 = gn_in_1.reshape(B * S, NH * DH)
        out = F.group_norm(gn_in_2, num_groups=NH, weight=self.weight_proxy, bias=None, eps=self.eps)
        out = out.view(B, S, NH, DH).transpose(1, 2)
        return out


class LinearHeadwiseExpand(nn.Module):
    def __init__(self, in_features, num_heads):
        super().__init__()
        self.num_heads = num_heads
        out_features_per_head = in_features // num_heads
        self.weight = nn.Parameter(torch.randn(num_heads, out_features_per_head, in_features // num_heads) * 0.3)

    def forward(self, x):
        shape = x.shape
        x = x.view(*shape[:-1], self.num_heads, -1)
        x = torch.einsum("...hd,hod->...ho", x, self.weight)
        x = x.reshape(*shape[:-1], -1)
        return x


def parallel_stabilized_simple(queries, keys, values, igate_preact, fgate_preact, eps=1e-6):
    B, NH, S, DH = queries.shape
    _dtype, _device = queries.dtype, queries.device
    log_fgates = torch.nn.functional.logsigmoid(fgate_preact)
    ltr = torch.tril(torch.ones((S, S), dtype=torch.bool, device=_device))
    log_fgates_cumsum = torch.cat(
        [torch.zeros((B, NH, 1, 1), dtype=_dtype, device=_device), torch.cumsum(log_fgates, dim=-2)], dim=-2
    )
    rep_log_fgates_cumsum = log_fgates_cumsum.repeat(1, 1, 1, S + 1)
    _log_fg_matrix = rep_log_fgates_cumsum - rep_log_fgates_cumsum.transpose(-2, -1)
    log_fg_matrix = torch.where(ltr, _log_fg_matrix[:, :, 1:, 1:], -float("inf"))
    log_D_matrix = log_fg_matrix + igate_preact.transpose(-2, -1)
    max_log_D, _ = torch.max(log_D_matrix, dim=-1, keepdim=True)
    log_D_matrix_stabilized = log_D_matrix - max_log_D
    D_matrix = torch.exp(log_D_matrix_stabilized)
    keys_scaled = keys / math.sqrt(DH)
    qk_matrix = queries @ keys_scaled.transpose(-2, -1)
    C_matrix = qk_matrix * D_matrix
    normalizer = torch.maximum(C_matrix.sum(dim=-1, keepdim=True).abs(), torch.exp(-max_log_D))
    C_matrix_normalized = C_matrix / (normalizer + eps)
    h_tilde_state = C_matrix_normalized @ values
    return h_tilde_state


class mLSTMLayer(nn.Module):
    def __init__(self, d=16, inner=32, heads=2):
        super().__init__()
        self.num_heads = heads
        self.proj_up = nn.Linear(d, 2 * inner, bias=False)
        self.inner = inner
        self.q_proj, self.k_proj, self.v_proj = (LinearHeadwiseExpand(inner, 8) for _ in range(3))
        self.conv1d = nn.Conv1d(inner, inner, kernel_size=4, padding=3, groups=inner)
        self.conv_act_fn = nn.SiLU()
        self.igate = nn.Linear(3 * inner, heads)
        self.fgate = nn.Linear(3 * inner, heads)
        self.outnorm = MultiHeadLayerNorm(inner)
        self.learnable_skip = nn.Parameter(torch.ones(inner))
        self.proj_down = nn.Linear(inner, d, bias=False)
        self.ogate_act_fn = nn.SiLU()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        B, S, _ = x.shape
        x_inner = self.proj_up(x)
        x_mlstm, z = torch.split(x_inner, split_size_or_sections=self.inner, dim=-1)
        x_mlstm_conv = self.conv1d(x_mlstm.transpose(1, 2))[..., :S].transpose(1, 2)
        x_mlstm_conv_act = self.conv_act_fn(x_mlstm_conv)
        q = self.q_proj(x_mlstm_conv_act)
        k = self.k_proj(x_mlstm_conv_act)
        v = self.v_proj(x_mlstm)
        if_gate_input = torch.cat([q, k, v], dim=-1)
        q = q.view(B, S, self.num_heads, -1).transpose(1, 2)
        k = k.view(B, S, self.num_heads, -1).transpose(1, 2)
        v = v.view(B, S, self.num_heads, -1).transpose(1, 2)
        igate_preact = self.igate(if_gate_input).transpose(-1, -2).unsqueeze(-1)
        fgate_preact = self.fgate(if_gate_input).transpose(-1, -2).unsqueeze(-1)
        h_state = parallel_stabilized_simple(q, k, v, igate_preact, fgate_preact)
        h_state_norm = self.outnorm(h_state)
        h_tilde_state = h_state_norm.transpose(1, 2).reshape(B, S, -1)
        h_tilde_state_skip = h_tilde_state + (self.learnable_skip * x_mlstm_conv_act)
        h_state = h_tilde_state_skip * self.ogate_act_fn(z)
        y = self.dropout(self.proj_down(h_state))
        return y


class xLSTMBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.xlstm_norm = nn.LayerNorm(16, bias=False)
        self.xlstm = mLSTMLayer()
        self.ffn_norm = nn.LayerNorm(16, bias=False)
        self.ffn_up = nn.Linear(16, 48, bias=False)
        self.ffn_down = nn.Linear(24, 16, bias=False)

    def forward(self, x, **kwargs):
        x = x + self.xlstm(self.xlstm_norm(x), **kwargs)
        gate, up = self.ffn_up(self.ffn_norm(x)).split(24, dim=-1)
        x = x + self.ffn_down(F.gelu(gate) * up)
        return x


class xLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([xLSTMBlock() for _ in range(2)])
        self.post_blocks_norm = nn.LayerNorm(16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.post_blocks_norm(x)


# mLSTM: scores of queries and keys with decays, a linear attention. Its projections are matrices of
# 4 features each; whether these are Linears q, k and v is a matter of reading.
XLSTM = Stack(
    (0, 1),
    glu("blocks.{i}.ffn_up", 24, "blocks.{i}.ffn_down", "blocks.{i}.ffn_norm", gate_first=True),
    {"attn.x": None, "attn.h": None},
    optional={
        "mixer.norm": ("blocks.{i}.xlstm_norm.weight", "blocks.{i}.xlstm.outnorm.weight"),
        "attn.norm": ("blocks.{i}.xlstm_norm.weight", "blocks.{i}.xlstm.outnorm.weight"),
        "attn.o": "blocks.{i}.xlstm.proj_down.weight",
        "attn.q": "blocks.{i}.xlstm.q_proj.weight",
        "attn.k": "blocks.{i}.xlstm.k_proj.weight",
        "attn.v": "blocks.{i}.xlstm.v_proj.weight",
    },
)


CASES = (hand_written("xlstm", xLSTM, sequence(), XLSTM),)
