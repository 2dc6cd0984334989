"""Parametrised weights, norms everywhere, one layer run again and again, and
layers without attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import both


class Attention(nn.Module):
    def __init__(self, d: int = 16, wrap: Any = lambda linear: linear) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (wrap(nn.Linear(d, d)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attn_roles(at: str) -> dict[str, str]:
    roles = {f"attn.{r}": f"{at}.{r}_proj.weight" for r in "qkv"}
    return roles | {"attn.o": f"{at}.out_proj.weight"}


# Weight and spectral norm, as parametrisations and as the old hooks.
class Parametrised(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = Attention(16, wrap)
        self.fc1, self.fc2 = wrap(nn.Linear(16, 32)), wrap(nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


PARAMETRISED = attn_roles("blocks.{i}.attn") | {
    "attn.norm": "blocks.{i}.norm1.weight",
    "ffn.up": "blocks.{i}.fc1.weight",
    "ffn.down": "blocks.{i}.fc2.weight",
    "ffn.norm": "blocks.{i}.norm2.weight",
}


class Blocks(nn.Module):
    def __init__(self, block: Any, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Norms before and behind each sub-layer (sandwich, Gemma 2), queries and keys normed, gated output.
class Sandwich(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.pre_attn, self.post_attn = nn.RMSNorm(d), nn.RMSNorm(d)
        self.pre_ffn, self.post_ffn = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 48, bias=False), nn.Linear(24, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pre_attn(x)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, 8)).movedim(2, 0)
        q, k = self.q_norm(q), self.k_norm(k)
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.post_attn(self.o(a.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.pre_ffn(x)).tensor_split(2, dim=-1)
        return x + self.post_ffn(self.down(F.gelu(gate) * up))


SANDWICH = Stack(
    (0, 1),
    {
        **{f"attn.{r}": f"blocks.{{i}}.qkv.weight[{16 * n}:{16 * n + 16}]" for n, r in enumerate("qkv")},
        "attn.o": "blocks.{i}.o.weight",
        "attn.norm": ("blocks.{i}.pre_attn.weight", "blocks.{i}.post_attn.weight"),
        "attn.q.norm": "blocks.{i}.q_norm.weight",
        "attn.k.norm": "blocks.{i}.k_norm.weight",
        "ffn.gate": "blocks.{i}.gate_up.weight[0:24]",
        "ffn.up": "blocks.{i}.gate_up.weight[24:48]",
        "ffn.down": "blocks.{i}.down.weight",
        "ffn.norm": ("blocks.{i}.pre_ffn.weight", "blocks.{i}.post_ffn.weight"),
    },
    {"attn.h": "blocks.{i}.post_attn", "ffn.h": "blocks.{i}.post_ffn"},
)


# One layer, run several times (a universal transformer); ReZero scales.
class Universal(nn.Module):
    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.embed = nn.Embedding(50, 16)
        self.attn = Attention()
        self.ff = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.steps):
            x = x + self.a * self.attn(x)
            x = x + self.b * self.ff(x)
        return x @ self.embed.weight.T


UNIVERSAL = Stack(
    ("",),
    both(*3 * [attn_roles("attn") | {"ffn.up": "ff.0.weight", "ffn.down": "ff.2.weight"}]),  # a site for each call
    {"attn.h": None, "ffn.h": None},
)


# MLP-Mixer: token mixing by Linears over tokens.
class MixerBlock(nn.Module):
    def __init__(self, tokens: int = 5, d: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.token_in, self.token_out = nn.Linear(tokens, 8), nn.Linear(8, tokens)
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x).transpose(1, 2)
        x = x + self.token_out(F.gelu(self.token_in(y))).transpose(1, 2)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


MIXER = {
    "mixer.norm": "blocks.{i}.norm1.weight",
    "ffn.up": "blocks.{i}.fc1.weight",
    "ffn.down": "blocks.{i}.fc2.weight",
    "ffn.norm": "blocks.{i}.norm2.weight",
}


# Recurrences: an nn.GRU in a residual block with a feed-forward part; a gated linear recurrence by
# hand; an S4D-like convolution by FFT.
class GRUBlock(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(d), nn.GRU(d, d, batch_first=True)
        self.ff_norm, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(self.norm(x))
        x = x + y
        return x + self.fc2(F.relu(self.fc1(self.ff_norm(x))))


RECURRENT = {
    "mixer.norm": "blocks.{i}.norm.weight",
    "ffn.up": "blocks.{i}.fc1.weight",
    "ffn.down": "blocks.{i}.fc2.weight",
    "ffn.norm": "blocks.{i}.ff_norm.weight",
}


class MinGRUBlock(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.to_hidden_and_gate, self.to_out = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc1, self.fc2 = nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.to_hidden_and_gate(self.norm(x)).chunk(2, dim=-1)
        gate, state, states = gate.sigmoid(), torch.zeros_like(hidden[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.lerp(state, hidden[:, t], gate[:, t])
            states.append(state)
        x = x + self.to_out(torch.stack(states, dim=1))
        return x + self.fc2(F.relu(self.fc1(self.ff_norm(x))))


# Latent keys and values (DeepSeek's attention): low ranks for queries and for keys with values.
class LatentAttention(nn.Module):
    def __init__(self, d: int = 16, heads: int = 2, rank: int = 6, rope: int = 4) -> None:
        super().__init__()
        self.h, self.rank, self.rope = heads, rank, rope
        self.norm = nn.LayerNorm(d)
        self.wq_a, self.q_norm, self.wq_b = nn.Linear(d, 6), nn.RMSNorm(6), nn.Linear(6, heads * (8 + rope))
        self.wkv_a, self.kv_norm = nn.Linear(d, rank + rope), nn.RMSNorm(rank)
        self.wkv_b, self.wo = nn.Linear(rank, heads * 16), nn.Linear(heads * 8, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = self.norm(x)
        q = self.wq_b(self.q_norm(self.wq_a(y))).view(b, n, self.h, -1).transpose(1, 2)
        latent, k_pe = self.wkv_a(y).split([self.rank, self.rope], dim=-1)
        k, v = self.wkv_b(self.kv_norm(latent)).view(b, n, self.h, 16).transpose(1, 2).split(8, dim=-1)
        k = torch.cat([k, k_pe[:, None].expand(-1, self.h, -1, -1)], dim=-1)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.wo(out.transpose(1, 2).flatten(2))


# Rows of wkv_b are [head, (k, v), feature]. The low-rank Linears and their norms have no role of
# their own.
LATENT = Stack(
    (0, 1),
    {
        "attn.q": "blocks.{i}.wq_b.weight",
        "attn.k": "blocks.{i}.wkv_b.weight[0:8, 16:24]",
        "attn.v": "blocks.{i}.wkv_b.weight[8:16, 24:32]",
        "attn.o": "blocks.{i}.wo.weight",
        "attn.norm": "blocks.{i}.norm.weight",
    },
    {"attn.x": "blocks.{i}.norm:out"},
    optional={
        "attn.q.norm": "blocks.{i}.q_norm.weight",
        "attn.k.norm": "blocks.{i}.kv_norm.weight",
        "attn.norm": ("blocks.{i}.q_norm.weight", "blocks.{i}.kv_norm.weight"),
    },
)


# A perceiver: latents read the input by cross attention, then attend to themselves, in turns.
class CrossAttention(nn.Module):
    def __init__(self, d: int = 16, context: int = 12) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(d, d), nn.Linear(context, d), nn.Linear(context, d)
        self.to_out = nn.Linear(d, d)
        self.norm, self.norm_context = nn.LayerNorm(d), nn.LayerNorm(context)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x, context = self.norm(x), self.norm_context(context)
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PerceiverLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross, self.attn, self.norm = CrossAttention(), Attention(), nn.LayerNorm(16)
        self.ff = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, latents: Tensor, data: Tensor) -> Tensor:
        latents = latents + self.cross(latents, data)
        latents = latents + self.attn(self.norm(latents))
        return latents + self.ff(latents)


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 16))
        self.layers = nn.ModuleList([PerceiverLayer() for _ in range(2)])

    def forward(self, data: Tensor) -> Tensor:
        x = self.latents.expand(data.shape[0], -1, -1)
        for layer in self.layers:
            x = layer(x, data)
        return x.mean(1)


PERCEIVER = Stack(
    (0, 1),
    {
        **{f"attn.cross.{r}": f"layers.{{i}}.cross.to_{r}.weight" for r in "qkv"},
        "attn.cross.o": "layers.{i}.cross.to_out.weight",
        "attn.cross.norm": "layers.{i}.cross.norm.weight",
        **{name.replace("attn.", "attn.self.", 1): ref for name, ref in attn_roles("layers.{i}.attn").items()},
        "attn.self.norm": "layers.{i}.norm.weight",
        "ffn.norm": "layers.{i}.ff.0.weight",
        "ffn.up": "layers.{i}.ff.1.weight",
        "ffn.down": "layers.{i}.ff.3.weight",
    },
    optional={"attn.cross.norm": "layers.{i}.cross.norm_context.weight"},
)


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def case(name: str, build: Any, stack: Stack | dict[str, str], inputs: Any = tokens) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", build, inputs, (stack,))


def parametrised(name: str, wrap: Any) -> Case:
    return case(name, lambda: Blocks(lambda: Parametrised(wrap)), PARAMETRISED)


CASES = (
    parametrised("weight_norm", parametrizations.weight_norm),
    parametrised("spectral_norm", parametrizations.spectral_norm),
    parametrised("old_weight_norm", weight_norm),
    parametrised("old_spectral_norm", spectral_norm),
    case("sandwich_norms", lambda: Blocks(Sandwich), SANDWICH),
    case("universal", Universal, UNIVERSAL, lambda: {"ids": torch.randint(50, (2, 5))}),
    case("mlp_mixer", lambda: Blocks(MixerBlock), MIXER),
    case("gru_blocks", lambda: Blocks(GRUBlock), RECURRENT),
    case("min_gru", lambda: Blocks(MinGRUBlock), RECURRENT),
    case("latent_attention", lambda: Blocks(LatentAttention), LATENT),
    case("perceiver", Perceiver, PERCEIVER, lambda: {"data": torch.randn(2, 7, 12)}),
)
