"""ChatGLM2: tokens are the first dimension, and a cache is the second result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, glu, hand_written, tokens


# THUDM ChatGLM2 modeling_chatglm.py: (sequence, batch, features)
class GlmRMSNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.eps = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return (self.weight * hidden_states).to(input_dtype)


def apply_rotary_pos_emb(x, rope_cache):
    sq, np = x.size(0), x.size(2)
    rot_dim = rope_cache.shape[-2] * 2
    x, x_pass = x[..., :rot_dim], x[..., rot_dim:]
    rope_cache = rope_cache[:sq]
    xshaped = x.reshape(sq, -1, np, rot_dim // 2, 2)
    rope_cache = rope_cache.view(sq, -1, 1, xshaped.size(3), 2)
    x_out2 = torch.stack(
        [
            xshaped[..., 0] * rope_cache[..., 0] - xshaped[..., 1] * rope_cache[..., 1],
            xshaped[..., 1] * rope_cache[..., 0] + xshaped[..., 0] * rope_cache[..., 1],
        ],
        -1,
    )
    x_out2 = x_out2.flatten(3)
    return torch.cat((x_out2, x_pass), dim=-1)


class CoreAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size_per_partition = 32
        self.attention_dropout = nn.Dropout(0.0)

    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        query_layer, key_layer, value_layer = [k.permute(1, 2, 0, 3) for k in [query_layer, key_layer, value_layer]]
        if attention_mask is None and query_layer.shape[2] == key_layer.shape[2]:
            context_layer = F.scaled_dot_product_attention(query_layer, key_layer, value_layer, is_causal=True)
        else:
            if attention_mask is not None:
                attention_mask = ~attention_mask
            context_layer = F.scaled_dot_product_attention(query_layer, key_layer, value_layer, attention_mask)
        context_layer = context_layer.permute(2, 0, 1, 3)
        new_context_layer_shape = context_layer.size()[:-2] + (self.hidden_size_per_partition,)
        return context_layer.reshape(*new_context_layer_shape)


class GlmSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.num_groups, self.head_dim = 4, 2, 8
        self.query_key_value = nn.Linear(16, 32 + 2 * 16, bias=True)
        self.core_attention = CoreAttention()
        self.dense = nn.Linear(32, 16, bias=False)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb, kv_cache=None, use_cache=True):
        mixed_x_layer = self.query_key_value(hidden_states)
        (query_layer, key_layer, value_layer) = mixed_x_layer.split(
            [
                self.num_heads * self.head_dim,
                self.num_groups * self.head_dim,
                self.num_groups * self.head_dim,
            ],
            dim=-1,
        )
        query_layer = query_layer.view(query_layer.size()[:-1] + (self.num_heads, self.head_dim))
        key_layer = key_layer.view(key_layer.size()[:-1] + (self.num_groups, self.head_dim))
        value_layer = value_layer.view(value_layer.size()[:-1] + (self.num_groups, self.head_dim))
        if rotary_pos_emb is not None:
            query_layer = apply_rotary_pos_emb(query_layer, rotary_pos_emb)
            key_layer = apply_rotary_pos_emb(key_layer, rotary_pos_emb)
        if kv_cache is not None:
            cache_k, cache_v = kv_cache
            key_layer = torch.cat((cache_k, key_layer), dim=0)
            value_layer = torch.cat((cache_v, value_layer), dim=0)
        kv_cache = (key_layer, value_layer) if use_cache else None
        key_layer = key_layer.unsqueeze(-2)
        key_layer = key_layer.expand(-1, -1, -1, self.num_heads // self.num_groups, -1)
        key_layer = key_layer.contiguous().view(key_layer.size()[:2] + (self.num_heads, self.head_dim))
        value_layer = value_layer.unsqueeze(-2)
        value_layer = value_layer.expand(-1, -1, -1, self.num_heads // self.num_groups, -1)
        value_layer = value_layer.contiguous().view(value_layer.size()[:2] + (self.num_heads, self.head_dim))
        context_layer = self.core_attention(query_layer, key_layer, value_layer, attention_mask)
        output = self.dense(context_layer)
        return output, kv_cache


class GlmMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(16, 24 * 2, bias=False)

        def swiglu(x):
            x = torch.chunk(x, 2, dim=-1)
            return F.silu(x[0]) * x[1]

        self.activation_func = swiglu
        self.dense_4h_to_h = nn.Linear(24, 16, bias=False)

    def forward(self, hidden_states):
        intermediate_parallel = self.dense_h_to_4h(hidden_states)
        intermediate_parallel = self.activation_func(intermediate_parallel)
        return self.dense_4h_to_h(intermediate_parallel)


class GLMBlock(nn.Module):
    def __init__(self, apply_residual_connection_post_layernorm=False):
        super().__init__()
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.input_layernorm = GlmRMSNorm(16)
        self.self_attention = GlmSelfAttention()
        self.hidden_dropout = 0.0
        self.post_attention_layernorm = GlmRMSNorm(16)
        self.mlp = GlmMLP()

    def forward(self, hidden_states, attention_mask, rotary_pos_emb, kv_cache=None, use_cache=True):
        layernorm_output = self.input_layernorm(hidden_states)
        attention_output, kv_cache = self.self_attention(
            layernorm_output, attention_mask, rotary_pos_emb, kv_cache=kv_cache, use_cache=use_cache
        )
        if self.apply_residual_connection_post_layernorm:
            residual = layernorm_output
        else:
            residual = hidden_states
        layernorm_input = F.dropout(attention_output, p=self.hidden_dropout, training=self.training)
        layernorm_input = residual + layernorm_input
        layernorm_output = self.post_attention_layernorm(layernorm_input)
        mlp_output = self.mlp(layernorm_output)
        if self.apply_residual_connection_post_layernorm:
            residual = layernorm_output
        else:
            residual = layernorm_input
        output = F.dropout(mlp_output, p=self.hidden_dropout, training=self.training)
        output = residual + output
        return output, kv_cache


class GLMTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_layers = 2
        self.layers = nn.ModuleList([GLMBlock() for _ in range(self.num_layers)])
        self.final_layernorm = GlmRMSNorm(16)

    def _get_layer(self, layer_number):
        return self.layers[layer_number]

    def forward(self, hidden_states, attention_mask, rotary_pos_emb, kv_caches=None, use_cache=True):
        if not kv_caches:
            kv_caches = [None for _ in range(self.num_layers)]
        presents = () if use_cache else None
        for index in range(self.num_layers):
            layer = self._get_layer(index)
            hidden_states, kv_cache = layer(
                hidden_states, attention_mask, rotary_pos_emb, kv_cache=kv_caches[index], use_cache=use_cache
            )
            if use_cache:
                presents = presents + (kv_cache,)
        hidden_states = self.final_layernorm(hidden_states)
        return hidden_states, presents


class ChatGLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.encoder = GLMTransformer()
        self.output_layer = nn.Linear(16, 50, bias=False)

    def rotary(self, seq_len, n_elem=4, base=10000):
        theta = 1.0 / (base ** (torch.arange(0, n_elem, 2, dtype=torch.float) / n_elem))
        seq_idx = torch.arange(seq_len, dtype=torch.float)
        idx_theta = torch.outer(seq_idx, theta).float()
        return torch.stack([torch.cos(idx_theta), torch.sin(idx_theta)], dim=-1)

    def forward(self, input_ids):
        batch_size, seq_length = input_ids.shape
        inputs_embeds = self.embedding(input_ids).transpose(0, 1).contiguous()
        rotary_pos_emb = self.rotary(seq_length)[None, :seq_length].transpose(0, 1).contiguous()
        hidden_states, presents = self.encoder(inputs_embeds, None, rotary_pos_emb)
        lm_logits = self.output_layer(hidden_states)
        return lm_logits.transpose(0, 1).contiguous(), presents


GLM = attention(
    q="encoder.layers.{i}.self_attention.query_key_value[0:32]",
    k="encoder.layers.{i}.self_attention.query_key_value[32:48]",
    v="encoder.layers.{i}.self_attention.query_key_value[48:64]",
    o="encoder.layers.{i}.self_attention.dense",
    norm="encoder.layers.{i}.input_layernorm",
) | glu(
    "encoder.layers.{i}.mlp.dense_h_to_4h",
    24,
    "encoder.layers.{i}.mlp.dense_4h_to_h",
    "encoder.layers.{i}.post_attention_layernorm",
    gate_first=True,
)

CASES = (hand_written("chatglm2", ChatGLM, tokens("input_ids"), Stack((0, 1), GLM)),)
