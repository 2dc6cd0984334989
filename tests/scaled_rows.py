"""Whether an edit of a role is at the right rows: scaling what they compute is scaling the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import peftc


def assert_scales(
    model: nn.Module,
    sample: Mapping[str, Any],
    selector: str,
    rows_of: Callable[[Any], Sequence[Sequence[Tensor]]],
) -> None:
    """Compares an edit that scales all features at a selector with a copy of the model whose rows
    are scaled.

    Args: `rows_of`: of a model, for each of the sites in their order, the views of weights and
    biases with one row a feature.
    """
    edited, scaled = deepcopy(model).double().eval(), deepcopy(model).double().eval()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in sample.items()}
    with torch.no_grad():
        base = edited(**inputs)
        peftc.compile(f"peft 1\nedit e at {selector} {{ h *= vector(init=1) }}\n", edited, seed=0, sample=inputs)
        rows = rows_of(scaled)
        scales = list(peftc.parameters(edited).values())
        assert len(scales) == len(rows)
        for scale, views in zip(scales, rows, strict=True):
            scale.uniform_(0.5, 1.5)
            for view in views:
                view.mul_(scale.unflatten(0, (-1, *[1] * (view.ndim - 1))))
        actual, expected = edited(**inputs), scaled(**inputs)
    for one, other, before in zip(*map(_tensors, (actual, expected, base)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(one, before)


def _tensors(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
