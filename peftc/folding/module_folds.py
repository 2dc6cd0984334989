"""All folds into the parameters of one module, in the order in which the model applies the edits; rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from peftc.addressing.sites import WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.affine_values import Refusal, folded_terms
from peftc.folding.report import Change
from peftc.forms.module import FormModule
from peftc.planning.foldability.target import FoldTarget
from peftc.planning.ir import SiteEdit
from peftc.rewriting.insert import layout
from peftc.runtime.parameters import blocks_of, dense, stacked_slice


@dataclass(frozen=True, eq=False)
class Fold:
    """One edit at one site, about to be folded. `position` orders edits as the model applies them."""

    placed: SiteEdit
    target: FoldTarget
    modules: Mapping[str, FormModule]  # by `Instance.key`
    position: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NewValue:
    """A parameter after folding, in its dtype and layout, and what is said of it."""

    value: Tensor
    change: Change


@dataclass(eq=False)
class CannotFold(Exception):
    """An edit for which there is no place, found out only here."""

    edit: str
    reason: str


def combine(model: nn.Module, module: str, folds: Sequence[Fold]) -> dict[str, NewValue]:
    """The parameters of `module` after all folds into it, by dotted name. Nothing of the model changes.

    w and b first, as when the model runs; then what is done to the output; what is done to the input last and backwards,
    since W (E2 (E1 x)) = ((W E2) E1) x. Sums are in float32 (float64 where the weight is) until the end.

    Raises: P530 where an entry is NaN or infinite. CannotFold where a bias is needed and the module has no place for it.
    """
    wide = Wide(model, module)
    ordered = sorted(folds, key=lambda fold: fold.position)
    for fold in ordered:
        _apply(fold, wide, "weight")
    for fold in ordered:
        if fold.target.side == "output":
            _apply(fold, wide, "output")
    for fold in reversed(ordered):
        if fold.target.side == "input":
            _apply(fold, wide, "input")
    edits = tuple(dict.fromkeys(fold.placed.edit for fold in ordered))
    return dict(wide.rounded(edits))


@dataclass
class Wide:
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
        """The rows of a site as (blocks, rows of a block, in); what is written into them is kept."""
        if ref.attribute not in self.values:
            stored = dense(getattr(self.model.get_submodule(self.module), ref.attribute).detach())
            self.values[ref.attribute] = stored.to(_wide(stored.dtype), copy=True)
        tensor = self.values[ref.attribute]
        if ref.stacked_slice is not None:
            tensor = stacked_slice(tensor, ref.stacked_slice.count, ref.stacked_slice.index)
        tensor = tensor.t() if ref.transposed else tensor
        if ref.rows is None or ref.rows.count == 1:
            return (tensor if ref.rows is None else tensor[ref.rows.start : ref.rows.stop]).unsqueeze(0)
        return blocks_of(tensor, 0, *layout(ref.rows, tensor.shape[0]))

    def bias(self, target: FoldTarget) -> WeightRef | None:
        """The site's bias, one that an earlier fold made included."""
        if target.bias is None and "bias" in self.values and target.weight is not None:
            return WeightRef(self.module, "bias", target.weight.rows)
        return target.bias

    def create_bias(self, fold: Fold) -> WeightRef:
        module, weight = self.model.get_submodule(self.module), fold.target.weight
        if not is_linear(module) or weight is None:
            reason = f"`{self.module}` has no bias to hold a constant, and a {type(module).__name__} takes none"
            raise CannotFold(fold.placed.edit, reason)
        self.values["bias"] = self.values["weight"].new_zeros(self.values["weight"].shape[0])
        return WeightRef(self.module, "bias", weight.rows)

    def rounded(self, edits: tuple[str, ...]) -> Iterable[tuple[str, NewValue]]:
        own = self.model.get_submodule(self.module)
        for attribute, value in self.values.items():
            old = getattr(own, attribute)
            created = old is None
            like = dense(own.get_parameter("weight") if created else old)
            before = torch.zeros_like(value, dtype=like.dtype) if created else like.detach()
            name = f"{self.module}.{attribute}".lstrip(".")
            new = value.to(like.dtype)
            if not bool(new.isfinite().all()):
                raise _not_finite(name, like.dtype, edits)
            entries = int(torch.count_nonzero(new != before))
            wanted = entries if new.dtype == value.dtype else int(torch.count_nonzero(value != before.to(value.dtype)))
            if not wanted and not created:
                continue
            dtype = str(like.dtype).removeprefix("torch.")
            survived = entries / wanted if wanted else 1.0
            yield name, NewValue(new, Change(name, new.numel(), entries, survived, dtype, created, edits))


def is_linear(module: nn.Module) -> bool:
    """An nn.Linear that computes as one, whatever edits did to its class."""
    kind = getattr(type(module), "_peftc_kind", None)
    base: type[nn.Module] = type(module) if kind is None else kind.base
    return issubclass(base, nn.Linear) and base.forward is nn.Linear.forward


def _apply(fold: Fold, wide: Wide, side: str) -> None:
    """Folds the equations of w and b (side "weight"), or those of the hidden state."""
    placed, target = _part(fold.placed, weights=side == "weight"), fold.target
    if not placed.assigns:
        return
    bias = wide.bias(target)
    own = target.weight or bias  # a place of a bias alone has no equation of the weight
    assert own is not None
    values = wide.read(own), None if bias is None else wide.read(bias)
    folded = folded_terms(placed, fold.modules, *values, "weight" if side == "weight" else target.side)
    if isinstance(folded, Refusal):
        raise CannotFold(fold.placed.edit, folded.reason)
    if target.weight is not None:
        wide.write(target.weight, folded[0])
    if folded[1] is not None:
        wide.write(bias or wide.create_bias(fold), folded[1])


def _part(placed: SiteEdit, weights: bool) -> SiteEdit:
    """The equations of w and b, or the others; what `let` binds stands before the same equations as it did."""
    kept = [(a.state in ("w", "b")) == weights for a in placed.assigns]
    assigns = tuple(a for a, keep in zip(placed.assigns, kept, strict=True) if keep)
    lets = tuple((sum(kept[:i]), term) for i, term in placed.lets)
    return replace(placed, assigns=assigns, lets=lets)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _not_finite(name: str, dtype: torch.dtype, edits: tuple[str, ...]) -> PeftcError:
    what = f"`{name}` would have NaN or infinite entries in {str(dtype).removeprefix('torch.')}"
    return PeftcError(Diagnostic("P530", what, notes=(f"after folding {', '.join(edits)}", "nothing was written")))
