"""Pairs of a recipe and a model, small enough to verify in about a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import peftc
from peftc.filesystem import resources
from peftc.semantics import read_spec
from peftc.syntax import ast
from tests import zoo

RECIPES = resources.recipes()
# Where a recipe has such a parameter.
SETTINGS = {
    "r": 4,
    "a": 4,
    "len": 5,
    "l": 3,
    "m": 6,
    "t": 5,
    "d": 40,
    "reduction": 4,
    "group": 8,
    "vectors": 9,
    "length": 8,
}
SETTINGS_OF = {"c3a": {"block": 8}, **{key: {"n": 40} for key in ("fourierft", "waveft", "frod")}}
BIASES = ("bart", "mbart", "bert", "bert-base", "bert-classifier", "roberta", "gpt2", "opt", "vit")
CROSS = ("bart", "mbart", "t5", "t5-gated")
GATED = ("t5-gated", "llama", "qwen2", "qwen3", "mistral")
WIDE = ("adalora", "glora", "glora_weight", "krona", "loha", "lokr", "oft", "qlora", "lora_adapter", "s4")
TEXT = tuple(name for name in zoo.SPECIES if name != "vit")
DEPTH = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers", "n_layer")


def models(recipe: str) -> tuple[str, ...]:
    """The species of the zoo with the sites of a recipe."""
    if recipe == "cross_attention":
        return CROSS
    if recipe in ("bitfit", "difffit", "glora", "glora_kinds", "far"):
        return BIASES
    if "ffn.gate" in RECIPES[recipe].read_text(encoding="utf-8"):
        return GATED
    if recipe in ("ipt", "p_tuning", "prompt_tuning", "spot", "trainable_tokens"):
        return TEXT  # images have no tokens to embed
    text = RECIPES[recipe].read_text(encoding="utf-8")
    linears = (
        "ffn." in text or " ** {" in text or ".**" in text or recipe == "prefix_lora_ffn"
    )  # a mixture of experts has none
    return tuple(name for name in zoo.SPECIES if not (linears and name == "mixtral"))


def sampled_pairs() -> list[tuple[str, str]]:
    """Every recipe once, with the models in turn. Recipes with many kinds of sites are not paired
    with encoder-decoders.
    """
    report: list[tuple[str, str]] = []
    for i, recipe in enumerate(sorted(RECIPES)):
        able = [name for name in models(recipe) if recipe.removesuffix("_gated") not in WIDE or name not in CROSS]
        report.append((recipe, "llama" if recipe == "s4" else able[i % len(able)]))
    return report


def everything() -> list[tuple[str, str]]:
    return [(recipe, name) for recipe in sorted(RECIPES) for name in models(recipe)]


def compiled(recipe: str, name: str, layers: int = 2, *, device: str = "cpu", **options: Any) -> nn.Module:
    """A model in float64 with a recipe on it."""
    depth = 10 if recipe == "s4" else layers  # which has four groups of layers
    fields = {field: depth for field in DEPTH if hasattr(zoo.config(name), field)}
    model = zoo.build(name, torch.float64, **fields).to(device)
    return peftc.compile(RECIPES[recipe], model, seed=0, settings=settings_of(recipe), **options)


def settings_of(recipe: str) -> dict[str, Any]:
    """Sizes for small models."""
    method = next(s for s in read_spec(RECIPES[recipe]).statements if isinstance(s, ast.Method))
    own = {**SETTINGS, **SETTINGS_OF.get(recipe, {})}
    return {p.name: own[p.name] for p in method.params if p.name in own}
