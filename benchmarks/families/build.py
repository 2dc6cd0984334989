"""A tiny model of a type: its configuration shrunk, every parameter away from its default."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.families.images import with_image
from benchmarks.families.inputs import inputs_for
from benchmarks.families.overrides import defaults_of, overridden
from benchmarks.families.pairs import Pair, pair_of
from benchmarks.families.shrink import shrunk

MOST_PARAMETERS = 30_000_000


class Unbuildable(Exception):
    """A model that cannot be built here; the message says why."""


def build(mapping: str, model_type: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model in eval mode, in float32, without dropout, and the arguments of one forward.
    Deterministic.

    Raises: `Unbuildable` if the shrunken model would still be large; else whatever the model's own
    code raises.
    """
    pair = pair_of(mapping, model_type)
    model = instantiate(pair, config_of(pair), seed)
    inputs = inputs_for(model, pair, seed + 1)
    if mapping == "image-text-to-text" and "pixel_values" not in inputs and "input_ids" in inputs:
        inputs = with_image(model, inputs, torch.Generator().manual_seed(seed + 2))
    return model, inputs


def config_of(pair: Pair) -> PretrainedConfig:
    """The configuration of a type with its default values, made tiny."""
    values = overridden(pair.type, shrunk(defaults_of(pair.type, pair.config_class)))
    if pair.mapping == "causal-lm" and "is_decoder" in values:
        values["is_decoder"] = True  # else an encoder would be a decoder
    config = _part_for(pair.model_class, pair.config_class.from_dict(values))
    config.architectures = [pair.model]
    return config


def _part_for(model: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """Some mappings name the text part of a model: its class takes the inner configuration, as in
    the auto classes.
    """
    config_class = model.config_class
    if config_class is None or isinstance(config, config_class):
        return config
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return next((c for c in inner if isinstance(c, config_class)), config)


def instantiate(pair: Pair, config: PretrainedConfig, seed: int) -> nn.Module:
    with torch.device("meta"):
        count = sum(p.numel() for p in pair.model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise Unbuildable(f"its shrunken configuration still has {count / 1e6:.0f}M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = pair.model_class(config)
    randomise(model.float(), torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter again: matrices with a gain near one; vectors (biases, norms, decays)
    near what they were.

    A bias of zero or a norm of one would hide mistakes. Buffers are left alone; parameters tied to
    each other stay so.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():  # each once
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim < 2:
            parameter.add_(0.1 * noise)
        elif id(parameter) in embeddings:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * min(0.3, 1.2 * _fan_in(parameter) ** -0.5))


def _fan_in(parameter: torch.Tensor) -> int:
    # Of convolutions the whole kernel; of stacked experts the last dimension.
    return parameter.shape[-1] if parameter.ndim < 4 else parameter[0].numel()
