"""Relative positions: Shaw, Transformer-XL, complex rotations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


def projections(at: str, names: str = "q k v o") -> dict[str, str]:
    return {f"attn.{role}": f"{at}.{name}.weight" for role, name in zip("qkvo", names.split())}


# Shaw et al.: embeddings of distances added to keys and to values.
class ShawBlock(nn.Module):
    def __init__(self, d: int = 16, heads: int = 2, most: int = 3) -> None:
        super().__init__()
        self.h, self.dh, self.most = heads, d // heads, most
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(d, d) for _ in range(4))
        self.rel_k = nn.Parameter(torch.randn(2 * most + 1, self.dh) * 0.2)
        self.rel_v = nn.Parameter(torch.randn(2 * most + 1, self.dh) * 0.2)
        self.layer_norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.h, self.dh).permute(0, 2, 1, 3) for f in (self.fc_q, self.fc_k, self.fc_v))
        position = torch.arange(n)
        index = (position[None] - position[:, None]).clamp(-self.most, self.most) + self.most
        attn1 = torch.matmul(q, k.permute(0, 1, 3, 2))
        r_q = q.permute(2, 0, 1, 3).contiguous().view(n, b * self.h, self.dh)
        attn2 = torch.matmul(r_q, self.rel_k[index].transpose(1, 2)).transpose(0, 1)
        attn2 = attn2.contiguous().view(b, self.h, n, n)
        attn = torch.softmax((attn1 + attn2) / math.sqrt(self.dh), dim=-1)
        weight1 = torch.matmul(attn, v)
        weight2 = attn.permute(2, 0, 1, 3).contiguous().view(n, b * self.h, n)
        weight2 = torch.matmul(weight2, self.rel_v[index]).transpose(0, 1).contiguous().view(b, self.h, n, self.dh)
        out = (weight1 + weight2).permute(0, 2, 1, 3).contiguous().view(b, -1, d)
        return self.layer_norm(x + self.fc_o(out))


SHAW = projections("blocks.{i}", "fc_q fc_k fc_v fc_o") | {"attn.norm": "blocks.{i}.layer_norm.weight"}


# Transformer-XL: two biases of queries, a projection of positions, and the shift of rows.
class RelPartialLearnable(nn.Module):
    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.n_head, self.d_head = heads, d // heads
        self.qkv_net = nn.Linear(d, 3 * d, bias=False)
        self.r_net = nn.Linear(d, d, bias=False)
        self.o_net = nn.Linear(d, d, bias=False)
        self.layer_norm = nn.LayerNorm(d)

    @staticmethod
    def _rel_shift(x: Tensor) -> Tensor:
        zero_pad = torch.zeros((x.size(0), 1, *x.size()[2:]), dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, w: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor) -> Tensor:
        qlen, rlen, bsz = w.size(0), r.size(0), w.size(1)
        w_head_q, w_head_k, w_head_v = torch.chunk(self.qkv_net(w), 3, dim=-1)
        r_head_k = self.r_net(r).view(rlen, self.n_head, self.d_head)
        w_head_q = w_head_q.view(qlen, bsz, self.n_head, self.d_head)
        w_head_k = w_head_k.view(qlen, bsz, self.n_head, self.d_head)
        w_head_v = w_head_v.view(qlen, bsz, self.n_head, self.d_head)
        AC = torch.einsum("ibnd,jbnd->ijbn", (w_head_q + r_w_bias, w_head_k))
        BD = self._rel_shift(torch.einsum("ibnd,jnd->ijbn", (w_head_q + r_r_bias, r_head_k)))
        attn_prob = F.softmax((AC + BD) * self.d_head**-0.5, dim=1)
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", (attn_prob, w_head_v))
        attn_vec = attn_vec.contiguous().view(qlen, bsz, self.n_head * self.d_head)
        return self.layer_norm(w + self.o_net(attn_vec))


class PositionwiseFF(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.CoreNet = nn.Sequential(nn.Linear(d, 32), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(32, d))
        self.layer_norm = nn.LayerNorm(d)

    def forward(self, inp: Tensor) -> Tensor:
        core_out = self.CoreNet(inp)
        return self.layer_norm(inp + core_out)


class XLLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dec_attn, self.pos_ff = RelPartialLearnable(), PositionwiseFF()

    def forward(self, dec_inp: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor) -> Tensor:
        return self.pos_ff(self.dec_attn(dec_inp, r, r_w_bias, r_r_bias))


class TransformerXL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([XLLayer() for _ in range(2)])
        self.r_w_bias = nn.Parameter(torch.randn(2, 8) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(2, 8) * 0.1)
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, 16, 2.0) / 16)))

    def forward(self, data: Tensor) -> Tensor:
        core_out = self.word_emb(data)
        pos_seq = torch.arange(data.size(0) - 1, -1, -1.0, dtype=core_out.dtype)
        sinusoid = torch.outer(pos_seq, self.inv_freq)
        r = torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1)
        for layer in self.layers:
            core_out = layer(core_out, r, self.r_w_bias, self.r_r_bias)
        return core_out


XL = {
    **{f"attn.{r}": f"layers.{{i}}.dec_attn.qkv_net.weight[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
    "attn.o": "layers.{i}.dec_attn.o_net.weight",
    "attn.norm": "layers.{i}.dec_attn.layer_norm.weight",
    "ffn.up": "layers.{i}.pos_ff.CoreNet.0.weight",
    "ffn.down": "layers.{i}.pos_ff.CoreNet.3.weight",
    "ffn.norm": "layers.{i}.pos_ff.layer_norm.weight",
}


# Meta's llama: rotations as complex numbers, keys repeated for grouped queries.
def precompute_freqs_cis(dim: int, end: int) -> Tensor:
    freqs = torch.outer(torch.arange(end), 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim)))
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int = 16, n_heads: int = 4, n_kv: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = n_heads, n_kv, dim // n_heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv * self.head_dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 24, bias=False), nn.Linear(dim, 24, bias=False)
        self.w2 = nn.Linear(24, dim, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def attention(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis)
        expand = lambda t: t[:, :, :, None, :].expand(-1, -1, -1, 2, -1).reshape(bsz, seqlen, self.n_heads, -1)  # noqa: E731
        xq, keys, values = (t.transpose(1, 2) for t in (xq, expand(xk), expand(xv)))
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([LlamaBlock() for _ in range(2)])
        self.norm = RMSNorm(16)
        self.output = nn.Linear(16, 50, bias=False)
        self.freqs_cis = precompute_freqs_cis(4, 16)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h)).float()


LLAMA = {
    **projections("layers.{i}", "wq wk wv wo"),
    "attn.norm": "layers.{i}.attention_norm.weight",
    "ffn.gate": "layers.{i}.w1.weight",
    "ffn.up": "layers.{i}.w3.weight",
    "ffn.down": "layers.{i}.w2.weight",
    "ffn.norm": "layers.{i}.ffn_norm.weight",
}


class Blocks(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def case(name: str, build: Any, stack: Stack | dict[str, str], inputs: Any = tokens) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", build, inputs, (stack,))


CASES = (
    case("shaw", lambda: Blocks(ShawBlock), SHAW),
    case("transformer_xl", TransformerXL, XL, lambda: {"data": torch.randint(50, (5, 2))}),
    case("llama_complex", Llama, LLAMA, lambda: {"tokens": torch.randint(50, (2, 5))}),
)
