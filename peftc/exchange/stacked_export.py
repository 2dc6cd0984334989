"""LoRA of the experts that lie in one parameter: PEFT's `target_parameters`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from peftc.addressing.sites import WeightRef, parameter_name
from peftc.exchange.low_rank_changes.lora_weights import LoraWeights, joined
from peftc.exchange.low_rank_changes.products import Weights, products
from peftc.folding.unrounded_parameters import Fold
from peftc.planning.foldability.affine import NotAffine, show_term

Lora = TypeVar("Lora", bound=LoraWeights)


@dataclass(frozen=True, eq=False)
class StackedLora(LoraWeights):
    """W_e + scale · B_e A_e for each expert e of a parameter.

    Shapes: A (experts · r, in), expert by expert; B (out, r · experts), rank by rank, as PEFT
    reshapes them. Source: `ParamWrapper.get_delta_weight` of PEFT 0.21.
    """

    experts: int = 1

    @property
    def rank(self) -> int:
        return self.a.shape[0] // self.experts

    def matrix(self) -> Tensor:
        """(experts, out, in) in float64."""
        a = self.a.double().unflatten(0, (self.experts, -1))
        b = self.b.double().unflatten(1, (-1, self.experts))
        return self.scale * torch.einsum("ore,eri->eoi", b, a)


def is_stacked(folds: list[Fold]) -> bool:
    return all(fold.target.weight is not None and fold.target.weight.stacked_slice is not None for fold in folds)


def stacked_loras(
    weights: Weights, model: nn.Module, module: str, folds: list[Fold], dtype: torch.dtype
) -> dict[str, StackedLora]:
    """By the name of the parameter. Raises: NotAffine for changes that PEFT has no form for."""
    by_parameter: dict[str, dict[int, list[Fold]]] = {}
    for fold in folds:
        ref = _slice_of(fold, model)
        assert ref.stacked_slice is not None
        experts = by_parameter.setdefault(parameter_name(ref), {})
        experts.setdefault(ref.stacked_slice.index, []).append(fold)
    is_transposed = bool(getattr(model.get_submodule(module), "is_transposed", False))  # as PEFT asks
    return {
        name: _stacked({e: joined(products(own, weights), dtype) for e, own in experts.items()}, ref, is_transposed)
        for name, experts in by_parameter.items()
        for ref in [_slice_of(next(iter(experts.values()))[0], model)]
    }


def _slice_of(fold: Fold, model: nn.Module) -> WeightRef:
    """Raises: NotAffine unless it is one of several matrices of a parameter of three dimensions."""
    ref, term = fold.target.weight, fold.site_edit.assigns[-1].value
    assert ref is not None
    assert ref.stacked_slice is not None
    name = parameter_name(ref)
    if model.get_parameter(name).ndim != 3 or ref.stacked_slice.count == 1:
        raise NotAffine(f"`{show_term(term)}` changes `{name}`, which has no dimension of experts", term)
    if ref.layout is not None:
        raise NotAffine(f"`{show_term(term)}` changes `{name}`, of which PEFT reads the dimensions otherwise", term)
    return ref


def _stacked(loras: dict[int, LoraWeights], ref: WeightRef, is_transposed: bool) -> StackedLora:
    """Experts without an edit, and ranks that others have more, are zeros."""
    assert ref.stacked_slice is not None
    count, rank = ref.stacked_slice.count, max(own.rank for own in loras.values())
    scales = {own.scale for own in loras.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    first = next(iter(loras.values()))
    a = first.a.new_zeros(count, rank, first.a.shape[1])
    b = first.b.new_zeros(first.b.shape[0], rank, count)
    exact = True
    for expert, own in loras.items():
        values = own.b if own.scale == scale else own.b.double() * own.scale
        a[expert, : own.rank], b[:, : own.rank, expert] = own.a, values
        exact = exact and own.exact and torch.equal(b[:, : own.rank, expert].double(), values.double())
    if ref.transposed != is_transposed:  # PEFT takes (in, out) for (out, in): Δᵀ = Aᵀ Bᵀ
        a, b = b.permute(2, 1, 0), a.permute(2, 1, 0)
    a, b = a.reshape(-1, a.shape[-1]).contiguous(), b.reshape(b.shape[0], -1).contiguous()
    return StackedLora(a, b, scale, exact, experts=count)


def tensor_prefixes(model: nn.Module, names: list[str]) -> dict[str, str]:
    """What stands before `lora_A` for each parameter: PEFT wraps the module once for each of its
    parameters, the first innermost.
    """
    prefixes = dict[str, str]()
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
        order = [f"{module}.{own}" for own, _ in model.get_submodule(module).named_parameters(recurse=False)]
        own = [name for name in order if name in names]
        prefixes |= {name: module + ".base_layer" * (len(own) - 1 - i) for i, name in enumerate(own)}
    return prefixes


def unscaled(weights: Lora) -> Lora:
    """With the scale in B."""
    b = weights.b.double() * weights.scale
    own = b.to(weights.b.dtype)
    return replace(weights, b=own, scale=1.0, exact=weights.exact and torch.equal(own.double(), b))
