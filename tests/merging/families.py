"""Tiny float64 models of many families, and the recipes of the package on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import peftc
from benchmarks.families import build
from benchmarks.families.forward import main_output
from peftc.filesystem import resources
from tests import zoo
from tests.laws.harness import randomise
from tests.laws.test_specs import CHOSEN, LAYERS, small
from tests.verification.pairs import settings_of

RECIPES = resources.recipes()
# Of tests/zoo.py: biases, tied and fused weights, norms before and behind, gates, images.
OWN = ("llama", "bart", "gpt2", "t5", "bert", "t5-gated", "qwen3", "opt", "roberta", "vit")
# Keys that transformers renames, experts in both layouts, fused projections, shared layers, sound.
OTHERS = {
    "phi3": "causal-lm",
    "gpt_neox": "causal-lm",
    "gemma2": "causal-lm",
    "bloom": "causal-lm",
    "qwen3_moe": "causal-lm",
    "falcon": "causal-lm",
    "gptj": "causal-lm",
    "granitemoe": "causal-lm",
    "deberta-v2": "masked-lm",
    "whisper": "audio-classification",
}
FAMILIES = tuple(name for pair in zip(OWN, OTHERS, strict=True) for name in pair)


def families(recipe: str) -> tuple[str, ...]:
    """Those that a recipe meets: one that names layers by number needs a model with as many."""
    return OWN if recipe in LAYERS else FAMILIES


@dataclass(frozen=True)
class Checkpoint:
    """A model in float64 on disk, and the arguments of a forward."""

    folder: Path
    cls: Any
    inputs: Mapping[str, Any]

    def load(self, folder: Path | None = None) -> nn.Module:
        model = self.cls.from_pretrained(folder or self.folder, dtype="auto").eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # the default multiplies no float64
        return model


def save_base(folder: Path, family: str, recipe: str) -> Checkpoint:
    if family in OWN:
        model: Any = small(family, recipe)
        inputs: Mapping[str, Any] = zoo.inputs(family, model)
    else:
        model, inputs = build(OTHERS[family], family)
        model = model.double()
        inputs = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder, max_shard_size="100KB")
    return Checkpoint(folder, type(model), inputs)


class _Float64(TorchFunctionMode):
    """What a model casts from float64 to float32, as in norms and softmaxes, stays as it is: a
    difference of 1e-16 would come out as 1e-8.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def output(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The logits, or the first hidden states, all in float64."""
    with torch.no_grad(), _Float64():
        return main_output(model(**inputs))


def compile_trained(recipe: str, base: Checkpoint) -> nn.Module:
    """The base with a recipe, as after training."""
    model = base.load()
    peftc.compile(RECIPES[recipe], model, seed=0, settings=settings_of(recipe))
    if recipe in CHOSEN:
        peftc.calibrate(model, [base.inputs], loss=lambda model, inputs: main_output(model(**inputs)).square().mean())
    randomise(peftc.parameters(model))
    if recipe == "diff_pruning":
        peftc.calibrate(model)
    return model
