"""Speech: ESPnet's conformer, VALL-E: layers that may get tuples."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, both, ffn, hand_written, packed


# ESPnet conformer
class EspMultiHeadedAttention(nn.Module):
    def __init__(self, n_head, n_feat, dropout_rate):
        super().__init__()
        assert n_feat % n_head == 0
        self.d_k = n_feat // n_head
        self.h = n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout_rate)

    def forward_qkv(self, query, key, value):
        n_batch = query.size(0)
        q = self.linear_q(query).view(n_batch, -1, self.h, self.d_k)
        k = self.linear_k(key).view(n_batch, -1, self.h, self.d_k)
        v = self.linear_v(value).view(n_batch, -1, self.h, self.d_k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return q, k, v

    def forward_attention(self, value, scores, mask):
        n_batch = value.size(0)
        if mask is not None:
            mask = mask.unsqueeze(1).eq(0)
            min_value = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(mask, min_value)
            self.attn = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        else:
            self.attn = torch.softmax(scores, dim=-1)
        p_attn = self.dropout(self.attn)
        x = torch.matmul(p_attn, value)
        x = x.transpose(1, 2).contiguous().view(n_batch, -1, self.h * self.d_k)
        return self.linear_out(x)


class RelPositionMultiHeadedAttention(EspMultiHeadedAttention):
    def __init__(self, n_head, n_feat, dropout_rate, zero_triu=False):
        super().__init__(n_head, n_feat, dropout_rate)
        self.zero_triu = zero_triu
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u = nn.Parameter(torch.Tensor(self.h, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.Tensor(self.h, self.d_k))
        torch.nn.init.xavier_uniform_(self.pos_bias_u)
        torch.nn.init.xavier_uniform_(self.pos_bias_v)

    def rel_shift(self, x):
        zero_pad = torch.zeros((*x.size()[:3], 1), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=-1)
        x_padded = x_padded.view(*x.size()[:2], x.size(3) + 1, x.size(2))
        x = x_padded[:, :, 1:].view_as(x)[:, :, :, : x.size(-1) // 2 + 1]
        if self.zero_triu:
            ones = torch.ones((x.size(2), x.size(3)), device=x.device)
            x = x * torch.tril(ones, x.size(3) - x.size(2))[None, None, :, :]
        return x

    def forward(self, query, key, value, pos_emb, mask):
        q, k, v = self.forward_qkv(query, key, value)
        q = q.transpose(1, 2)
        n_batch_pos = pos_emb.size(0)
        p = self.linear_pos(pos_emb).view(n_batch_pos, -1, self.h, self.d_k)
        p = p.transpose(1, 2)
        q_with_bias_u = (q + self.pos_bias_u).transpose(1, 2)
        q_with_bias_v = (q + self.pos_bias_v).transpose(1, 2)
        matrix_ac = torch.matmul(q_with_bias_u, k.transpose(-2, -1))
        matrix_bd = torch.matmul(q_with_bias_v, p.transpose(-2, -1))
        matrix_bd = self.rel_shift(matrix_bd)
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)
        return self.forward_attention(v, scores, mask)


class ConvolutionModule(nn.Module):
    def __init__(self, channels, kernel_size, activation=nn.ReLU(), bias=True):
        super().__init__()
        assert (kernel_size - 1) % 2 == 0
        self.pointwise_conv1 = nn.Conv1d(channels, 2 * channels, kernel_size=1, stride=1, padding=0, bias=bias)
        self.depthwise_conv = nn.Conv1d(
            channels, channels, kernel_size, stride=1, padding=(kernel_size - 1) // 2, groups=channels, bias=bias
        )
        self.norm = nn.BatchNorm1d(channels)
        self.pointwise_conv2 = nn.Conv1d(channels, channels, kernel_size=1, stride=1, padding=0, bias=bias)
        self.activation = activation

    def forward(self, x):
        x = x.transpose(1, 2)
        x = self.pointwise_conv1(x)
        x = nn.functional.glu(x, dim=1)
        x = self.depthwise_conv(x)
        x = self.activation(self.norm(x))
        x = self.pointwise_conv2(x)
        return x.transpose(1, 2)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, idim, hidden_units, dropout_rate, activation=nn.ReLU()):
        super().__init__()
        self.w_1 = nn.Linear(idim, hidden_units)
        self.w_2 = nn.Linear(hidden_units, idim)
        self.dropout = nn.Dropout(dropout_rate)
        self.activation = activation

    def forward(self, x):
        return self.w_2(self.dropout(self.activation(self.w_1(x))))


class Swish(torch.nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class EncoderLayer(nn.Module):
    def __init__(
        self,
        size,
        self_attn,
        feed_forward,
        feed_forward_macaron,
        conv_module,
        dropout_rate,
        normalize_before=True,
        concat_after=False,
        stochastic_depth_rate=0.0,
    ):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.feed_forward_macaron = feed_forward_macaron
        self.conv_module = conv_module
        self.norm_ff = nn.LayerNorm(size, eps=1e-12)
        self.norm_mha = nn.LayerNorm(size, eps=1e-12)
        if feed_forward_macaron is not None:
            self.norm_ff_macaron = nn.LayerNorm(size, eps=1e-12)
            self.ff_scale = 0.5
        else:
            self.ff_scale = 1.0
        if self.conv_module is not None:
            self.norm_conv = nn.LayerNorm(size, eps=1e-12)
            self.norm_final = nn.LayerNorm(size, eps=1e-12)
        self.dropout = nn.Dropout(dropout_rate)
        self.size = size
        self.normalize_before = normalize_before
        self.concat_after = concat_after
        if self.concat_after:
            self.concat_linear = nn.Linear(size + size, size)
        self.stochastic_depth_rate = stochastic_depth_rate

    def forward(self, x_input, mask, cache=None):
        if isinstance(x_input, tuple):
            x, pos_emb = x_input[0], x_input[1]
        else:
            x, pos_emb = x_input, None
        skip_layer = False
        stoch_layer_coeff = 1.0
        if self.training and self.stochastic_depth_rate > 0:
            skip_layer = torch.rand(1).item() < self.stochastic_depth_rate
            stoch_layer_coeff = 1.0 / (1 - self.stochastic_depth_rate)
        if skip_layer:
            if cache is not None:
                x = torch.cat([cache, x], dim=1)
            if pos_emb is not None:
                return (x, pos_emb), mask
            return x, mask
        if self.feed_forward_macaron is not None:
            residual = x
            if self.normalize_before:
                x = self.norm_ff_macaron(x)
            x = residual + stoch_layer_coeff * self.ff_scale * self.dropout(self.feed_forward_macaron(x))
            if not self.normalize_before:
                x = self.norm_ff_macaron(x)
        residual = x
        if self.normalize_before:
            x = self.norm_mha(x)
        if cache is None:
            x_q = x
        else:
            assert cache.shape == (x.shape[0], x.shape[1] - 1, self.size)
            x_q = x[:, -1:, :]
            residual = residual[:, -1:, :]
            mask = None if mask is None else mask[:, -1:, :]
        if pos_emb is not None:
            x_att = self.self_attn(x_q, x, x, pos_emb, mask)
        else:
            x_att = self.self_attn(x_q, x, x, mask)
        if self.concat_after:
            x_concat = torch.cat((x, x_att), dim=-1)
            x = residual + stoch_layer_coeff * self.concat_linear(x_concat)
        else:
            x = residual + stoch_layer_coeff * self.dropout(x_att)
        if not self.normalize_before:
            x = self.norm_mha(x)
        if self.conv_module is not None:
            residual = x
            if self.normalize_before:
                x = self.norm_conv(x)
            x = residual + stoch_layer_coeff * self.dropout(self.conv_module(x))
            if not self.normalize_before:
                x = self.norm_conv(x)
        residual = x
        if self.normalize_before:
            x = self.norm_ff(x)
        x = residual + stoch_layer_coeff * self.ff_scale * self.dropout(self.feed_forward(x))
        if not self.normalize_before:
            x = self.norm_ff(x)
        if self.conv_module is not None:
            x = self.norm_final(x)
        if cache is not None:
            x = torch.cat([cache, x], dim=1)
        if pos_emb is not None:
            return (x, pos_emb), mask
        return x, mask


class MultiSequential(torch.nn.Sequential):
    def __init__(self, *args, layer_drop_rate=0.0):
        super().__init__(*args)
        self.layer_drop_rate = layer_drop_rate

    def forward(self, *args):
        _probs = torch.empty(len(self)).uniform_()
        for idx, m in enumerate(self):
            if not self.training or (_probs[idx] >= self.layer_drop_rate):
                args = m(*args)
        return args


class EspnetConformer(nn.Module):
    def __init__(self, layer_drop=0.0, concat_after=False):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.encoders = MultiSequential(
            *[
                EncoderLayer(
                    16,
                    RelPositionMultiHeadedAttention(2, 16, 0.1),
                    PositionwiseFeedForward(16, 32, 0.1, Swish()),
                    PositionwiseFeedForward(16, 32, 0.1, Swish()),
                    ConvolutionModule(16, 3, Swish()),
                    0.1,
                    True,
                    concat_after,
                )
                for _ in range(2)
            ],
            layer_drop_rate=layer_drop,
        )
        self.after_norm = nn.LayerNorm(16, eps=1e-12)

    def forward(self, xs_pad, masks):
        xs = self.embed(xs_pad)
        t = xs.shape[1]
        pos = torch.linspace(-1, 1, 2 * t - 1, dtype=xs.dtype)[None, :, None] * torch.ones(16, dtype=xs.dtype)
        xs, masks = self.encoders((xs, pos.cos()), masks)
        if isinstance(xs, tuple):
            xs = xs[0]
        return self.after_norm(xs), masks


ESPNET = Stack(
    (0, 1),
    both(
        attention(
            q="encoders.{i}.self_attn.linear_q",
            k="encoders.{i}.self_attn.linear_k",
            v="encoders.{i}.self_attn.linear_v",
            o="encoders.{i}.self_attn.linear_out",
            norm="encoders.{i}.norm_mha",
        ),
        ffn(
            "encoders.{i}.feed_forward_macaron.w_1",
            "encoders.{i}.feed_forward_macaron.w_2",
            "encoders.{i}.norm_ff_macaron",
        ),
        ffn(
            "encoders.{i}.feed_forward.w_1",
            "encoders.{i}.feed_forward.w_2",
            ("encoders.{i}.norm_ff", "encoders.{i}.norm_final"),
        ),
        {"mixer.norm": ("encoders.{i}.norm_conv.weight", "encoders.{i}.conv_module.norm.weight")},
    ),
    {"ffn.h": None},  # the result is halved (`ff_scale`) before the sum: no module has it
)


# VALL-E: adaptive norms get and give tuples
class AdaptiveLayerNorm(nn.Module):
    def __init__(self, d_model, norm):
        super().__init__()
        self.project_layer = nn.Linear(d_model, 2 * d_model)
        self.norm = norm
        self.d_model = d_model
        self.eps = self.norm.eps

    def forward(self, input, embedding=None):
        if isinstance(input, tuple):
            input, embedding = input
            weight, bias = torch.split(self.project_layer(embedding), split_size_or_sections=self.d_model, dim=-1)
            return (weight * self.norm(input) + bias, embedding)
        weight, bias = torch.split(self.project_layer(embedding), split_size_or_sections=self.d_model, dim=-1)
        return weight * self.norm(input) + bias


class ValleEncoderLayer(nn.Module):
    def __init__(self, d_model=16, nhead=2, dim_feedforward=32, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm_first = True
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = F.relu
        self.norm1 = AdaptiveLayerNorm(d_model, nn.LayerNorm(d_model))
        self.norm2 = AdaptiveLayerNorm(d_model, nn.LayerNorm(d_model))

    def forward(self, src, src_mask=None, src_key_padding_mask=None):
        x, stage_embedding = src, None
        is_src_tuple = False
        if isinstance(src, tuple):
            x, stage_embedding = src
            is_src_tuple = True
        if src_key_padding_mask is not None:
            _skpm_dtype = src_key_padding_mask.dtype
            if _skpm_dtype != torch.bool and not torch.is_floating_point(src_key_padding_mask):
                raise AssertionError("only bool and floating types of key_padding_mask are supported")
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x, stage_embedding), src_mask, src_key_padding_mask)
            x = x + self._ff_block(self.norm2(x, stage_embedding))
        if is_src_tuple:
            return (x, stage_embedding)
        return x

    def _sa_block(self, x, attn_mask, key_padding_mask):
        x = self.self_attn(x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=False)[0]
        return self.dropout1(x)

    def _ff_block(self, x):
        x = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return self.dropout2(x)


class ValleEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ValleEncoderLayer() for _ in range(2)])
        self.num_layers = 2
        self.norm = AdaptiveLayerNorm(16, nn.LayerNorm(16))
        self.stage = nn.Embedding(3, 16)

    def forward(self, src, mask=None, src_key_padding_mask=None, return_layer_states: bool = False):
        output = (src, self.stage.weight[1])
        for mod in self.layers:
            output = mod(output, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        if self.norm is not None:
            output = self.norm(output)
        return output


VALLE = Stack(
    (0, 1),
    packed("layers.{i}.self_attn.in_proj_weight!", 16, o="layers.{i}.self_attn.out_proj", norm="layers.{i}.norm1.norm")
    | ffn("layers.{i}.linear1", "layers.{i}.linear2", "layers.{i}.norm2.norm"),
    {"attn.x": "layers.{i}.self_attn", "attn.h": "layers.{i}.self_attn"},
)


CASES = (
    hand_written(
        "espnet_conformer",
        EspnetConformer,
        lambda: {"xs_pad": torch.randn(2, 6, 8), "masks": torch.ones(2, 1, 6, dtype=torch.bool)},
        ESPNET,
    ),
    hand_written("valle_adaln", ValleEncoder, lambda: {"src": torch.randn(2, 5, 16)}, VALLE),
)
