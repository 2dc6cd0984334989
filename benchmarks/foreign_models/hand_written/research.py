"""Language models of big repositories: LLaMA's own code, Megatron, fairseq."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, ffn, sequence, tokens


# LLaMA's own code: a Linear that is a class of its own, keys and values written into tensors
# that are no buffers, a start position.
class ColumnParallelLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, gather_output: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.1)
        self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> Tensor:
        output_parallel = F.linear(input_, self.weight, self.bias)
        return output_parallel


class LlamaNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    x = x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)
    return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class CachedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = 4, 2, 4
        self.n_rep = self.n_local_heads // self.n_local_kv_heads
        self.wq, self.wo = ColumnParallelLinear(16, 16, gather_output=False), ColumnParallelLinear(16, 16)
        self.wk, self.wv = ColumnParallelLinear(16, 8), ColumnParallelLinear(16, 8)
        self.cache_k, self.cache_v = torch.zeros(2, 16, 2, 4), torch.zeros(2, 16, 2, 4)

    def forward(self, x: Tensor, start_pos: int, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        if self.training:
            keys, values = xk, xv
        else:
            self.cache_k = self.cache_k.detach().to(xq)
            self.cache_v = self.cache_v.detach().to(xq)
            self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
            self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
            keys = self.cache_k[:bsz, : start_pos + seqlen]
            values = self.cache_v[:bsz, : start_pos + seqlen]
        keys, values = repeat_kv(keys, self.n_rep), repeat_kv(values, self.n_rep)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class LlamaFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            ColumnParallelLinear(16, 24),
            ColumnParallelLinear(24, 16),
            ColumnParallelLinear(16, 24),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.attention, self.feed_forward = CachedAttention(), LlamaFeedForward()
        self.attention_norm, self.ffn_norm = LlamaNorm(16), LlamaNorm(16)

    def forward(self, x: Tensor, start_pos: int, mask: Tensor | None) -> Tensor:
        h = x + self.attention.forward(self.attention_norm(x), start_pos, mask)
        return h + self.feed_forward.forward(self.ffn_norm(h))


class LlamaCached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList()
        for layer_id in range(2):
            self.layers.append(LlamaBlock(layer_id))
        self.norm, self.output = LlamaNorm(16), ColumnParallelLinear(16, 50)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _bsz, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1)
            mask = torch.hstack([torch.zeros((seqlen, start_pos), device=tokens.device), mask]).type_as(h)
        for layer in self.layers:
            h = layer(h, start_pos, mask)
        return self.output(self.norm(h)).float()


LLAMA = attention(
    norm="layers.{i}.attention_norm", **{role: f"layers.{{i}}.attention.w{role}" for role in "qkvo"}
) | ffn("layers.{i}.feed_forward.w3", "layers.{i}.feed_forward.w2", "layers.{i}.ffn_norm", "layers.{i}.feed_forward.w1")


# Megatron: a Linear returns its bias beside its output, for a fused sum; (tokens, batch, heads).
class BiasedLinear(nn.Module):
    def __init__(self, n: int, m: int, skip_bias_add: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(m, n) * 0.1), nn.Parameter(torch.randn(m) * 0.1)
        self.skip_bias_add = skip_bias_add

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output = F.linear(input_, self.weight)
        if self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    out = F.dropout(x + bias, p=prob, training=training)
    return residual + out


class MegatronLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query_key_value, self.dense = BiasedLinear(16, 48, False), BiasedLinear(16, 16, True)
        self.dense_h_to_4h, self.dense_4h_to_h = BiasedLinear(16, 64, True), BiasedLinear(64, 16, True)

    def core_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sq, b, np, hn = q.shape
        q, k = q.reshape(sq, b * np, hn), k.reshape(sq, b * np, hn)
        buffer = torch.empty(b * np, sq, sq, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(buffer, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=hn**-0.5)
        mask = torch.triu(torch.ones(sq, sq, device=q.device), 1).bool()
        probs = scores.view(b, np, sq, sq).masked_fill(mask, -10000.0).softmax(dim=-1)
        context = torch.bmm(probs.view(b * np, sq, sq), v.reshape(sq, b * np, hn).transpose(0, 1))
        return context.view(b, np, sq, hn).permute(2, 0, 1, 3).contiguous().view(sq, b, np * hn)

    def forward(self, hidden_states: Tensor) -> Tensor:
        layernorm_output = self.input_layernorm(hidden_states)
        mixed_x_layer, _ = self.query_key_value(layernorm_output)
        mixed_x_layer = mixed_x_layer.view(*mixed_x_layer.size()[:-1], 2, 24)
        q, k, v = torch.split(mixed_x_layer, 8, dim=-1)
        attention_output, attention_bias = self.dense(self.core_attention(q, k, v))
        layernorm_input = bias_dropout_add(
            attention_output, attention_bias.expand_as(hidden_states), hidden_states, 0.0, self.training
        )
        y, bias = self.dense_h_to_4h(self.post_attention_layernorm(layernorm_input))
        mlp_output, mlp_bias = self.dense_4h_to_h(bias_gelu(bias, y))
        return bias_dropout_add(mlp_output, mlp_bias.expand_as(layernorm_input), layernorm_input, 0.0, self.training)


class Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MegatronLayer() for _ in range(2)])
        self.final_layernorm = nn.LayerNorm(16)

    def _get_layer(self, layer_number: int) -> nn.Module:
        return self.layers[layer_number]

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.transpose(0, 1).contiguous()
        for index in range(len(self.layers)):
            hidden_states = self._get_layer(index)(hidden_states)
        return self.final_layernorm(hidden_states.transpose(0, 1).contiguous())


# Rows are [head, (q, k, v), feature]. The bias of `dense` is added outside of it.
MEGATRON = Stack(
    (0, 1),
    attention(
        q="layers.{i}.query_key_value[0:8, 24:32]",
        k="layers.{i}.query_key_value[8:16, 32:40]",
        v="layers.{i}.query_key_value[16:24, 40:48]",
        o="layers.{i}.dense",
        norm="layers.{i}.input_layernorm",
    )
    | ffn("layers.{i}.dense_h_to_4h", "layers.{i}.dense_4h_to_h", "layers.{i}.post_attention_layernorm"),
    {"attn.h": None, "ffn.h": None},
)


# fairseq: (tokens, batch · heads, d); a learned norm of heads' outputs and of the hidden features
# (NormFormer); layers that are left out at random.
class FairseqAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.c_attn, self.num_heads, self.head_dim, self.scaling = nn.Parameter(torch.ones(2)), 2, 8, 8**-0.5

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor | None]:
        tgt_len, bsz, embed_dim = query.size()
        assert key is not None
        assert value is not None
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q *= self.scaling
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=attn_weights.dtype).type_as(attn_weights)
        attn = torch.bmm(attn_weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        attn = attn.view(tgt_len, bsz, self.num_heads, self.head_dim)
        attn = torch.einsum("tbhd,h->tbhd", attn, self.c_attn)
        return self.out_proj(attn.reshape(tgt_len, bsz, embed_dim)), None


class FairseqLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = FairseqAttention(), nn.LayerNorm(16)
        self.attn_ln, self.ffn_layernorm, self.final_layer_norm = nn.LayerNorm(16), nn.LayerNorm(32), nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.normalize_before = True

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + x

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(query=x, key=x, value=x)
        x = self.attn_ln(x)
        x = F.dropout(x, p=0.0, training=self.training)
        x = self.residual_connection(x, residual)
        residual = x
        x = self.final_layer_norm(x)
        x = F.relu(self.fc1(x))
        x = self.ffn_layernorm(x)
        x = self.fc2(x)
        return self.residual_connection(x, residual)


class Fairseq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([FairseqLayer() for _ in range(2)])

    def forward(self, src_tokens: Tensor) -> dict[str, list[Any]]:
        x = self.embed_tokens(src_tokens).transpose(0, 1)
        encoder_states = []
        for layer in self.layers:
            dropout_probability = 1.0 if not self.training else 0.5
            if dropout_probability >= 0.3:
                x = layer(x)
            encoder_states.append(x)
        return {"encoder_out": [x], "encoder_states": encoder_states}


FAIRSEQ = attention(
    norm=("layers.{i}.self_attn_layer_norm", "layers.{i}.attn_ln"),
    **{r: f"layers.{{i}}.self_attn.{n}_proj" for r, n in zip("qkvo", ("q", "k", "v", "out"), strict=True)},
) | ffn("layers.{i}.fc1", "layers.{i}.fc2", ("layers.{i}.final_layer_norm", "layers.{i}.ffn_layernorm"))


CASES = (
    Case("hand-written/llama_cached", "hand-written", LlamaCached, tokens("tokens"), (Stack((0, 1), LLAMA),)),
    Case("hand-written/megatron", "hand-written", Megatron, sequence("hidden_states"), (MEGATRON,)),
    Case(
        "hand-written/fairseq_normformer",
        "hand-written",
        Fairseq,
        tokens("src_tokens"),
        (Stack((0, 1), FAIRSEQ, {"attn.h": "layers.{i}.attn_ln"}),),
    ),
)
