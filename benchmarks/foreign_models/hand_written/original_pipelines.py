"""GPT-NeoX in the style of Megatron: layers of a pipeline pass tuples on."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import attention, ffn, hand_written, tokens


# GPT-NeoX (EleutherAI, Megatron style)
class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self.seq_len_cached = None
        self.cos_cached = None
        self.sin_cached = None

    def forward(self, x, seq_dim=1, seq_len=None):
        if seq_len is None:
            seq_len = x.shape[seq_dim]
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            t = torch.arange(seq_len, device=x.device).type_as(self.inv_freq)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1).to(x.device)
            self.cos_cached = emb.cos()[:, None, None, :]
            self.sin_cached = emb.sin()[:, None, None, :]
        return self.cos_cached, self.sin_cached


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=x1.ndim - 1)


def neox_rotary(q, k, cos, sin, offset: int = 0):
    cos, sin = cos[offset : q.shape[0] + offset, ...], sin[offset : q.shape[0] + offset, ...]
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def attention_mask_func(attention_scores, ltor_mask):
    attention_scores.masked_fill_(ltor_mask, -10000.0)
    return attention_scores


def split_tensor_along_last_dim(tensor, num_partitions, contiguous_split_chunks=False):
    last_dim = tensor.dim() - 1
    last_dim_size = tensor.size()[last_dim] // num_partitions
    tensor_list = torch.split(tensor, last_dim_size, dim=last_dim)
    if contiguous_split_chunks:
        return tuple(chunk.contiguous() for chunk in tensor_list)
    return tensor_list


class FusedScaleMaskSoftmax(nn.Module):
    def __init__(self, mask_func, softmax_in_fp32, scale):
        super().__init__()
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        assert self.scale is None or softmax_in_fp32, "softmax should be in fp32 when scaled"

    def forward(self, input, mask):
        assert input.dim() == 4
        if self.scale is not None:
            input = input * self.scale
        mask_output = self.mask_func(input, mask) if mask is not None else input
        probs = torch.nn.Softmax(dim=-1)(mask_output)
        return probs


class NeoXLinear(nn.Module):
    """Column/RowParallelLinear: output and bias apart where skip_bias_add."""

    def __init__(self, input_size, output_size, bias=True, skip_bias_add=False):
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.weight = nn.Parameter(torch.empty(output_size, input_size).normal_(std=0.2))
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size))
        else:
            self.register_parameter("bias", None)

    def forward(self, input_):
        bias = self.bias if not self.skip_bias_add else None
        output_parallel = F.linear(input_, self.weight, bias)
        output_bias = self.bias if self.skip_bias_add else None
        return output_parallel, output_bias


class ParallelSelfAttention(nn.Module):
    def __init__(self, hidden=16, heads=2, rotary_ndims=4):
        super().__init__()
        self.hidden_size_per_attention_head = hidden // heads
        self.num_attention_heads_per_partition = heads
        self.hidden_size_per_partition = hidden
        self.query_key_value = NeoXLinear(hidden, 3 * hidden)
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)
        self.rotary_ndims = rotary_ndims
        self.rotary_emb = Rotary(rotary_ndims)
        self.scale_mask_softmax = FusedScaleMaskSoftmax(attention_mask_func, True, None)
        self.attention_dropout = nn.Dropout(0.1)
        self.dense = NeoXLinear(hidden, hidden, skip_bias_add=True)

    def attention(self, query_layer, key_layer, value_layer, layer_past, attention_mask):
        output_size = (query_layer.size(1), query_layer.size(2), query_layer.size(0), key_layer.size(0))
        query_layer = query_layer.view(output_size[2], output_size[0] * output_size[1], -1)
        key_layer = key_layer.view(output_size[3], output_size[0] * output_size[1], -1)
        matmul_result = torch.empty(
            output_size[0] * output_size[1],
            output_size[2],
            output_size[3],
            dtype=query_layer.dtype,
            device=query_layer.device,
        )
        matmul_result = torch.baddbmm(
            matmul_result,
            query_layer.transpose(0, 1),
            key_layer.transpose(0, 1).transpose(1, 2),
            beta=0.0,
            alpha=(1.0 / self.norm_factor),
        )
        attention_scores = matmul_result.view(*output_size)
        attention_probs = self.scale_mask_softmax(attention_scores, attention_mask)
        attention_probs = self.attention_dropout(attention_probs)
        output_size = (value_layer.size(1), value_layer.size(2), query_layer.size(0), value_layer.size(3))
        value_layer = value_layer.view(value_layer.size(0), output_size[0] * output_size[1], -1)
        attention_probs = attention_probs.view(output_size[0] * output_size[1], output_size[2], -1)
        context_layer = torch.bmm(attention_probs, value_layer.transpose(0, 1))
        context_layer = context_layer.view(*output_size)
        return context_layer

    def forward(self, hidden_states, attention_mask, layer_past=None):
        mixed_x_layer, _ = self.query_key_value(hidden_states)
        new_tensor_shape = mixed_x_layer.size()[:-1] + (
            self.num_attention_heads_per_partition,
            3 * self.hidden_size_per_attention_head,
        )
        mixed_x_layer = mixed_x_layer.view(*new_tensor_shape)
        (query_layer, key_layer, value_layer) = split_tensor_along_last_dim(mixed_x_layer, 3)
        query_rot, query_pass = query_layer[..., : self.rotary_ndims], query_layer[..., self.rotary_ndims :]
        key_rot, key_pass = key_layer[..., : self.rotary_ndims], key_layer[..., self.rotary_ndims :]
        seq_len = key_layer.shape[0]
        offset = 0
        cos, sin = self.rotary_emb(value_layer, seq_len=seq_len)
        query_layer, key_layer = neox_rotary(query_rot, key_rot, cos, sin, offset=offset)
        query_layer = torch.cat((query_layer, query_pass), dim=-1)
        key_layer = torch.cat((key_layer, key_pass), dim=-1)
        context_layer = self.attention(query_layer, key_layer, value_layer, layer_past, attention_mask)
        context_layer = context_layer.permute(2, 0, 1, 3).contiguous()
        new_context_layer_shape = context_layer.size()[:-2] + (self.hidden_size_per_partition,)
        context_layer = context_layer.view(*new_context_layer_shape)
        output, bias = self.dense(context_layer)
        return output, bias


class ParallelMLP(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.activation_func = F.gelu
        self.dense_h_to_4h = NeoXLinear(hidden, 4 * hidden, skip_bias_add=True)
        self.dense_4h_to_h = NeoXLinear(4 * hidden, hidden, skip_bias_add=True)

    def forward(self, hidden_states):
        intermediate_parallel, bias_parallel = self.dense_h_to_4h(hidden_states)
        intermediate_parallel = self.activation_func(intermediate_parallel + bias_parallel)
        output, output_bias = self.dense_4h_to_h(intermediate_parallel)
        return output, output_bias


def bias_dropout_add(x, bias, residual, prob, training):
    out = F.dropout(x + bias, p=prob, training=training)
    if residual is not None:
        out = residual + out
    return out


def get_bias_dropout_add(training):
    def _bias_dropout_add(x, bias, residual, prob):
        return bias_dropout_add(x, bias, residual, prob, training)

    return _bias_dropout_add


class ParallelTransformerLayer(nn.Module):
    def __init__(self, layer_number):
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = nn.LayerNorm(16)
        self.hidden_dropout = 0.1
        self.gpt_j_residual = True
        self.attention = ParallelSelfAttention()
        self.post_attention_layernorm = nn.LayerNorm(16)
        self.mlp = ParallelMLP()

    def forward(self, x, attention_mask, layer_past=None):
        bias_dropout_fn = get_bias_dropout_add(self.training)
        residual = x
        x1, x2 = self.input_layernorm(x), self.post_attention_layernorm(x)
        attention_output, attention_bias = self.attention(x1, attention_mask, layer_past=layer_past)
        with torch.enable_grad():
            attention_output = bias_dropout_fn(
                attention_output,
                bias=attention_bias.expand_as(attention_output),
                residual=None,
                prob=self.hidden_dropout,
            )
        mlp_output, mlp_bias = self.mlp(x2)
        with torch.enable_grad():
            output = bias_dropout_fn(
                mlp_output, bias=mlp_bias.expand_as(mlp_output), residual=attention_output, prob=self.hidden_dropout
            )
        output = residual + output
        return output


class ParallelTransformerLayerPipe(ParallelTransformerLayer):
    def forward(self, args):
        assert len(args) == 2, "ParallelTransformerLayerPipe expects 2 arguments - hidden_states and attention_mask"
        hidden_states, attention_mask = args
        return super().forward(hidden_states, attention_mask), attention_mask


class NeoX(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(50, 16)
        self.sequential = nn.Sequential(*[ParallelTransformerLayerPipe(i) for i in range(2)])
        self.norm = nn.LayerNorm(16)
        self.final_linear = NeoXLinear(16, 50, bias=False)

    def forward(self, input_ids):
        mask = torch.tril(torch.ones((1, input_ids.size(1), input_ids.size(1)))).view(1, 1, input_ids.size(1), -1) < 0.5
        hidden = self.word_embeddings(input_ids).transpose(0, 1).contiguous()
        hidden, _ = self.sequential((hidden, mask))
        hidden = self.norm(hidden.transpose(0, 1).contiguous())
        return self.final_linear(hidden)[0]


# Rows of query_key_value are [head, (q, k, v), feature], heads of 8.
NEOX = Stack(
    (0, 1),
    attention(
        q="sequential.{i}.attention.query_key_value[0:8, 24:32]",
        k="sequential.{i}.attention.query_key_value[8:16, 32:40]",
        v="sequential.{i}.attention.query_key_value[16:24, 40:48]",
        o="sequential.{i}.attention.dense",
        norm="sequential.{i}.input_layernorm",
    )
    | ffn(
        "sequential.{i}.mlp.dense_h_to_4h",
        "sequential.{i}.mlp.dense_4h_to_h",
        "sequential.{i}.post_attention_layernorm",
    ),
    # dense gives its bias apart; dropout stands between: no module has h.
    {"attn.h": None, "ffn.h": None},
)


CASES = (hand_written("gpt_neox", NeoX, tokens("input_ids"), NEOX),)
