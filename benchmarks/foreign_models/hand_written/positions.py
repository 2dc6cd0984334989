"""Relative positions and biases: T5, Swin, ALiBi, Shaw, Transformer-XL, complex rotations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


def projections(at: str, names: str = "q k v o") -> dict[str, str]:
    return {f"attn.{role}": f"{at}.{name}.weight" for role, name in zip("qkvo", names.split())}


# T5: an embedding of buckets in the first layer, its bias passed on; no scale; RMS norms.
class T5Norm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Attention(nn.Module):
    def __init__(self, d: int, has_bias: bool, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        if has_bias:
            self.relative_attention_bias = nn.Embedding(8, heads)
        self.has_bias = has_bias

    def compute_bias(self, n: int) -> Tensor:
        position = torch.arange(n)
        relative = (position[None, :] - position[:, None]).clamp(-4, 3) + 4
        return self.relative_attention_bias(relative).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shape = lambda t: t.view(t.shape[0], -1, self.heads, 8).transpose(1, 2)  # noqa: E731
        scores = torch.matmul(shape(self.q(x)), shape(self.k(x)).transpose(3, 2))
        if position_bias is None:
            position_bias = self.compute_bias(x.shape[1])
        scores += position_bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        out = torch.matmul(weights, shape(self.v(x))).transpose(1, 2).contiguous().view(x.shape)
        return self.o(out), position_bias


class T5Block(nn.Module):
    def __init__(self, d: int, has_bias: bool) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = T5Attention(d, has_bias), T5Norm(d), T5Norm(d)
        self.wi_0, self.wi_1 = nn.Linear(d, 24, bias=False), nn.Linear(d, 24, bias=False)
        self.wo = nn.Linear(24, d, bias=False)

    def forward(self, x: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        a, position_bias = self.attention(self.norm1(x), position_bias)
        x = x + a
        y = self.norm2(x)
        return x + self.wo(F.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y)), position_bias


class T5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([T5Block(16, has_bias=i == 0) for i in range(3)])
        self.final_layer_norm = T5Norm(16)

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.block:
            x, bias = layer(x, bias)
        return self.final_layer_norm(x)


T5 = {
    **projections("block.{i}.attention"),
    "attn.norm": "block.{i}.norm1.weight",
    "ffn.gate": "block.{i}.wi_0.weight",
    "ffn.up": "block.{i}.wi_1.weight",
    "ffn.down": "block.{i}.wo.weight",
    "ffn.norm": "block.{i}.norm2.weight",
}


# Swin: windows of an image, every second layer shifted, a table of biases gathered by an index.
def window_partition(x: Tensor, w: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // w, w, W // w, w, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, C)


def window_reverse(windows: Tensor, w: int, H: int, W: int) -> Tensor:
    B = int(windows.shape[0] / (H * W / w / w))
    x = windows.view(B, H // w, W // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim: int, window: int, heads: int = 2) -> None:
        super().__init__()
        self.window, self.num_heads, self.scale = window, heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, shift: int, dim: int = 16, size: int = 4, window: int = 2) -> None:
        super().__init__()
        self.shift, self.size, self.window = shift, size, window
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        mask = None
        if shift:
            image = torch.zeros(1, size, size, 1)
            for n, rows in enumerate((slice(0, -window), slice(-window, -shift), slice(-shift, None))):
                image[:, rows] += n
            windows = window_partition(image, window).view(-1, window * window)
            difference = windows.unsqueeze(1) - windows.unsqueeze(2)
            mask = difference.masked_fill(difference != 0, -100.0)
        self.register_buffer("attn_mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        H = W = self.size
        B, _, C = x.shape
        shortcut = x
        x = self.norm1(x).view(B, H, W, C)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.window).view(-1, self.window**2, C)
        windows = self.attn(windows, mask=self.attn_mask).view(-1, self.window, self.window, C)
        x = window_reverse(windows, self.window, H, W)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x.view(B, H * W, C)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SwinBlock(shift=i % 2) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for blk in self.blocks:
            x = blk(x)
        return x.mean(1)


# The sum takes the attention's output put back in place; the projection is in windows.
SWIN = Stack(
    (0, 1, 2, 3),
    {
        **{f"attn.{r}": f"blocks.{{i}}.attn.qkv.weight[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
        "attn.o": "blocks.{i}.attn.proj.weight",
        "attn.norm": "blocks.{i}.norm1.weight",
        "ffn.up": "blocks.{i}.mlp.0.weight",
        "ffn.down": "blocks.{i}.mlp.2.weight",
        "ffn.norm": "blocks.{i}.norm2.weight",
    },
)


# ALiBi with grouped heads and a cap on logits; parallel attention and feed-forward, one norm.
class AlibiBlock(nn.Module):
    def __init__(self, d: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.dh = heads, groups, d // heads
        self.ln = nn.LayerNorm(d, bias=False)
        self.query, self.dense = nn.Linear(d, d), nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * groups * self.dh)
        self.h_to_4h, self.four_h_to_h = nn.Linear(d, 32), nn.Linear(32, d)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        ln = self.ln(x)
        q = self.query(ln).view(b, n, self.groups, self.heads // self.groups, self.dh)
        k, v = self.kv(ln).view(b, n, self.groups, 2 * self.dh).chunk(2, -1)
        logits = torch.einsum("bqgrd,bkgd->bgrqk", q, k) / math.sqrt(self.dh)
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        alibi = self.slopes.view(self.groups, -1, 1, 1) * distance
        logits = 30 * torch.tanh((logits + alibi) / 30)
        logits = logits.masked_fill(distance > 0, torch.finfo(logits.dtype).min)
        out = torch.einsum("bgrqk,bkgd->bqgrd", logits.softmax(-1), v).reshape(b, n, d)
        return x + self.dense(out) + self.four_h_to_h(F.gelu(self.h_to_4h(ln)))


# Rows of `kv` are [group, (k, v), feature].
ALIBI = {
    "attn.q": "blocks.{i}.query.weight",
    "attn.k": "blocks.{i}.kv.weight[0:4, 8:12]",
    "attn.v": "blocks.{i}.kv.weight[4:8, 12:16]",
    "attn.o": "blocks.{i}.dense.weight",
    "attn.norm": "blocks.{i}.ln.weight",
    "ffn.up": "blocks.{i}.h_to_4h.weight",
    "ffn.down": "blocks.{i}.four_h_to_h.weight",
}


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


class LlamaBlock(nn.Module):
    def __init__(self, dim: int = 16, n_heads: int = 4, n_kv: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = n_heads, n_kv, dim // n_heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv * self.head_dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 24, bias=False), nn.Linear(dim, 24, bias=False)
        self.w2 = nn.Linear(24, dim, bias=False)
        self.attention_norm, self.ffn_norm = T5Norm(dim), T5Norm(dim)

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
        self.norm = T5Norm(16)
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
    case("t5_bias", T5Encoder, Stack((0, 1, 2), T5)),
    case("swin", Swin, SWIN, lambda: {"x": torch.randn(2, 16, 16)}),
    case("alibi_parallel", lambda: Blocks(AlibiBlock), ALIBI),
    case("shaw", lambda: Blocks(ShawBlock), SHAW),
    case("transformer_xl", TransformerXL, XL, lambda: {"data": torch.randint(50, (5, 2))}),
    case("llama_complex", Llama, LLAMA, lambda: {"tokens": torch.randint(50, (2, 5))}),
)
