"""Recipes of `specs/`, and the same equations as passes of plain torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

Function = Callable[[Any], None]


def lora(scale: float, r: int) -> Function:
    def equation(region: Any) -> None:
        x, h = (region[f"{region.site}.{name}"] for name in "xh")
        down = region.parameter("A", (r, region.width(f"{region.site}.x")), "kaiming")
        up = region.parameter("B", (region.width(f"{region.site}.h"), r))
        change = region.call(F.linear, region.call(F.linear, x, down), up)
        region.replace(f"{region.site}.h", region.call(torch.add, h, change, alpha=scale))

    return equation


def bottleneck(region: Any, state: str, r: int, act: Callable[..., Any]) -> fx.Node:
    down = region.parameter("down", (r, region.width(state)), ("normal", 0.02))
    up = region.parameter("up", (region.width(f"{region.site}.h"), r))
    biases = region.parameter("down_bias", (r,)), region.parameter("up_bias", (region.width(f"{region.site}.h"),))
    hidden = region.call(act, region.call(F.linear, region[state], down, biases[0]))
    return region.call(F.linear, hidden, up, biases[1])


def adapter(state: str, r: int, act: Callable[..., Any], scale: float = 1.0) -> Function:
    def equation(region: Any) -> None:
        h = f"{region.site}.h"
        change = bottleneck(region, f"{region.site}.{state}", r, act)
        region.replace(h, region.call(torch.add, region[h], change, alpha=scale))

    return equation


def vector(region: Any) -> None:
    h = f"{region.site}.h"
    region.replace(h, region.call(operator.mul, region[h], region.parameter("scale", (region.width(h),), 1.0)))


def scalar(region: Any) -> None:
    h = f"{region.site}.h"
    region.replace(h, region.call(operator.mul, region[h], region.parameter("scale", (1,), 1.0)))


def learned_scale(region: Any) -> None:
    h = f"{region.site}.h"
    change = bottleneck(region, f"{region.site}.x", 4, torch.relu)
    product = region.call(operator.mul, region.parameter("scale", (1,), 4.0), change)
    region.replace(h, region.call(operator.add, region[h], product))


def direft(region: Any) -> None:
    name = f"{region.site}.h".strip(".")
    h, d, r = region[name], region.width(name), 2
    subspace = region.parameter("R", (r, d), ("uniform", 1 / sqrt(d)))
    inner = region.call(F.linear, h, region.parameter("W", (r, d), "kaiming"), region.parameter("b", (r,)))
    change = region.call(torch.matmul, inner, subspace)
    region.replace(name, region.call(torch.add, h, change))


QV = "layer[*].attn.q | layer[*].attn.v"
# By recipe: its settings, and for each edit the selector and the function.
RECIPES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, tuple[str, Function]]]] = {
    "lora": ({"r": 2, "alpha": 6}, {"qv": (QV, lora(3.0, 2))}),
    "rslora": ({"r": 4, "alpha": 6}, {"qv": (QV, lora(3.0, 4))}),
    "lora-ffn": ({"r": 2}, {"up": ("layer[*].ffn.up", lora(4.0, 2)), "down": ("layer[*].ffn.down", lora(4.0, 2))}),
    "houlsby": (
        {"r": 4},
        {"attn": ("layer[*].attn", adapter("h", 4, F.gelu)), "ffn": ("layer[*].ffn", adapter("h", 4, F.gelu))},
    ),
    "pfeiffer": ({"r": 4}, {"ffn": ("layer[*].ffn", adapter("h", 4, F.relu))}),
    "parallel": ({"r": 4}, {"ffn": ("layer[*].ffn", adapter("x", 4, F.relu))}),
    "scaled-parallel": ({"r": 4}, {"ffn": ("layer[*].ffn", adapter("x", 4, F.relu, 4.0))}),
    "parallel-res": ({"r": 4}, {"ffn": ("layer[*].ffn", adapter("res", 4, F.relu, 4.0))}),
    "pa-pa": (
        {"r_attn": 2, "r_ffn": 4},
        {"attn": ("layer[*].attn", adapter("x", 2, F.relu)), "ffn": ("layer[*].ffn", adapter("x", 4, F.relu))},
    ),
    "ia3": ({}, {"kv": ("layer[*].attn.k | layer[*].attn.v", vector), "ff": ("layer[*].ffn.hidden", vector)}),
    "learned-scale": ({"r": 4}, {"ffn": ("layer[*].ffn", learned_scale)}),
    "direft": ({"r": 2}, {"layers": ("layer[*]", direft)}),
}
