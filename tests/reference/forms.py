"""The functional forms as plain functions of a dict of tensors (`down`, `A`, …) and of their input.

Sources: He et al. 2022 Eq. 4-6 and Table 1; Hu et al. 2021; Liu et al. 2022 ((IA)³); Liu et al.
2024 (DoRA); Mao et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

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
    """act(z W_downᵀ + b_down) W_upᵀ + b_up, with trained layer norms on either side where there are
    weights for them.
    """
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


def new_tokens(w: Weights, weight: Tensor) -> Tensor:
    """The weight with trained values in the place of its last rows."""
    return torch.cat([weight[: len(weight) - len(w["values"])], w["values"]])


def gate(w: Weights, x: Tensor) -> Tensor:
    """mean over tokens of sigmoid(x Wᵀ + b): (batch, 1, 1), or (batch, rows, 1)."""
    return torch.sigmoid(linear(x, w["weight"], w["bias"])).mean(1)[:, :, None]


def bottleneck(w: Weights, q: Tensor, act: str = "relu") -> Tensor:
    """act(q P_kᵀ) P_v for each head, no 1/√d. q: (batch, tokens, heads, d_head); keys, values:
    (heads, r, d_head).
    """
    scores = torch.einsum("bnhd,hrd->bnhr", q, w["keys"])
    hidden = torch.softmax(scores / q.shape[-1] ** 0.5, -1) if act == "softmax" else ACTIVATIONS[act](scores)
    return torch.einsum("bnhr,hrd->bnhd", hidden, w["values"])


def vector(w: Weights) -> Tensor:
    return w["scale"]


def prefix(w: Weights) -> tuple[Tensor, Tensor]:
    """The direct form: (P_k, P_v), each (kv_heads, l, d_head)."""
    return w["key"], w["value"]


def prefix_group(w: Weights, index: int, heads: int, d_head: int) -> tuple[Tensor, Tensor]:
    """Reparametrised: tanh(E W + b) W' + b' makes the keys and values of all n layers of a group, l
    × (2 · n · d_kv).

    Site i of the group has features [2i · d_kv, (2i + 1) · d_kv) as keys and the next d_kv as
    values.
    """
    everything = linear(torch.tanh(linear(w["embedding"], w["down"], w["down_bias"])), w["up"], w["up_bias"])
    rows = everything.view(everything.shape[0], -1, heads, d_head).permute(1, 2, 0, 3)
    return rows[2 * index], rows[2 * index + 1]


def prompt(w: Weights) -> Tensor:
    """P itself; or an MLP of its rows (P-tuning); or of one vector, all at once (IPT)."""
    if "tokens" in w:
        return w["tokens"]
    hidden = linear(w["embedding"], w["inner"], w["inner_bias"])
    if "middle" not in w:
        return linear(hidden.tanh(), w["outer"], w["outer_bias"])
    return linear(linear(hidden.relu(), w["middle"], w["middle_bias"]).relu(), w["outer"], w["outer_bias"])


def kron(w: Weights, x: Tensor, scale: float) -> Tensor:
    """s (A ⊗ B) x, with the product formed."""
    b = w["B"] if "B" in w else w["B_up"] @ w["B_down"]
    return scale * (x @ torch.kron(w["A"], b).T)


def hadamard(w: Weights, alpha: float) -> Tensor:
    return alpha / w["A"].shape[0] * torch.einsum("or,ri,os,si->oi", w["B"], w["A"], w["D"], w["C"])


def product(w: Weights, weight: Tensor) -> Tensor:
    return weight @ (w["B"] @ w["A"])


def orthogonal(w: Weights, weight: Tensor, block: int, neumann: int | None) -> Tensor:
    """W Rᵀ, R formed."""
    rotations: list[Tensor] = []
    for entries in w["Q"]:
        q, one, last = torch.zeros(block, block, dtype=entries.dtype), torch.eye(block, dtype=entries.dtype), 0
        for i in range(block):
            for j in range(i + 1, block):
                q[i, j], q[j, i] = entries[last], -entries[last]
                last += 1
        if neumann is None:
            rotations.append((one - q) @ torch.linalg.inv(one + q))
        else:
            powers = [torch.linalg.matrix_power(q, n) for n in range(neumann)]
            rotations.append(powers[0] + 2 * sum(powers[1:-1], torch.zeros_like(one)) + powers[-1])
    return weight @ torch.block_diag(*rotations).T


def vera(w: Weights, x: Tensor) -> Tensor:
    a, b = w["A"][:, : x.shape[-1]], w["B"][: len(w["b"])]
    return x @ (torch.diag(w["b"]) @ b @ torch.diag(w["d"]) @ a).T


def fastfood(w: Weights, size: tuple[int, ...]) -> Tensor:
    """The first entries of H G Π H B θ, with dense Hadamard matrices."""
    n, count = len(w["G"]), torch.Size(size).numel()
    h = sylvester(n)
    theta = torch.cat([w["theta"], w["theta"].new_zeros(n - len(w["theta"]))])
    whole = h @ (w["G"] * (h @ (w["B"] * theta))[w["order"]])
    return (whole[:count] / ((n * (w["G"] ** 2).sum()).sqrt() * (count / n) ** 0.5)).view(size)


@cache
def sylvester(n: int) -> Tensor:
    """The Hadamard matrix of order n, a power of two."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    h = sylvester(n // 2)
    return torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])


