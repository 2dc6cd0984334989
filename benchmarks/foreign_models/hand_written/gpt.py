"""GPTs as small repositories write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


# nanoGPT: a fused c_attn, split; masked softmax or SDPA; tied head.
class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, block: int, flash: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)
        self.n_head, self.n_embd, self.flash = heads, width, flash
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = self.attn_dropout(F.softmax(att, dim=-1))
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        x = self.dropout(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int, heads: int, flash: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, 16, flash)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class NanoGPT(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(50, 16),
                "wpe": nn.Embedding(16, 16),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Block(16, 2, flash) for _ in range(2)]),
                "ln_f": nn.LayerNorm(16),
            }
        )
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return self.lm_head(x[:, [-1], :]), None


NANO = Stack(
    (0, 1),
    {
        "attn.q": "transformer.h.{i}.attn.c_attn.weight[0:16]",
        "attn.k": "transformer.h.{i}.attn.c_attn.weight[16:32]",
        "attn.v": "transformer.h.{i}.attn.c_attn.weight[32:48]",
        "attn.o": "transformer.h.{i}.attn.c_proj.weight",
        "attn.norm": "transformer.h.{i}.ln_1.weight",
        "ffn.up": "transformer.h.{i}.mlp.c_fc.weight",
        "ffn.down": "transformer.h.{i}.mlp.c_proj.weight",
        "ffn.norm": "transformer.h.{i}.ln_2.weight",
    },
)


# minGPT: an nn.Sequential of blocks, the mlp a Sequential inside the block.
class MinAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(16, 16)
        self.query = nn.Linear(16, 16)
        self.value = nn.Linear(16, 16)
        self.proj = nn.Linear(16, 16)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16))[None, None])

    def forward(self, x: Tensor, layer_past: Any = None) -> Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, 2, C // 2).transpose(1, 2)
        q = self.query(x).view(B, T, 2, C // 2).transpose(1, 2)
        v = self.value(x).view(B, T, 2, C // 2).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, -1e10)
        att = F.softmax(att, dim=-1)
        return self.proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class MinBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(16)
        self.ln2 = nn.LayerNorm(16)
        self.attn = MinAttention()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


class MinGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(50, 16)
        self.pos_emb = nn.Parameter(torch.randn(1, 16, 16))
        self.blocks = nn.Sequential(*[MinBlock() for _ in range(2)])
        self.ln_f = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1), :]
        return self.head(self.ln_f(self.blocks(x)))


MIN = Stack(
    (0, 1),
    {
        "attn.q": "blocks.{i}.attn.query.weight",
        "attn.k": "blocks.{i}.attn.key.weight",
        "attn.v": "blocks.{i}.attn.value.weight",
        "attn.o": "blocks.{i}.attn.proj.weight",
        "attn.norm": "blocks.{i}.ln1.weight",
        "ffn.up": "blocks.{i}.mlp.0.weight",
        "ffn.down": "blocks.{i}.mlp.2.weight",
        "ffn.norm": "blocks.{i}.ln2.weight",
    },
)


# "Let's build GPT": one module a head, concatenated; blocks in a Sequential.
class Head(nn.Module):
    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(16, head_size, bias=False)
        self.query = nn.Linear(16, head_size, bias=False)
        self.value = nn.Linear(16, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        _, T, _ = x.shape
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        v = self.value(x)
        return wei @ v


class MultiHead(nn.Module):
    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class FeedForward(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class HeadsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa = MultiHead(2, 8)
        self.ffwd = FeedForward(16)
        self.ln1 = nn.LayerNorm(16)
        self.ln2 = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x


class MicroGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embedding_table = nn.Embedding(50, 16)
        self.position_embedding_table = nn.Embedding(16, 16)
        self.blocks = nn.Sequential(*[HeadsBlock() for _ in range(2)])
        self.ln_f = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 50)

    def forward(self, idx: Tensor) -> Tensor:
        _, T = idx.shape
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(T))
        return self.lm_head(self.ln_f(self.blocks(x)))


# Each head's projections are Linears of their own: each role has one weight a head.
MICRO = Stack(
    (0, 1),
    {
        "attn.q": "blocks.{i}.sa.heads.{0..1}.query.weight",
        "attn.k": "blocks.{i}.sa.heads.{0..1}.key.weight",
        "attn.v": "blocks.{i}.sa.heads.{0..1}.value.weight",
        "attn.o": "blocks.{i}.sa.proj.weight",
        "attn.norm": "blocks.{i}.ln1.weight",
        "ffn.up": "blocks.{i}.ffwd.net.0.weight",
        "ffn.down": "blocks.{i}.ffwd.net.2.weight",
        "ffn.norm": "blocks.{i}.ln2.weight",
    },
    {"attn.x": "blocks.{i}.sa", "attn.h": "blocks.{i}.sa"},
)


def tokens() -> dict[str, Any]:
    return {"idx": torch.randint(1, 50, (2, 6))}


CASES = (
    Case("hand-written/nanogpt", "hand-written", lambda: NanoGPT(flash=True), tokens, (NANO,)),
    Case("hand-written/nanogpt_eager", "hand-written", lambda: NanoGPT(flash=False), tokens, (NANO,)),
    Case("hand-written/mingpt", "hand-written", MinGPT, tokens, (MIN,)),
    Case("hand-written/microgpt_heads", "hand-written", MicroGPT, tokens, (MICRO,)),
)
