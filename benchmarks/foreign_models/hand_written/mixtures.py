"""Mixtures of experts as tutorials and research code write them: masks and `continue`, capacities,
experts that choose tokens, matrices gathered for each token, experts that all run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.hand_written.experts import Blocks, MoEBlock, attn_roles, case

D, HIDDEN, N = 16, 24, 4


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, D))


# makeMoE and other tutorials: a mask for each expert, experts without tokens left out.
class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, N), nn.ModuleList([mlp() for _ in range(N)])

    def forward(self, x: Tensor) -> Tensor:
        logits, indices = self.gate(x).topk(2, dim=-1)
        sparse = torch.full((*x.shape[:-1], N), float("-inf"), dtype=x.dtype).scatter(-1, indices, logits)
        gates = F.softmax(sparse, dim=-1)
        out = torch.zeros_like(x)
        flat, flat_gates = x.view(-1, D), gates.view(-1, N)
        for i, expert in enumerate(self.experts):
            mask = (indices == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                weighted = expert(flat[flat_mask]) * flat_gates[flat_mask, i].unsqueeze(1)
                out[mask] += weighted.squeeze(1)
        return out


# DeepSeek-V3's own code: counts of tokens, a gate of a bare parameter, an expert for all tokens.
class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D), nn.Linear(D, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, D) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(dim=-1)
        indices = torch.topk(scores, 2, dim=-1)[1]
        return scores.gather(1, indices), indices


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared_experts = Gate(), SwiGLU()
        self.experts = nn.ModuleList([SwiGLU() for _ in range(N)])

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, D)
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=N).tolist()
        for i in range(N):
            if counts[i] == 0:
                continue
            idx, top = torch.where(indices == i)
            y[idx] += self.experts[i](x[idx]) * weights[idx, top, None]
        return (y + self.shared_experts(x)).view(shape)


# Switch Transformer: one expert a token, and no more tokens than its capacity.
class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.switch, self.experts = nn.Linear(D, N), nn.ModuleList([mlp() for _ in range(N)])

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, D)
        route_prob, routes = torch.max(self.switch(x).softmax(-1), dim=-1)
        final = x.new_zeros(x.shape)
        capacity = int(1.5 * len(x) / N)
        for i in range(N):
            own = torch.eq(routes, i).nonzero(as_tuple=True)[0][:capacity]
            if len(own) == 0:
                continue
            final[own] = self.experts[i](x[own])
        return (final * route_prob.unsqueeze(-1)).view(shape)


# Expert choice (Zhou et al. 2022): each expert takes the tokens that it scores highest.
class ExpertChoice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, N, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(N, D, HIDDEN) / 4), nn.Parameter(torch.randn(N, HIDDEN, D) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        scores = self.router(flat).softmax(-1)
        gates, indices = torch.topk(scores.t(), 5, dim=-1)
        hidden = F.gelu(torch.bmm(flat[indices], self.w1))
        out = torch.bmm(hidden, self.w2) * gates.unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, indices.flatten(), out.flatten(0, 1)).view_as(x)


# gpt-fast: the matrices of the chosen experts are gathered for each token.
class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, N, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(N, HIDDEN, D) / 4) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(N, D, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, D)
        weights, indices = torch.topk(F.softmax(self.gate(x), dim=-1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        x1 = F.silu(torch.einsum("ti,taoi -> tao", x, self.w1[indices]))
        x3 = torch.einsum("ti, taoi -> tao", x, self.w3[indices])
        outs = torch.einsum("tao, taio -> tai", x1 * x3, self.w2[indices])
        return torch.einsum("tai,ta -> ti", outs, weights).view(shape)


# All experts run on all tokens (mixtures of the 1990s, and of code that need not be fast).
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, N), nn.ModuleList([mlp() for _ in range(N)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Stacked(Dense):
    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return torch.einsum("bnde,bne->bnd", outs, F.softmax(self.gate(x), dim=-1))


# A list for each Linear of the experts, and a router that is a bare parameter (in, out).
class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(D, N) / 4)
        self.up = nn.ModuleList([nn.Linear(D, HIDDEN) for _ in range(N)])
        self.down = nn.ModuleList([nn.Linear(HIDDEN, D) for _ in range(N)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.w_gate).softmax(-1).max(dim=-1)
        out = torch.zeros_like(x)
        for i in range(N):
            mask = chosen == i
            if mask.sum() > 0:
                out[mask] = weights[mask].unsqueeze(-1) * self.down[i](F.gelu(self.up[i](x[mask])))
        return out


# Soft MoE (Puigcerver et al. 2023): slots are mixtures of tokens, and tokens mixtures of slots.
class SoftSlots(nn.Module):
    def __init__(self, slots: int = 2) -> None:
        super().__init__()
        self.phi = nn.Linear(D, N * slots, bias=False)
        self.experts = nn.ModuleList([mlp() for _ in range(N)])

    def forward(self, x: Tensor) -> Tensor:
        logits = self.phi(x)
        dispatch, combine = logits.softmax(dim=1), logits.softmax(dim=2)
        slots = (dispatch.transpose(1, 2) @ x).unflatten(1, (N, -1))
        outs = torch.stack([expert(slots[:, i]) for i, expert in enumerate(self.experts)], dim=1)
        return combine @ outs.flatten(1, 2)


def stack(
    router: str, up: str | tuple[str, ...], down: str | tuple[str, ...], **others: str | tuple[str, ...]
) -> Stack:
    """Roles of a mixture at `blocks.{i}.moe`, whose names are below that."""

    def full(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        at = "blocks.{i}.moe."
        return at + names if isinstance(names, str) else tuple(at + name for name in names)

    roles: dict[str, str | tuple[str, ...]] = {**attn_roles("blocks.{i}.attn")}
    roles |= {"attn.norm": "blocks.{i}.ln1.weight", "ffn.norm": "blocks.{i}.ln2.weight", "ffn.router": full(router)}
    roles |= {"ffn.experts.up": full(up), "ffn.experts.down": full(down)}
    roles |= {f"ffn.{role.replace('_', '.')}": full(names) for role, names in others.items()}
    return Stack((0, 1), roles, {"ffn.x": "blocks.{i}.moe", "ffn.h": "blocks.{i}.moe"})


def slices(name: str, suffix: str = "") -> tuple[str, ...]:
    return tuple(f"{name}@{i}{suffix}" for i in range(N))


def mixture(name: str, moe: Callable[[], nn.Module], expected: Stack) -> Case:
    return case(name, lambda: Blocks(lambda: MoEBlock(moe)), expected)


LISTED = ("experts.{0..3}.0.weight", "experts.{0..3}.2.weight")
SWIGLU = {"experts_gate": "experts.{0..3}.w1.weight"} | {
    f"shared_{role}": f"shared_experts.w{n}.weight" for role, n in (("gate", 1), ("up", 3), ("down", 2))
}

CASES = (
    mixture("moe_masks", Masks, stack("gate.weight", *LISTED)),
    mixture(
        "moe_counts", Counted, stack("gate.weight", "experts.{0..3}.w3.weight", "experts.{0..3}.w2.weight", **SWIGLU)
    ),
    mixture("moe_switch", Switch, stack("switch.weight", *LISTED)),
    mixture("moe_expert_choice", ExpertChoice, stack("router.weight", slices("w1", ".T"), slices("w2", ".T"))),
    mixture("moe_gathered", Gathered, stack("gate.weight", slices("w3"), slices("w2"), experts_gate=slices("w1"))),
    mixture("moe_dense", Dense, stack("gate.weight", *LISTED)),
    mixture("moe_stacked", Stacked, stack("gate.weight", *LISTED)),
    mixture("moe_lists", Lists, stack("w_gate.T", "up.{0..3}.weight", "down.{0..3}.weight")),
    mixture("moe_soft_slots", SoftSlots, stack("phi.weight", *LISTED)),
)
