"""Running a tiny model and looking at what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def run(model: nn.Module, inputs: Mapping[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)  # some models draw in forward (hashing attention)
    return model(**inputs, **more)


def main_output(out: Any) -> torch.Tensor:
    """The logits, or the first floating tensor."""
    logits = getattr(out, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else next(tensors(out))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every floating tensor in an output, in order; caches are not outputs."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors(inner)


def finite(out: Any) -> bool:
    return bool(torch.isfinite(main_output(out)).all())


def same(one: Any, other: Any) -> bool:
    """Bit for bit, tensor by tensor."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)
