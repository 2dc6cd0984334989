"""Compiled models in everyday use, and comparisons of models.

Each spec edits a layer in another way: `lora` at the boundaries of Linears, `mam` inside attention
and layers, `sequential` at the outputs of sub-layers, `gated` with means over tokens, `weights` in
parameters, some of them trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from peftc.installation import reinstall
from tests import zoo
from tests.laws.harness import randomise
from tests.matrix import FULL

SPECIES = ("bart", "t5", "llama", "bert", "vit", "mixtral")
GENERATING = ("bart", "t5", "llama", "mixtral")
TOLERANCE = 1e-10
WARM = reinstall.warm  # which most tests replace (tests/conftest.py)

SPECS = {
    "lora": "edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=4, alpha=8) }",
    "mam": """edit prefix at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }
edit ffn at layer[*].ffn { h += 2 * adapter(x, r=4, act=gelu) }""",
    "sequential": "edit bottleneck at layer[*].attn | layer[*].ffn { h += adapter(h, r=4, act=gelu) }",
    "gated": "edit g at layer[*].ffn { let g = gate(x)  h += g * adapter(x, r=4, act=gelu) }",
    "weights": """edit dora at layer[*].attn.q | layer[*].attn.o { w = magnitude(w + lowrank(r=2)) }
train norms = [w, b] at layer[*].norm""",
}
PAIRS = [(name, spec) for name in SPECIES for spec in SPECS]
SOME = [
    PAIRS[5 * i + (2 * i + j) % 5] for i in range(len(SPECIES)) for j in range(2 if FULL else 1)
]  # one spec of each (two in the full run), all specs in turn
CACHED = tuple(name for name in SPECS if name != "gated")  # a gate averages over fewer tokens with a cache


def text(spec: str) -> str:
    return "peft 1\n" + SPECS[spec]


@cache
def _pristine(name: str, spec: str, dtype: torch.dtype, ahead: bool, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    return freshly_compiled(name, spec, dtype, **dict(options))


def compiled(name: str, spec: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A compiled model in eval mode with perturbed parameters: a copy of one that is compiled once
    with variants traced ahead of time, and once without.
    """
    ahead = reinstall.warm is WARM
    return copy.deepcopy(_pristine(name, spec, dtype, ahead, tuple(sorted(options.items()))))


def freshly_compiled(name: str, spec: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = peftc.compile(text(spec), zoo.build(name, dtype, **options), seed=0)
    randomise(peftc.parameters(model))
    return model


def model_inputs(name: str, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Inputs with padding on the side that suits the model, and labels."""
    side: zoo.Padding = "left" if name in ("llama", "mixtral") else "right"
    return zoo.inputs(name, model, **{"padding": side, "labels": True, **options})


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model, in order."""
    repeated = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3]
    inner = {id(m) for block in repeated for child in block for m in child.modules()}
    blocks = {id(child) for block in repeated if id(block) not in inner for child in block}
    if isinstance(getattr(model.config, "encoder_layers", None), int) and model.config.encoder_layers == 2:
        blocks |= {id(m) for m in model.get_encoder().layers}
    return [(n, m) for n, m in model.named_modules() if id(m) in blocks]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """The same names, and the same bits."""
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def close(got: Tensor, want: Tensor, what: str = "", tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    error = (got - want).abs().max().item()
    bound = tolerance * max(1.0, want.abs().max().item())
    assert error <= bound, f"{what}: {error:.3g} > {bound:.3g}"


def all_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], name, tolerance)


def train(model: nn.Module, batches: Iterable[dict[str, Tensor]], rate: float = 0.1) -> list[float]:
    """The loss of each batch, with a step of plain SGD after each."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=rate)
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