def mixture(w: Weights, x: Tensor, act: str) -> Tensor:
    """After training: the adapter with the mean weights."""
    return adapter({name: value.mean(0) for name, value in w.items() if name != "route"}, x, act)


def sparse(w: Weights, size: tuple[int, ...]) -> Tensor:
    flat = torch.zeros(torch.Size(size).numel(), dtype=w["values"].dtype)
    flat[w["places"]] = w["values"]
    return flat.view(size)


def lines(w: Weights, size: tuple[int, ...], by: str) -> Tensor:
    whole = torch.zeros(size, dtype=w["values"].dtype)
    if by == "row":
        whole[w["places"]] = w["values"]
    else:
        whole[:, w["places"]] = w["values"]
    return whole


def layer_attention(w: Weights, states: list[Tensor]) -> Tensor:
    """Σ aₗ hₗ, a = softmaxₗ(hₗ · q)."""
    scores = torch.stack([state @ w["query"] for state in states]).softmax(0)
    return torch.stack([a[..., None] * state for a, state in zip(scores, states, strict=True)]).sum(0)


def coupling(w: Weights, x: Tensor, act: str, inverse: bool) -> Tensor:
    """y₁ = x₁ + F(x₂), y₂ = x₂ + G(y₁), each a bottleneck; or x of y."""

    def net(name: str, z: Tensor) -> Tensor:
        return adapter({part: w[f"{name}_{part}"] for part in ("down", "down_bias", "up", "up_bias")}, z, act)

    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    if inverse:
        b = b - net("G", a)
        return torch.cat([a - net("F", b), b], -1)
    a = a + net("F", b)
    return torch.cat([a, b + net("G", a)], -1)


def fusion(w: Weights, x: Tensor, act: str) -> Tensor:
    """Σᵢ aᵢ zᵢ V, a = softmax((x Q + b) · zᵢ K), zᵢ the output of adapter i on x."""
    parts = ("down", "up", "down_bias", "up_bias")
    count = len(w["down"])
    z = torch.stack([adapter({p: w[p][i] for p in parts if p in w}, x, act) for i in range(count)])
    query = x @ w["query"].T + w["query_bias"]
    a = torch.stack([(query * (z[i] @ w["key"].T)).sum(-1, keepdim=True) for i in range(count)]).softmax(0)
    mixed = (a * z).sum(0)
    return mixed @ w["value"].T if "value" in w else mixed


def sparse_adapter(w: Weights, x: Tensor, d_out: int, r: int, act: str) -> Tensor:
    """The adapter with zeros for pruned entries."""
    whole = torch.zeros(r * (x.shape[-1] + d_out), dtype=x.dtype)
    whole[w["places"]] = w["values"]
    down, up = whole[: r * x.shape[-1]].view(r, -1), whole[r * x.shape[-1] :].view(d_out, r)
    return adapter({**w, "down": down, "up": up}, x, act)


def masked(w: Weights, lower: float, upper: float) -> Tensor:
    """Δ under gates without random draws: σ(α) stretched to (lower, upper) and clipped to [0, 1]; a
    second gate for the whole tensor.
    """
    gates = [torch.clip(lower + (upper - lower) / (1 + torch.exp(-w[n])), 0, 1) for n in ("alpha", "group") if n in w]
    return w["delta"] * gates[0] * (gates[1] if len(gates) > 1 else 1.0)


