"""The functional forms as plain functions of a dict of tensors (`down`, `A`, …) and of their input.

Sources: He et al. 2022 Eq. 4-6 and Table 1; Hu et al. 2021; Liu et al. 2022 ((IA)³); Liu et al. 2024 (DoRA); Mao et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, leaky_relu, linear, silu

Weights = Mapping[str, Tensor]

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_tanh": lambda z: gelu(z, approximate="tanh"),
    "silu": silu,
    "leaky_relu": leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "none": lambda z: z,
}


def adapter(w: Weights, z: Tensor, act: str = "relu") -> Tensor:
    """act(z W_downᵀ + b_down) W_upᵀ + b_up, with trained layer norms on either side where there are weights for them."""
    z = _norm(w, "norm_in", z)
    hidden = ACTIVATIONS[act](linear(z, w["down"], w.get("down_bias")))
    return _norm(w, "norm_out", linear(hidden, w["up"], w.get("up_bias")))


def _norm(w: Weights, name: str, z: Tensor) -> Tensor:
    if f"{name}_weight" not in w:
        return z
    return layer_norm(z, z.shape[-1:], w[f"{name}_weight"], w[f"{name}_bias"])


def lora(w: Weights, x: Tensor, alpha: float, rslora: bool = False) -> Tensor:
    """(α/r) (x Aᵀ) Bᵀ; α/√r for rsLoRA."""
    return scale(w, alpha, rslora) * ((x @ w["A"].T) @ w["B"].T)


def lowrank(w: Weights, alpha: float) -> Tensor:
    """(α/r) B A, (out, in)."""
    return scale(w, alpha) * (w["B"] @ w["A"])


def scale(w: Weights, alpha: float, rslora: bool = False) -> float:
    r = w["A"].shape[0]
    return alpha / (r**0.5 if rslora else r)


def magnitude(w: Weights, weight: Tensor) -> Tensor:
    """m ⊙ w / ‖w‖ by output row; no gradient through the norm (DoRA, section 4.3)."""
    return (w["m"] / weight.norm(dim=1).detach())[:, None] * weight


def gate(w: Weights, x: Tensor) -> Tensor:
    """mean over tokens of sigmoid(x Wᵀ + b): (batch, 1, 1)."""
    return torch.sigmoid(linear(x, w["weight"], w["bias"])).mean(1, keepdim=True)


def bottleneck(w: Weights, q: Tensor, act: str = "relu") -> Tensor:
    """act(q P_kᵀ) P_v for each head, no 1/√d. q: (batch, tokens, heads, d_head); keys, values: (heads, r, d_head)."""
    hidden = ACTIVATIONS[act](torch.einsum("bnhd,hrd->bnhr", q, w["keys"]))
    return torch.einsum("bnhr,hrd->bnhd", hidden, w["values"])


def vector(w: Weights) -> Tensor:
    return w["scale"]


def scalar(w: Weights) -> Tensor:
    return w["scale"]


def prefix(w: Weights) -> tuple[Tensor, Tensor]:
    """The direct form: (P_k, P_v), each (kv_heads, l, d_head)."""
    return w["key"], w["value"]


def prefix_group(w: Weights, index: int, heads: int, d_head: int) -> tuple[Tensor, Tensor]:
    """Reparametrised: tanh(E W + b) W' + b' makes the keys and values of all n layers of a group, l × (2 · n · d_kv).

    Site i of the group has features [2i · d_kv, (2i + 1) · d_kv) as keys and the next d_kv as values.
    """
    everything = linear(torch.tanh(linear(w["embedding"], w["down"], w["down_bias"])), w["up"], w["up_bias"])
    rows = everything.view(everything.shape[0], -1, heads, d_head).permute(1, 2, 0, 3)
    return rows[2 * index], rows[2 * index + 1]
