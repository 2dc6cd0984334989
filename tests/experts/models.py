"""Tiny mixture-of-experts models in float64, one for each way to store the experts."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.families import build

MODELS = {
    "mixtral": "gate and up fused, stored (out, in)",
    "qwen2_moe": "beside a shared expert",
    "gpt_oss": "gate and up interleaved, stored (in, out), with biases",
    "llama4_text": "multiplied all at once, stored (in, out)",
    "deepseek_v3": "in some layers only; shared experts",
    "dbrx": "two-dimensional, of a child of the module that reads them",
    "nemotron_h": "without a gate",
    "jetmoe": "gate and up fused, down in a module of its own",
}


@cache
def original(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = build("seq2seq" if name == "switch_transformers" else "causal-lm", name)
    model = model.double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default multiplies no float64
    return model, inputs


def fresh(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of a model, and its inputs."""
    model, inputs = original(name)
    return copy.deepcopy(model), inputs


def logits(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits


def perturb(parameters: dict[str, nn.Parameter], seed: int = 0) -> None:
    """Perturbs every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
