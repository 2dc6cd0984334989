"""The nearest change of a rank: by singular values, which is the best in ‖·‖ (Eckart and Young)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from peftc.exchange.low_rank_changes.lora_weights import LoraWeights
from peftc.folding.module_folds import unrounded
from peftc.folding.unrounded_parameters import CannotFold, Fold
from peftc.planning.foldability.affine import NotAffine


def change_of(model: nn.Module, module: str, folds: Sequence[Fold]) -> Tensor:
    """W' − W of a module as `fold` computes it. Shapes: (out, in).

    Raises: NotAffine for edits that do not fold, or that change the bias.
    """
    last = folds[-1].site_edit.assigns[-1].value
    try:
        parameters = unrounded(model, module, folds)
    except CannotFold as error:
        raise NotAffine(error.reason, last) from error
    weight = folds[0].target.weight
    assert weight is not None
    own = parameters.name(weight)
    for name, value in {**parameters.values, **parameters.sums}.items():
        new = value if isinstance(value, Tensor) else value.tensor()
        before = parameters.before.get(name)
        if name != own and bool((new if before is None else new - before.to(new.dtype)).any()):
            raise NotAffine("it changes the bias", last)
    whole = replace(weight, rows=None)
    return parameters.matrix(whole) - parameters.as_matrix(parameters.stored(whole), whole)


def nearest(change: Tensor, rank: int, dtype: torch.dtype) -> tuple[LoraWeights, float]:
    """B A of a rank with ‖Δ − B A‖ least, and ‖Δ − B A‖ / ‖Δ‖."""
    u, s, vh = torch.linalg.svd(change.double(), full_matrices=False)
    return _parts(u, s, vh, rank, dtype)


def nearest_product(weights: LoraWeights, rank: int) -> tuple[LoraWeights, float]:
    """The same of a product of thin matrices, which is never formed."""
    left, upper = torch.linalg.qr(weights.b.double() * weights.scale)
    right, lower = torch.linalg.qr(weights.a.double().t())
    u, s, vh = torch.linalg.svd(upper @ lower.t())
    return _parts(left @ u, s, vh @ right.t(), rank, weights.b.dtype)


def _parts(u: Tensor, s: Tensor, vh: Tensor, rank: int, dtype: torch.dtype) -> tuple[LoraWeights, float]:
    rank = min(rank, len(s))
    root = s[:rank].sqrt()
    b, a = (u[:, :rank] * root).to(dtype).contiguous(), (root[:, None] * vh[:rank]).to(dtype).contiguous()
    total = float(s.square().sum())
    rounding = b.double() @ a.double() - (u[:, :rank] * s[:rank]) @ vh[:rank]
    left = float(s[rank:].square().sum()) + float(rounding.square().sum())
    return LoraWeights(a, b, 1.0, exact=False), (left / total) ** 0.5 if total else 0.0
