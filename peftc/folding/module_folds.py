"""All folds into the parameters of one module, in the order of the edits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from peftc.adapters.weight_access import dtype_name
from peftc.addressing.sites import WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.affine_values import Refusal, fold_terms, sum_dtype
from peftc.folding.report import Change
from peftc.forms.module import FormModule
from peftc.planning.foldability.target import FoldTarget
from peftc.planning.ir import SiteEdit
from peftc.rewriting.node_builder import row_arguments
from peftc.runtime.parameters import blocks_of, dense, stacked_slice


@dataclass(frozen=True, eq=False)
class Fold:
    """One edit at one site, to be folded. `position` orders edits as the model applies them."""

    site_edit: SiteEdit
    target: FoldTarget
    modules: Mapping[str, FormModule]  # by `FormInstance.key`
    position: tuple[int, ...]


@dataclass(eq=False)
class CannotFold(Exception):
    """An edit that planning takes for foldable, and that has no parameter to be folded into."""

    edit: str
    reason: str


def combine(model: nn.Module, module: str, folds: Sequence[Fold]) -> dict[str, tuple[Tensor, Change]]:
    """The parameters of `module` after all folds into it, by dotted name, in their dtypes and
    layouts. Nothing of the model changes.

    w and b first, as when the model runs; then what is done to the output; what is done to the
    input last and backwards, since W (E2 (E1 x)) = ((W E2) E1) x. Sums are in float32 (float64
    where the weight is) until the end.
    Raises: P530 where an entry is NaN or infinite. CannotFold where a bias is needed and the module
    has no place for it.
    """
    parameters = UnroundedParameters(model, module)
    ordered = sorted(folds, key=lambda fold: fold.position)
    for fold in ordered:
        _apply(fold, parameters, "weight")
    for side, folds_of_side in (("output", ordered), ("input", ordered[::-1])):
        for fold in folds_of_side:
            if fold.target.side == side:
                _apply(fold, parameters, side)
    edits = tuple(dict.fromkeys(fold.site_edit.edit for fold in ordered))
    return dict(parameters.rounded(edits))


@dataclass
class UnroundedParameters:
    """The weight and the bias of a module in the precision of the sums. Shapes: as stored."""

    model: nn.Module
    module: str
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def read(self, ref: WeightRef) -> Tensor:
        """The rows of a site, (out, in)."""
        return self.blocks(ref).flatten(0, 1)

    def write(self, ref: WeightRef, value: Tensor) -> None:
        """Replaces them."""
        blocks = self.blocks(ref)
        blocks.copy_(value.unflatten(0, tuple(blocks.shape[:2])))

    def blocks(self, ref: WeightRef) -> Tensor:
        """A view of the rows of a site: (blocks, rows of a block, in)."""
        if ref.attribute not in self.values:
            stored = dense(getattr(self.model.get_submodule(self.module), ref.attribute).detach())
            self.values[ref.attribute] = stored.to(sum_dtype(stored.dtype), copy=True)
        tensor = self.values[ref.attribute]
        if ref.stacked_slice is not None:
            tensor = stacked_slice(tensor, ref.stacked_slice.count, ref.stacked_slice.index)
        tensor = tensor.t() if ref.transposed else tensor
        if ref.rows is None or ref.rows.count == 1:
            return (tensor if ref.rows is None else tensor[ref.rows.start : ref.rows.stop]).unsqueeze(0)
        return blocks_of(tensor, 0, *row_arguments(ref.rows, tensor.shape[0]))

    def bias(self, target: FoldTarget) -> WeightRef | None:
        """The site's bias, one that an earlier fold made included."""
        if target.bias is None and "bias" in self.values and target.weight is not None:
            return WeightRef(self.module, "bias", target.weight.rows)
        return target.bias

    def create_bias(self, fold: Fold) -> WeightRef:
        module, weight = self.model.get_submodule(self.module), fold.target.weight
        if not is_linear(module) or weight is None:
            reason = f"`{self.module}` has no bias to hold a constant, and a {type(module).__name__} takes none"
            raise CannotFold(fold.site_edit.edit, reason)
        self.values["bias"] = self.values["weight"].new_zeros(self.values["weight"].shape[0])
        return WeightRef(self.module, "bias", weight.rows)

    def rounded(self, edits: tuple[str, ...]) -> Iterator[tuple[str, tuple[Tensor, Change]]]:
        module = self.model.get_submodule(self.module)
        for attribute, value in self.values.items():
            old = getattr(module, attribute)
            created = old is None
            like = dense(module.get_parameter("weight") if created else old)
            before = torch.zeros_like(value, dtype=like.dtype) if created else like.detach()
            name = f"{self.module}.{attribute}".lstrip(".")
            new = rounded(name, value, like.dtype, edits)
            entries = int(torch.count_nonzero(new != before))
            changed = entries if new.dtype == value.dtype else int(torch.count_nonzero(value != before.to(value.dtype)))
            if changed or created:
                survived = entries / changed if changed else 1.0
                dtype = dtype_name(like)
                yield name, (new, Change(name, new.numel(), entries, survived, dtype, created, edits))


def rounded(name: str, value: Tensor, dtype: torch.dtype, edits: tuple[str, ...]) -> Tensor:
    """A new value in the dtype of its parameter. Raises: P530 where an entry is NaN or infinite."""
    new = value.to(dtype)
    if not bool(new.isfinite().all()):
        message = f"`{name}` would have NaN or infinite entries in {dtype_name(new)}"
        notes = (f"after folding {', '.join(edits)}", "nothing was written")
        raise PeftcError(Diagnostic("P530", message, notes=notes))
    return new


def is_linear(module: nn.Module) -> bool:
    """An nn.Linear that computes as one, whatever edits did to its class."""
    generated = getattr(type(module), "_peftc_kind", None)
    base: type[nn.Module] = type(module) if generated is None else generated.base
    return issubclass(base, nn.Linear) and base.forward is nn.Linear.forward


def _apply(fold: Fold, parameters: UnroundedParameters, side: str) -> None:
    """Folds the equations of w and b (side "weight"), or those of the hidden state."""
    site_edit, target = fold.site_edit, fold.target
    selected = [(a.state in ("w", "b")) == (side == "weight") for a in site_edit.assigns]
    if not any(selected):
        return
    assigns = tuple(a for a, is_selected in zip(site_edit.assigns, selected, strict=True) if is_selected)
    lets = tuple((sum(selected[:i]), term) for i, term in site_edit.lets)  # after the same equations as before
    part = replace(site_edit, assigns=assigns, lets=lets)
    bias = parameters.bias(target)
    own = target.weight or bias  # a place of a bias alone has no equation of the weight
    assert own is not None
    values = parameters.read(own), None if bias is None else parameters.read(bias)
    folded = fold_terms(part, fold.modules, *values, "weight" if side == "weight" else target.side)
    if isinstance(folded, Refusal):
        raise CannotFold(fold.site_edit.edit, folded.reason)
    if target.weight is not None:
        parameters.write(target.weight, folded[0])
    if folded[1] is not None:
        parameters.write(bias or parameters.create_bias(fold), folded[1])
