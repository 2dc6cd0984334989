"""Mixtures of experts: a loop over experts, and stacked parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


class Attention(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attn_roles(at: str) -> dict[str, str]:
    roles = {f"attn.{r}": f"{at}.{r}_proj.weight" for r in "qkv"}
    return roles | {"attn.o": f"{at}.out_proj.weight"}


class Blocks(nn.Module):
    def __init__(self, block: Any, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# A mixture of experts as a loop over experts, with masks.
class Expert(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(d, f, bias=False),
            nn.Linear(f, d, bias=False),
            nn.Linear(d, f, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, d: int = 16, f: int = 24, n: int = 4, k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList([Expert(d, f) for _ in range(n)])
        self.k = k

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, inputs.shape[-1])
        weights, selected = torch.topk(self.gate(flat), self.k)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            batch_idx, nth = torch.where(selected == i)
            results[batch_idx] += weights[batch_idx, nth, None] * expert(flat[batch_idx])
        return results.view_as(inputs)


class MoEBlock(nn.Module):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.attn, self.moe = Attention(), moe()
        self.ln1, self.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.moe(self.ln2(x))


MOE_ROLES = attn_roles("blocks.{i}.attn") | {
    "attn.norm": "blocks.{i}.ln1.weight",
    "ffn.norm": "blocks.{i}.ln2.weight",
    "ffn.router": "blocks.{i}.moe.gate.weight",
}
MOE = Stack(
    (0, 1),
    MOE_ROLES
    | {
        "ffn.experts.gate": "blocks.{i}.moe.experts.{0..3}.w1.weight",
        "ffn.experts.up": "blocks.{i}.moe.experts.{0..3}.w3.weight",
        "ffn.experts.down": "blocks.{i}.moe.experts.{0..3}.w2.weight",
    },
    {"ffn.x": "blocks.{i}.moe", "ffn.h": "blocks.{i}.moe"},
)


# Experts in stacked parameters, every token through every expert (soft routing), by einsum.
class SoftMoE(nn.Module):
    def __init__(self, d: int = 16, f: int = 24, n: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.w_in = nn.Parameter(torch.randn(n, d, f) / 4)
        self.w_out = nn.Parameter(torch.randn(n, f, d) / 4)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        hidden = F.relu(torch.einsum("bnd,edf->bnef", x, self.w_in))
        out = torch.einsum("bnef,efd->bned", hidden, self.w_out)
        return torch.einsum("bned,bne->bnd", out, gates)


SOFT = Stack(
    (0, 1),
    MOE_ROLES
    | {
        "ffn.experts.up": tuple(f"blocks.{{i}}.moe.w_in@{e}.T" for e in range(4)),
        "ffn.experts.down": tuple(f"blocks.{{i}}.moe.w_out@{e}.T" for e in range(4)),
    },
    {"ffn.x": "blocks.{i}.moe", "ffn.h": "blocks.{i}.moe"},
)


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def case(name: str, build: Any, stack: Stack | dict[str, str], inputs: Any = tokens) -> Case:
    stack = stack if isinstance(stack, Stack) else Stack((0, 1), stack)
    return Case(f"hand-written/{name}", "hand-written", build, inputs, (stack,))


CASES = (
    case("moe_loop", lambda: Blocks(lambda: MoEBlock(SparseMoE)), MOE),
    case("moe_soft", lambda: Blocks(lambda: MoEBlock(SoftMoE)), SOFT),
)
