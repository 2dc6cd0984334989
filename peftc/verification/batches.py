"""A short batch for any model, shaped as the one that it is traced with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.diagnostics import PeftcError
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.sample import sample_inputs
from peftc.models.tower_samples import run_on_sample

Batch = Mapping[str, Any]


def sample_batch(model: nn.Module, sample: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sample that the model was compiled with; else inputs of the same names and shapes as the tracer's, with values.

    Raises: P507 for a model whose inputs are not known.
    """
    if sample is not None:
        return dict(sample)
    fake = fake_copy(model)
    generator = torch.Generator().manual_seed(0)
    with suppress(PeftcError):  # P507, where a medium may do
        made = sample_inputs(fake)
        batch = {name: _filled(value, model, generator) for name, value in made.items()}
        if runs(model, batch):
            return batch
    with fake_mode(fake):
        made, _ = run_on_sample(fake, None, lambda given: fake(**given))
    return {name: _filled(value, model, generator, ids=False) for name, value in made.items()}


def runs(model: nn.Module, batch: Batch) -> bool:
    try:
        with torch.no_grad():
            model(**batch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # whatever the model's own code raises
        return False
    return True


def _filled(value: Any, model: nn.Module, generator: torch.Generator, ids: bool = True) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not ids and not value.is_floating_point() and not isinstance(value, FakeTensor):
        return value  # made together with a medium: its places among the tokens, its sizes
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return torch.randint(*_tokens(model), value.shape, generator=generator).to(value.device)


def _tokens(model: nn.Module) -> tuple[int, int]:
    """A range of token ids without those that mean something else, which are mostly the first ones."""
    count = next(filter(None, map(_vocabulary, model.modules())), 2)
    config: Any = getattr(model, "config", None)
    special = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "mask"))
    last = max((one for one in special if isinstance(one, int) and one < count // 2), default=0)
    return (last + 1, count) if last + 1 < count else (0, count)


def _vocabulary(module: nn.Module) -> int | None:
    """How many token ids a model, or a part of one, embeds; None where it says nothing of it."""
    try:
        return getattr(module.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # of several towers, of another kind of module
        return None
