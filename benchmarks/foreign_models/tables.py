"""Short forms of role tables, and inputs that many models take.

Every norm with parameters inside a sub-layer is its norm: of the input, of a shortened context, of
hidden features, of the result; only norms of queries and keys have roles of their own.

A weight is named without `.weight`: "h.{i}.qkv[0:16]" is `h.{i}.qkv.weight[0:16]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack

Weight = str | tuple[str, ...]
Roles = dict[str, Weight]


def weight(name: Weight) -> Weight:
    """The reference of a module's weight; a parameter's own name ends in `!`."""
    if isinstance(name, tuple):
        return tuple(str(weight(one)) for one in name)
    module, bracket, rows = name.partition("[")
    module = module[:-1] if module.endswith("!") else f"{module}.weight"
    return module + bracket + rows


def hand_written(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], *stacks: Stack
) -> Case:
    return Case(f"hand-written/{name}", "hand-written", build, inputs, stacks)


def attention(kind: str = "", **roles: Weight) -> Roles:
    """The roles of an attention: `q=`, `k=`, `v=`, `o=`, `norm=`; `q_norm=` is `attn.q.norm`."""
    at = f"attn.{kind}" if kind else "attn"
    return {f"{at}.{role.replace('_', '.')}": weight(name) for role, name in roles.items() if name}


def packed(qkv: str, width: int, keys: int = 0, kind: str = "", **roles: Weight) -> Roles:
    """One weight with q, then k, then v; keys and values `keys` wide, or `width`."""
    keys = keys or width
    starts = {"q": (0, width), "k": (width, width + keys), "v": (width + keys, width + 2 * keys)}
    return attention(kind, **{role: f"{qkv}[{a}:{b}]" for role, (a, b) in starts.items()}, **roles)


def split_kv(q: str, kv: str, width: int, kind: str = "", **roles: Weight) -> Roles:
    """A query, and one weight with k, then v, each `width` wide."""
    return attention(kind, q=q, k=f"{kv}[0:{width}]", v=f"{kv}[{width}:{2 * width}]", **roles)


def ffn(up: Weight, down: Weight, norm: Weight = "", gate: Weight = "") -> Roles:
    roles = {"up": up, "down": down, "norm": norm, "gate": gate}
    return {f"ffn.{role}": weight(name) for role, name in roles.items() if name}


def feed_forward(at: str, norm: int | str, up: int, down: int) -> Roles:
    """A Sequential of a norm, up, …, down, by their numbers."""
    return ffn(f"{at}.{up}", f"{at}.{down}", f"{at}.{norm}")


def glu(packed_up: str, width: int, down: str, norm: Weight = "", gate_first: bool = False) -> Roles:
    """One weight with up, then gate; or with the gate first."""
    first, second = f"{packed_up}[0:{width}]", f"{packed_up}[{width}:{2 * width}]"
    return ffn(second if gate_first else first, down, norm, first if gate_first else second)


def both(*tables: Mapping[str, Weight]) -> Roles:
    """One layer's table from several sub-layers: equal roles become several references."""
    union: dict[str, tuple[str, ...]] = {}
    for table in tables:
        for role, names in table.items():
            union[role] = union.get(role, ()) + ((names,) if isinstance(names, str) else names)
    return {role: names[0] if len(names) == 1 else names for role, names in union.items()}


def image(size: int = 32, name: str = "x", frames: int = 0) -> Callable[[], dict[str, Any]]:
    shape = (2, 3, frames, size, size) if frames else (2, 3, size, size)
    return lambda: {name: torch.randn(shape)}


def tokens(name: str = "x", length: int = 8, count: int = 50) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randint(1, count, (2, length))}


def sequence(name: str = "x", length: int = 8, width: int = 16) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(2, length, width)}