def svd(w: Weights, x: Tensor, alpha: float) -> Tensor:
    return x @ (alpha / (len(w["values"]) + 1e-5) * (w["P"] @ torch.diag(w["values"]) @ w["Q"])).T


def phm(w: Weights, x: Tensor, act: str) -> Tensor:
    """act(x W_down + b_down) W_up + b_up, W = Σᵢ Aᵢ ⊗ (Lᵢ Rᵢ) formed."""

    def weight(name: str) -> Tensor:
        rules = w["A"] if "A" in w else w[f"{name}_A"]
        inner = w[f"{name}_whole"] if f"{name}_whole" in w else w[f"{name}_left"] @ w[f"{name}_right"]
        return sum((torch.kron(a, m) for a, m in zip(rules, inner, strict=True)), torch.zeros((), dtype=x.dtype))

    hidden = ACTIVATIONS[act](x @ weight("down") + w.get("down_bias", 0.0))
    return hidden @ weight("up") + w.get("up_bias", 0.0)


def reft(w: Weights, h: Tensor, orthogonal: bool, subtract: bool) -> Tensor:
    """Rᵀ (W h + b − R h)."""
    r = orthonormal(w["R"]) if orthogonal else w["R"]
    return (h @ w["W"].T + w["b"] - (h @ r.T if subtract else 0.0)) @ r


def orthonormal(matrix: Tensor) -> Tensor:
    """Its rows, orthonormalised in order."""
    rows: list[Tensor] = []
    for row in matrix:
        for before in rows:
            row = row - (row @ before) * before
        rows.append(row / row.norm())
    return torch.stack(rows)


def rung(w: Weights, h: Tensor, below: Tensor | None, act: str = "relu", temperature: float = 1.0) -> Tensor:
    """One layer of a ladder: s ← σ(a / t) s + (1 − σ(a / t)) (h W_down + b), s ← s + act(LN(s) U +
    c) V + e.
    """
    g = torch.sigmoid(w["gate"] / temperature)
    s = (1 - g) * linear(h.detach(), w["down"], w.get("down_bias"))
    s = s if below is None else s + g * below
    hidden = ACTIVATIONS[act](linear(_norm(w, "norm", s), w["block_in"], w.get("block_in_bias")))
    return s + linear(hidden, w["block_out"], w.get("block_out_bias"))


def ladder_start(w: Weights, x: Tensor) -> Tensor:
    return linear(x.detach(), w["start"], w.get("start_bias"))


def ladder_end(w: Weights, s: Tensor) -> Tensor:
    return linear(_norm(w, "end_norm", s), w["up"], w.get("up_bias"))


def hyper_of_stack(w: Weights, stack: int) -> Weights:
    """The tensors of one stack and those common to all stacks, under the names of a single
    hypernetwork.
    """
    own = ("positions", "p1", "p1_bias", "p2", "p2_bias", "norm_weight", "norm_bias")
    return {**{name: w[f"{name}_{stack}"] for name in own}, **{n: v for n, v in w.items() if not n.startswith(own)}}


def hyper(w: Weights, x: Tensor, layer: int, position: int, net: int, act: str = "relu") -> Tensor:
    """γ ⊙ LN(act(x D + b) U + c) + β, all generated from I = LN(P₂ ReLU(P₁ [task; layer;
    position])).
    """
    z = torch.cat([w["embedding"], w["layers"][layer], w["positions"][position]])
    z = linear(torch.relu(linear(z, w["p1"], w["p1_bias"])), w["p2"], w["p2_bias"])
    i = layer_norm(z, z.shape, w["norm_weight"], w["norm_bias"], 1e-6)
    names = [n.removesuffix(f"_{net}") for n in w if n.endswith(f"_{net}") and f"_offset_{net}" not in n]
    generated = {n: w[f"{n}_{net}"] @ i + w.get(f"{n}_offset_{net}", 0.0) for n in names}
    down = generated["down"].view(-1, x.shape[-1])
    up = generated["up"].view(-1, len(down))
    y = linear(ACTIVATIONS[act](linear(x, down, generated.get("down_bias"))), up, generated.get("up_bias"))
    return layer_norm(y, y.shape[-1:], generated["scale"], generated["shift"]) if "scale" in generated else y
