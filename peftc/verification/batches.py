"""A short batch for any model, shaped as the one that it is traced with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftc.model.fakes import fake_copy
from peftc.model.sample import sample_inputs

Batch = Mapping[str, Any]


def sample_batch(model: nn.Module, sample: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sample that the model was compiled with; else inputs of the same names and shapes as the tracer's, with values.

    Raises: P507 for a model whose inputs are not known.
    """
    if sample is not None:
        return dict(sample)
    generator = torch.Generator().manual_seed(0)
    return {name: _filled(value, model, generator) for name, value in sample_inputs(fake_copy(model)).items()}


def _filled(value: Any, model: nn.Module, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return torch.randint(*_tokens(model), value.shape, generator=generator).to(value.device)


def _tokens(model: nn.Module) -> tuple[int, int]:
    """A range of token ids without those that mean something else, which are mostly the first ones."""
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    count: int = getattr(embeddings, "num_embeddings", 2)
    config: Any = getattr(model, "config", None)
    special = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "mask"))
    last = max((one for one in special if isinstance(one, int) and one < count // 2), default=0)
    return (last + 1, count) if last + 1 < count else (0, count)
