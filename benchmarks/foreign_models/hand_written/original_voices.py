"""Dia (products over several axes), VITS (1D convolutions), and Whisper's own code."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import Roles, attention, both, ffn, hand_written, tokens


# nari-labs/dia dia/layers.py
def _normalize_axes(axes, ndim):
    return tuple(ax if ax >= 0 else ndim + ax for ax in axes)


class DenseGeneral(nn.Module):
    def __init__(self, in_shapes, out_features, axis=(-1,)):
        super().__init__()
        self.in_shapes = in_shapes
        self.out_features = out_features
        self.axis = axis
        self.kernel_shape = self.in_shapes + self.out_features
        self.weight = nn.Parameter(torch.randn(self.kernel_shape) * 0.2)

    def forward(self, inputs):
        norm_axis = _normalize_axes(self.axis, inputs.ndim)
        kernel_contract_axes = tuple(range(len(norm_axis)))
        output = torch.tensordot(
            inputs.to(self.weight.dtype),
            self.weight,
            dims=(norm_axis, kernel_contract_axes),
        ).to(inputs.dtype)
        return output


class MlpBlock(nn.Module):
    def __init__(self, embed_dim, intermediate_dim):
        super().__init__()
        self.wi_fused = DenseGeneral(in_shapes=(embed_dim,), out_features=(2, intermediate_dim), axis=(-1,))
        self.wo = DenseGeneral(in_shapes=(intermediate_dim,), out_features=(embed_dim,), axis=(-1,))

    def forward(self, x):
        fused_x = self.wi_fused(x)
        gate = fused_x[..., 0, :]
        up = fused_x[..., 1, :]
        hidden = torch.mul(F.silu(gate), up)
        output = self.wo(hidden)
        return output


class RotaryEmbedding(nn.Module):
    def __init__(self, embedding_dims, min_timescale=1, max_timescale=10000):
        super().__init__()
        half_embedding_dim = embedding_dims // 2
        fraction = (2.0 * torch.arange(0, half_embedding_dim)) / embedding_dims
        timescale = (min_timescale * (max_timescale / min_timescale) ** fraction).to(torch.float32)
        self.register_buffer("timescale", timescale, persistent=False)

    def forward(self, inputs, position):
        position = position.unsqueeze(-1).unsqueeze(-1)
        sinusoid_inp = position / self.timescale
        sin = torch.sin(sinusoid_inp)
        cos = torch.cos(sinusoid_inp)
        first_half, second_half = torch.chunk(inputs, 2, dim=-1)
        first_part = first_half * cos - second_half * sin
        second_part = second_half * cos + first_half * sin
        return torch.cat((first_part, second_part), dim=-1)


class DiaAttention(nn.Module):
    def __init__(self, q_embed_dim, kv_embed_dim, num_query_heads, num_kv_heads, head_dim, is_cross_attn=False):
        super().__init__()
        self.num_query_heads, self.num_kv_heads = num_query_heads, num_kv_heads
        self.head_dim, self.is_cross_attn = head_dim, is_cross_attn
        self.num_gqa_groups = num_query_heads // num_kv_heads
        self.q_proj = DenseGeneral((q_embed_dim,), (num_query_heads, head_dim), axis=(-1,))
        self.k_proj = DenseGeneral((kv_embed_dim,), (num_kv_heads, head_dim), axis=(-1,))
        self.v_proj = DenseGeneral((kv_embed_dim,), (num_kv_heads, head_dim), axis=(-1,))
        self.o_proj = DenseGeneral((num_query_heads, head_dim), (q_embed_dim,), axis=(-2, -1))
        self.rotary_emb = RotaryEmbedding(head_dim)

    def forward(self, Xq, Xkv, q_positions, kv_positions=None, attn_mask=None, is_causal=False):
        if kv_positions is None:
            kv_positions = q_positions
        original_dtype = Xq.dtype
        Xq_BxTxNxH = self.q_proj(Xq)
        Xq_BxTxNxH = self.rotary_emb(Xq_BxTxNxH, position=q_positions)
        Xq_BxNxTxH = Xq_BxTxNxH.transpose(1, 2)
        Xk_BxSxKxH = self.k_proj(Xkv)
        Xv_BxSxKxH = self.v_proj(Xkv)
        Xk_BxSxKxH = self.rotary_emb(Xk_BxSxKxH, position=kv_positions)
        Xk_BxKxSxH = Xk_BxSxKxH.transpose(1, 2)
        Xv_BxKxSxH = Xv_BxSxKxH.transpose(1, 2)
        attn_output = F.scaled_dot_product_attention(
            Xq_BxNxTxH,
            Xk_BxKxSxH,
            Xv_BxKxSxH,
            attn_mask=attn_mask,
            scale=1.0,
            enable_gqa=self.num_gqa_groups > 1,
            is_causal=is_causal,
        )
        attn_output = attn_output.transpose(1, 2).contiguous()
        output = self.o_proj(attn_output)
        return output.to(original_dtype)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre_sa_norm = nn.RMSNorm(16, eps=1e-5)
        self.self_attention = DiaAttention(16, 16, 2, 2, 8)
        self.post_sa_norm = nn.RMSNorm(16, eps=1e-5)
        self.mlp = MlpBlock(16, 24)

    def forward(self, x, positions):
        residual = x
        x_norm = self.pre_sa_norm(x)
        sa_out = self.self_attention(Xq=x_norm, Xkv=x_norm, q_positions=positions, kv_positions=positions)
        x = residual + sa_out
        residual = x
        x_norm = self.post_sa_norm(x)
        mlp_out = self.mlp(x_norm)
        return residual + mlp_out


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre_sa_norm = nn.RMSNorm(16, eps=1e-5)
        self.pre_ca_norm = nn.RMSNorm(16, eps=1e-5)
        self.pre_mlp_norm = nn.RMSNorm(16, eps=1e-5)
        self.self_attention = DiaAttention(16, 16, 4, 2, 8)
        self.cross_attention = DiaAttention(16, 16, 2, 2, 8, is_cross_attn=True)
        self.mlp = MlpBlock(16, 24)

    def forward(self, x, enc_out, positions, enc_positions):
        residual = x
        x_norm = self.pre_sa_norm(x)
        sa_out = self.self_attention(Xq=x_norm, Xkv=x_norm, q_positions=positions, is_causal=True)
        x = residual + sa_out
        residual = x
        x_norm = self.pre_ca_norm(x)
        ca_out = self.cross_attention(Xq=x_norm, Xkv=enc_out, q_positions=positions, kv_positions=enc_positions)
        x = residual + ca_out
        residual = x
        x_norm = self.pre_mlp_norm(x)
        mlp_out = self.mlp(x_norm)
        return residual + mlp_out


class Dia(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Embedding(50, 16)
        self.embeddings = nn.ModuleList([nn.Embedding(40, 16) for _ in range(3)])
        self.encoder_layers = nn.ModuleList([EncoderLayer() for _ in range(2)])
        self.encoder_norm = nn.RMSNorm(16)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(2)])
        self.norm = nn.RMSNorm(16)
        self.logits_dense = DenseGeneral((16,), (3, 40), axis=(-1,))

    def forward(self, text, audio):
        enc_positions = torch.arange(text.shape[1])[None]
        positions = torch.arange(audio.shape[1])[None]
        enc = self.text(text)
        for layer in self.encoder_layers:
            enc = layer(enc, enc_positions)
        enc = self.encoder_norm(enc)
        x = None
        for i in range(3):
            channel_embed = self.embeddings[i](audio[..., i])
            x = channel_embed if x is None else x + channel_embed
        for layer in self.layers:
            x = layer(x, enc, positions, enc_positions)
        x = self.norm(x)
        return self.logits_dense(x)


# jaywalnut310/vits attentions.py
class VitsLayerNorm(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        x = x.transpose(1, -1)
        x = F.layer_norm(x, (self.channels,), self.gamma, self.beta, self.eps)
        return x.transpose(1, -1)


class VitsAttention(nn.Module):
    def __init__(self, channels, out_channels, n_heads, p_dropout=0.0, window_size=4):
        super().__init__()
        self.channels, self.n_heads, self.window_size = channels, n_heads, window_size
        self.attn = None
        self.k_channels = channels // n_heads
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, out_channels, 1)
        self.drop = nn.Dropout(p_dropout)
        rel_stddev = self.k_channels**-0.5
        self.emb_rel_k = nn.Parameter(torch.randn(1, window_size * 2 + 1, self.k_channels) * rel_stddev)
        self.emb_rel_v = nn.Parameter(torch.randn(1, window_size * 2 + 1, self.k_channels) * rel_stddev)

    def forward(self, x, c, attn_mask=None):
        q = self.conv_q(x)
        k = self.conv_k(c)
        v = self.conv_v(c)
        x, self.attn = self.attention(q, k, v, mask=attn_mask)
        x = self.conv_o(x)
        return x

    def attention(self, query, key, value, mask=None):
        # reshape [b, d, t] -> [b, n_h, t, d_k]
        b, d, t_s, t_t = (*key.size(), query.size(2))
        query = query.view(b, self.n_heads, self.k_channels, t_t).transpose(2, 3)
        key = key.view(b, self.n_heads, self.k_channels, t_s).transpose(2, 3)
        value = value.view(b, self.n_heads, self.k_channels, t_s).transpose(2, 3)
        scores = torch.matmul(query / math.sqrt(self.k_channels), key.transpose(-2, -1))
        if self.window_size is not None:
            assert t_s == t_t, "Relative attention is only available for self-attention."
            key_relative_embeddings = self._get_relative_embeddings(self.emb_rel_k, t_s)
            rel_logits = self._matmul_with_relative_keys(query / math.sqrt(self.k_channels), key_relative_embeddings)
            scores_local = self._relative_position_to_absolute_position(rel_logits)
            scores = scores + scores_local
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e4)
        p_attn = F.softmax(scores, dim=-1)  # [b, n_h, t_t, t_s]
        p_attn = self.drop(p_attn)
        output = torch.matmul(p_attn, value)
        if self.window_size is not None:
            relative_weights = self._absolute_position_to_relative_position(p_attn)
            value_relative_embeddings = self._get_relative_embeddings(self.emb_rel_v, t_s)
            output = output + self._matmul_with_relative_values(relative_weights, value_relative_embeddings)
        output = output.transpose(2, 3).contiguous().view(b, d, t_t)  # [b, n_h, t_t, d_k] -> [b, d, t_t]
        return output, p_attn

    def _matmul_with_relative_values(self, x, y):
        return torch.matmul(x, y.unsqueeze(0))

    def _matmul_with_relative_keys(self, x, y):
        return torch.matmul(x, y.unsqueeze(0).transpose(-2, -1))

    def _get_relative_embeddings(self, relative_embeddings, length):
        pad_length = max(length - (self.window_size + 1), 0)
        slice_start_position = max((self.window_size + 1) - length, 0)
        slice_end_position = slice_start_position + 2 * length - 1
        if pad_length > 0:
            padded_relative_embeddings = F.pad(relative_embeddings, [0, 0, pad_length, pad_length, 0, 0])
        else:
            padded_relative_embeddings = relative_embeddings
        return padded_relative_embeddings[:, slice_start_position:slice_end_position]

    def _relative_position_to_absolute_position(self, x):
        batch, heads, length, _ = x.size()
        x = F.pad(x, [0, 1, 0, 0, 0, 0, 0, 0])
        x_flat = x.view([batch, heads, length * 2 * length])
        x_flat = F.pad(x_flat, [0, length - 1, 0, 0, 0, 0])
        return x_flat.view([batch, heads, length + 1, 2 * length - 1])[:, :, :length, length - 1 :]

    def _absolute_position_to_relative_position(self, x):
        batch, heads, length, _ = x.size()
        x = F.pad(x, [0, length - 1, 0, 0, 0, 0, 0, 0])
        x_flat = x.view([batch, heads, length**2 + length * (length - 1)])
        x_flat = F.pad(x_flat, [length, 0, 0, 0, 0, 0])
        return x_flat.view([batch, heads, length, 2 * length])[:, :, :, 1:]


class VitsFFN(nn.Module):
    def __init__(self, in_channels, out_channels, filter_channels, kernel_size, p_dropout=0.0):
        super().__init__()
        self.kernel_size = kernel_size
        self.conv_1 = nn.Conv1d(in_channels, filter_channels, kernel_size)
        self.conv_2 = nn.Conv1d(filter_channels, out_channels, kernel_size)
        self.drop = nn.Dropout(p_dropout)

    def forward(self, x, x_mask):
        x = self.conv_1(self._same_padding(x * x_mask))
        x = torch.relu(x)
        x = self.drop(x)
        x = self.conv_2(self._same_padding(x * x_mask))
        return x * x_mask

    def _same_padding(self, x):
        if self.kernel_size == 1:
            return x
        pad_l = (self.kernel_size - 1) // 2
        pad_r = self.kernel_size // 2
        return F.pad(x, [pad_l, pad_r, 0, 0, 0, 0])


class VitsEncoder(nn.Module):
    def __init__(self, hidden_channels, filter_channels, n_heads, n_layers, kernel_size=3, p_dropout=0.0):
        super().__init__()
        self.n_layers = n_layers
        self.drop = nn.Dropout(p_dropout)
        self.attn_layers = nn.ModuleList()
        self.norm_layers_1 = nn.ModuleList()
        self.ffn_layers = nn.ModuleList()
        self.norm_layers_2 = nn.ModuleList()
        for i in range(self.n_layers):
            self.attn_layers.append(VitsAttention(hidden_channels, hidden_channels, n_heads))
            self.norm_layers_1.append(VitsLayerNorm(hidden_channels))
            self.ffn_layers.append(VitsFFN(hidden_channels, hidden_channels, filter_channels, kernel_size))
            self.norm_layers_2.append(VitsLayerNorm(hidden_channels))

    def forward(self, x, x_mask):
        attn_mask = x_mask.unsqueeze(2) * x_mask.unsqueeze(-1)
        x = x * x_mask
        for i in range(self.n_layers):
            y = self.attn_layers[i](x, x, attn_mask)
            y = self.drop(y)
            x = self.norm_layers_1[i](x + y)
            y = self.ffn_layers[i](x, x_mask)
            y = self.drop(y)
            x = self.norm_layers_2[i](x + y)
        x = x * x_mask
        return x


class VitsTextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.encoder = VitsEncoder(16, 24, 2, 2)
        self.proj = nn.Conv1d(16, 8 * 2, 1)

    def forward(self, x):
        x = self.emb(x) * math.sqrt(16)
        x = torch.transpose(x, 1, -1)  # [b, h, t]
        x_mask = torch.ones_like(x[:, :1])
        x = self.encoder(x * x_mask, x_mask)
        stats = self.proj(x) * x_mask
        m, logs = torch.split(stats, 8, dim=1)
        return m, logs


def dia_attention(at: str, norm: str, kind: str = "") -> Roles:
    """Weights (in, heads, features), and (heads, features, out)."""
    step = f"attn.{kind}" if kind else "attn"
    table = {f"{step}.{role}": f"{at}.{role}_proj.weight(d h k -> h k | d)" for role in "qkv"}
    return table | {f"{step}.o": f"{at}.o_proj.weight(h k d -> d | h k)", f"{step}.norm": f"{norm}.weight"}


def dia_mlp(at: str, norm: str) -> Roles:
    fused = f"{at}.wi_fused.weight(d n f -> n f | d)"
    table = {"ffn.gate": f"{fused}[0:24]", "ffn.up": f"{fused}[24:48]", "ffn.down": f"{at}.wo.weight.T"}
    return table | {"ffn.norm": f"{norm}.weight"}


DIA = (
    Stack(
        (0, 1),
        dia_attention("encoder_layers.{i}.self_attention", "encoder_layers.{i}.pre_sa_norm")
        | dia_mlp("encoder_layers.{i}.mlp", "encoder_layers.{i}.post_sa_norm"),
    ),
    Stack(
        (0, 1),
        both(
            dia_attention("layers.{i}.self_attention", "layers.{i}.pre_sa_norm", "self"),
            dia_attention("layers.{i}.cross_attention", "layers.{i}.pre_ca_norm", "cross"),
            dia_mlp("layers.{i}.mlp", "layers.{i}.pre_mlp_norm"),
        ),
    ),
)
VITS = Stack(
    (0, 1),
    attention(
        **{role: f"encoder.attn_layers.{{i}}.conv_{role}" for role in "qkvo"}, norm="encoder.norm_layers_1.{i}.gamma!"
    )
    | ffn("encoder.ffn_layers.{i}.conv_1", "encoder.ffn_layers.{i}.conv_2", "encoder.norm_layers_2.{i}.gamma!"),
    {"ffn.x": "encoder.ffn_layers.{i}:nchw", "ffn.h": "encoder.ffn_layers.{i}:nchw"},
)

CASES = (
    hand_written(
        "dia",
        Dia,
        lambda: {"text": torch.randint(1, 50, (2, 6)), "audio": torch.randint(1, 40, (2, 5, 3))},
        *DIA,
    ),
    hand_written("vits_encoder", VitsTextEncoder, tokens(), VITS),
)
