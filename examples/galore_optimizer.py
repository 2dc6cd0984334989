"""GaLore: Adam whose moments are those of gradients projected to rank r.

Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
arXiv:2403.03507.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class GaLore(torch.optim.Optimizer):
    """Adam in a subspace of the gradient, which is chosen anew every `gap` steps.

    R = Pᵀ G, M = β₁ M + (1 - β₁) R, V = β₂ V + (1 - β₂) R², W = W - lr · scale · P (M̂ / (√V̂ + ε)),
    where P are the r first left singular vectors of G, as it is at the steps 0, gap, 2 gap, …; and
    on the other side where that is shorter: R = G P, W = W - lr · scale · (…) Pᵀ. Moments stay as
    they are when P changes, as in the authors' code, which projects a square G from the right. What
    is no matrix, or none larger than r, has the moments of Adam.

    Shapes: G: (m, n), or (n, m), with m ≤ n; P: (m, r), or (r, m); M, V: (r, n), or (n, r)
    Args:
        rank: r
        gap: steps with one subspace, T
        scale: α
    Raises: ValueError where `rank` or `gap` is below 1.
    Source: Algorithm 2 and Eq. 12 (Adam); section 4.1 (changes of the subspace).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-2,
        rank: int = 8,
        gap: int = 200,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if rank < 1 or gap < 1:
            raise ValueError(f"the rank and the gap must be at least 1; they are {rank} and {gap}")
        super().__init__(parameters, {"lr": lr, "rank": rank, "gap": gap, "scale": scale, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(group["lr"] * self._direction(weight.grad, self.state[weight], group))
        return loss

    def _direction(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if gradient.ndim != 2 or min(gradient.shape) <= group["rank"]:
            return _adam(gradient, state, group)
        if state.get("step", 0) % group["gap"] == 0:
            state["projection"] = principal_vectors(gradient, group["rank"])
        projection = state["projection"]
        if gradient.shape[0] <= gradient.shape[1]:
            return group["scale"] * projection @ _adam(projection.T @ gradient, state, group)
        return group["scale"] * _adam(gradient @ projection.T, state, group) @ projection


def principal_vectors(gradient: Tensor, rank: int) -> Tensor:
    """The first singular vectors on the shorter side: (m, r) of a gradient (m, n) with m ≤ n, else
    (r, n).
    """
    wide = gradient.shape[0] <= gradient.shape[1]
    matrix = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    vectors = left[:, :rank] if wide else right[:rank]
    return vectors.to(gradient).clone()  # a copy: not a view of all of them


def _adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """M̂ / (√V̂ + ε), after one more step."""
    if "moment" not in state:
        state["step"] = 0
        state["moment"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    first, second = group["betas"]
    state["step"] += 1
    state["moment"].lerp_(gradient, 1 - first)
    state["square"].lerp_(gradient.square(), 1 - second)
    moment = state["moment"] / (1 - first ** state["step"])
    return moment / ((state["square"] / (1 - second ** state["step"])).sqrt() + group["eps"])


def state_entries(optimizer: torch.optim.Optimizer) -> int:
    """Numbers in the state of an optimizer; its counters of steps are left out."""
    return sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim > 0
    )
