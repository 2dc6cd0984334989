"""Edits as one LoRA for each Linear, by evaluating their equations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.addressing.sites import parameter_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.edited_model import Base
from peftc.exchange.low_rank_changes.approximation import change_of, nearest, nearest_product
from peftc.exchange.low_rank_changes.lora_weights import LoraWeights, chosen_alphas, joined
from peftc.exchange.low_rank_changes.products import products
from peftc.exchange.peft_format.folder import PREFIX
from peftc.exchange.peft_format.names import pattern_of, target_names
from peftc.exchange.stacked_export import StackedLora, is_stacked, stacked_loras, tensor_prefixes, unscaled
from peftc.folding.own_forward import base_class
from peftc.folding.unrounded_parameters import Fold
from peftc.folding.weights import Folding
from peftc.planning.foldability.affine import ONE_ADAPTER, NotAffine, affine_structure, fold_target, of_adapters
from peftc.planning.ir import SiteEdit

FoldsByModule = dict[str, list[Fold]]


@dataclass(eq=False)
class LoraAdapter:
    """LoRA of some modules and parameters, by dotted name. `tables`: which are embeddings."""

    weights: dict[str, LoraWeights] = field(default_factory=dict[str, LoraWeights])
    stacked: dict[str, StackedLora] = field(default_factory=dict[str, StackedLora])  # of parameters
    prefixes: dict[str, str] = field(default_factory=dict[str, str])  # of their tensors
    tables: set[str] = field(default_factory=set[str])
    transposed: bool = False  # all modules store their weight (in, out)
    dropout: float = 0.0
    errors: dict[str, float] = field(default_factory=dict[str, float])  # of approximations
    notes: list[str] = field(default_factory=list[str])


def folds_of(folding: Folding) -> FoldsByModule:
    """The edits by the module that they change, in the order in which they act.

    Raises: P801 for one that is no change of a Linear.
    """
    for site_edit in folding.record.site_edits:
        if site_edit.instances and (tasks := site_edit.instances[0].tasks):
            if site_edit.instances[0].are_adapters:
                raise no_product(site_edit.edit, of_adapters(tasks), ONE_ADAPTER)
            raise no_form(site_edit.edit, f"it has parameters for each task ({', '.join(tasks)})")
        target = fold_target(site_edit, folding.sites)
        if isinstance(target, str):
            raise no_product(site_edit.edit, _reason(site_edit) or target)
    groups = folding.folds(folding.names)
    return {module: sorted(own, key=lambda fold: fold.position) for module, own in groups.items()}


def _reason(site_edit: SiteEdit) -> str | None:
    try:
        affine_structure(site_edit, site_edit.site.states.keys())
    except NotAffine as error:
        return error.reason
    return None


def no_form(edit: str, reason: str, help_: str | None = None) -> PeftcError:
    message = f"edit `{edit}` has no exact form in the other program: {reason}"
    return PeftcError(Diagnostic("P801", message, help=help_))


def no_product(edit: str, reason: str, help_: str | None = None) -> PeftcError:
    """The same of what is written as LoRA, whichever program reads it."""
    return PeftcError(Diagnostic("P801", f"edit `{edit}` is no product of low rank: {reason}", help=help_))


def lora_of(base: Base, folding: Folding, max_rank: int | None = None, svd: bool = False) -> LoraAdapter:
    """Args: `svd`: changes of a higher rank become the nearest ones of rank `max_rank`.

    Raises: P801 (an edit that is no product of low rank), P805 (a higher rank), P806 (no weights).
    """
    adapter = LoraAdapter()
    for module, folds in folds_of(folding).items():
        if is_stacked(folds):
            adapter.stacked |= _stacked(base, folding.model, module, folds, max_rank)
            continue
        weights, error = module_lora(base, folding.model, module, folds, max_rank if svd else None)
        if max_rank is not None and weights.rank > max_rank:
            help_ = "`svd=True`, or `--svd`, writes the nearest change of this rank, and says how near it is"
            raise _too_high(module, weights, max_rank, help_)
        adapter.weights[module] = weights
        if error is not None:
            adapter.errors[module] = error
        if issubclass(_class(folding.model, module, folds), nn.Embedding):
            adapter.tables.add(module)
    classes = {base_class(folding.model.get_submodule(module)) for module in adapter.weights}
    adapter.transposed = bool(classes) and all(issubclass(cls, Conv1D) for cls in classes)
    adapter.prefixes = tensor_prefixes(folding.model, list(adapter.stacked))
    set_dropout(adapter, folding)
    if adapter.stacked and adapter.transposed:
        raise no_form(
            folding.names[0], "PEFT has no LoRA of a parameter beside one of Linears that are stored (in, out)"
        )
    if adapter.stacked and adapter.dropout:
        adapter.notes.append(f"its dropout of {adapter.dropout:g} is left out: PEFT has none at parameters")
        adapter.dropout = 0.0
    return adapter


def _stacked(
    base: Base, model: nn.Module, module: str, folds: list[Fold], max_rank: int | None
) -> dict[str, StackedLora]:
    """Raises: P801, P805, P806."""
    try:
        loras = stacked_loras(base, model, module, folds, _dtype(folds))
    except NotAffine as error:
        raise no_product(_names(folds), error.reason) from error
    for name, weights in loras.items():
        if max_rank is not None and weights.rank > max_rank:
            raise _too_high(name, weights, max_rank, None)
    return loras


def _too_high(name: str, weights: LoraWeights, max_rank: int, help_: str | None) -> PeftcError:
    return PeftcError(Diagnostic("P805", f"`{name}` has the rank {weights.rank}, above {max_rank}", help=help_))


def _names(folds: list[Fold]) -> str:
    return ", ".join(dict.fromkeys(fold.site_edit.edit for fold in folds))


def _dtype(folds: list[Fold]) -> torch.dtype:
    return next((p.dtype for fold in folds for form in fold.modules.values() for p in form.parameters()), torch.float32)


def module_lora(
    base: Base, model: nn.Module, module: str, folds: list[Fold], nearest_rank: int | None
) -> tuple[LoraWeights, float | None]:
    """The change of a module, and the error of an approximation. Raises: P801, P806."""
    cls = _class(model, module, folds)
    edits, dtype = _names(folds), _dtype(folds)
    try:
        weights = joined(products(folds, base), dtype)
        return (
            (weights, None)
            if nearest_rank is None or weights.rank <= nearest_rank
            else nearest_product(weights, nearest_rank)
        )
    except NotAffine as error:
        if nearest_rank is None or issubclass(cls, nn.Embedding):
            help_ = "`max_rank=r, svd=True` (`--max-rank R --svd`) writes the nearest change, and says how near it is"
            has_nearest = not issubclass(cls, nn.Embedding) and _has_change(base, model, module, folds)
            raise no_product(edits, error.reason, help_ if has_nearest else None) from error
    try:
        return nearest(_change(base, model, module, folds), nearest_rank, dtype)
    except NotAffine as error:
        raise no_product(edits, error.reason) from error


def _change(base: Base, model: nn.Module, module: str, folds: list[Fold]) -> Tensor:
    """Raises: NotAffine as `change_of`, P806."""
    with base.values([parameter_name(ref) for fold in folds for ref in fold.target.refs]):
        return change_of(model, module, folds)


def _has_change(base: Base, model: nn.Module, module: str, folds: list[Fold]) -> bool:
    """Whether a module has a nearest change, as far as its weights are there to tell."""
    try:
        _change(base, model, module, folds)
    except NotAffine:
        return False
    except PeftcError:
        return True
    return True


def _class(model: nn.Module, module: str, folds: list[Fold]) -> type[nn.Module]:
    """The class of a module that PEFT gives LoRA as a product. Raises: P801."""
    cls = base_class(model.get_submodule(module))
    if issubclass(cls, nn.Linear | Conv1D | nn.Embedding):
        return cls
    raise no_product(folds[0].site_edit.edit, f"`{module}` is a {cls.__name__}, no Linear")


def set_dropout(adapter: LoraAdapter, folding: Folding) -> None:
    instances = [one for site_edit in folding.record.site_edits for one in site_edit.instances]
    rates = {float(args["dropout"]) for one in instances if "dropout" in (args := one.form.fill(one.args))}  # pyright: ignore[reportArgumentType]
    if len(rates) == 1:
        (adapter.dropout,) = rates
    elif rates:
        adapter.notes.append("its edits have several dropout rates, and the other program has one: 0")


def lora_config(adapter: LoraAdapter, modules: list[str]) -> dict[str, Any]:
    """`r`, `lora_alpha` and the names; patterns where modules differ. Raises: P801."""
    every = adapter.weights | adapter.stacked
    chosen = chosen_alphas([(weights.scale, weights.rank) for weights in every.values()])
    if chosen is None:
        adapter.weights = {name: unscaled(weights) for name, weights in adapter.weights.items()}
        adapter.stacked = {name: unscaled(weights) for name, weights in adapter.stacked.items()}
        chosen = False, [float(weights.rank) for weights in every.values()]
    rslora, alphas = chosen
    r, ranks = pattern_of({name: weights.rank for name, weights in every.items()})
    alpha, others = pattern_of(dict(zip(every, map(_whole, alphas), strict=True)))
    return {
        "peft_type": "LORA",
        "r": r,
        "rank_pattern": ranks,
        "lora_alpha": alpha,
        "alpha_pattern": others,
        "use_rslora": rslora,
        "use_dora": False,
        "lora_dropout": adapter.dropout,
        "fan_in_fan_out": adapter.transposed,
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": target_names(list(adapter.weights), modules),
        **({"target_parameters": list(adapter.stacked)} if adapter.stacked else {}),
    }


def _whole(alpha: float) -> float:
    return int(alpha) if float(alpha).is_integer() else alpha


def lora_tensors(adapter: LoraAdapter) -> Iterator[tuple[str, Tensor]]:
    for module, weights in adapter.weights.items():
        if module in adapter.tables:
            yield f"{PREFIX}{module}.lora_embedding_A", weights.a
            yield f"{PREFIX}{module}.lora_embedding_B", weights.b
        else:
            yield f"{PREFIX}{module}.lora_A.weight", weights.a
            yield f"{PREFIX}{module}.lora_B.weight", weights.b
    for name, weights in adapter.stacked.items():
        yield f"{PREFIX}{adapter.prefixes[name]}.lora_A.weight", weights.a
        yield f"{PREFIX}{adapter.prefixes[name]}.lora_B.weight", weights.b


def names_of(tensors: Mapping[str, Tensor]) -> set[str]:
    return {name.removeprefix(PREFIX) for name in tensors}
