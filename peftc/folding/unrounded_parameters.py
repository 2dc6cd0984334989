"""The parameters of one module while edits are folded into it, before they are rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from peftc.addressing.sites import WeightRef, parameter_name
from peftc.folding.computed_weight import evaluated
from peftc.folding.own_forward import base_class
from peftc.folding.report import Change
from peftc.folding.rounding import WeightSums, is_run_of_entries, rounded_change
from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule
from peftc.planning.foldability.affine import FoldTarget
from peftc.planning.ir import SiteEdit
from peftc.rewriting.node_builder import row_arguments
from peftc.runtime.parameters import as_matrix, as_stored, blocks_of, dense, stacked_slice

NEW_KEY = "`{}.bias` would be a new key of the checkpoint, which its class does not read"


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


@dataclass
class UnroundedParameters:
    """The weight and the bias of a module, by dotted name, in the precision of the sums; the bias
    of a product in code may be another module's. Shapes: as stored.

    `values`: those that are computed. `sums`: those that are computed when they are rounded, some
    rows at a time. `before`: as they were. `created`: biases.
    """

    model: nn.Module
    module: str
    new_biases: bool = True
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    sums: dict[str, WeightSums] = field(default_factory=dict[str, WeightSums])
    created: set[str] = field(default_factory=set[str])
    before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def name(self, ref: WeightRef) -> str:
        """One name, under whichever of its names the module is read."""
        is_own = self.model.get_submodule(ref.module) is self.model.get_submodule(self.module)
        return parameter_name(replace(ref, module=self.module) if is_own else ref)

    def read(self, ref: WeightRef) -> Tensor:
        """The rows of a site, (out, in); in the parameter's dtype if no fold has changed them."""
        rows = self.stored_rows(ref)
        return self.blocks(self.matrix(ref), ref).flatten(0, 1) if rows is None else rows

    def write(self, ref: WeightRef, value: Tensor | Affine) -> None:
        """Replaces them, by a matrix or by that of an affine function."""
        rows = self.stored_rows(ref)
        if isinstance(value, Affine) and rows is not None and is_run_of_entries(rows, self.stored(ref)):
            self.sums.setdefault(self.name(ref), WeightSums(self.stored(ref))).add(rows, value)
            return
        matrix = self.matrix(ref)
        blocks = self.blocks(matrix, ref)
        value = value.matrix() if isinstance(value, Affine) else value
        blocks.copy_(value.unflatten(0, tuple(blocks.shape[:2])))
        if ref.layout is not None:  # the matrix may be a copy
            stored = self.values[self.name(ref)]
            stored.copy_(as_stored(matrix, stored, ref.layout.order))

    def stored(self, ref: WeightRef) -> Tensor:
        """The parameter, as it is."""
        if (name := self.name(ref)) not in self.before:
            self.before[name] = dense(evaluated(self.model.get_submodule(ref.module), ref.attribute).detach())
        return self.before[name]

    def stored_rows(self, ref: WeightRef) -> Tensor | None:
        """The rows of a site as stored; None if a fold has changed some, or if they lie apart."""
        name = self.name(ref)
        if name in self.values or ref.layout is not None:
            return None
        blocks = self.blocks(self.as_matrix(self.stored(ref), ref), ref)
        is_changed = name in self.sums and self.sums[name].overlaps(blocks)
        return None if len(blocks) != 1 or is_changed else blocks[0]

    def matrix(self, ref: WeightRef) -> Tensor:
        """The parameter as (out, in), in the precision of the sums."""
        if (name := self.name(ref)) not in self.values:
            stored = self.stored(ref)
            sums = self.sums.pop(name, None)
            self.values[name] = stored.to(sum_dtype(stored.dtype), copy=True) if sums is None else sums.tensor()
        return self.as_matrix(self.values[name], ref)

    def as_matrix(self, tensor: Tensor, ref: WeightRef) -> Tensor:
        if ref.stacked_slice is not None:
            tensor = stacked_slice(tensor, ref.stacked_slice.count, ref.stacked_slice.index)
        if ref.layout is not None:
            return as_matrix(tensor, ref.layout.order, ref.layout.rows)
        return tensor.t() if ref.transposed else tensor

    def blocks(self, tensor: Tensor, ref: WeightRef) -> Tensor:
        """A view of the rows of a site: (blocks, rows of a block, in)."""
        if ref.rows is None or ref.rows.count == 1:
            return (tensor if ref.rows is None else tensor[ref.rows.start : ref.rows.stop]).unsqueeze(0)
        return blocks_of(tensor, 0, *row_arguments(ref.rows, tensor.shape[0]))

    def bias(self, target: FoldTarget) -> WeightRef | None:
        """The site's bias, one that an earlier fold made included."""
        if target.bias is None and self.created and target.weight is not None:
            return WeightRef(self.module, "bias", target.weight.rows)
        return target.bias

    def create_bias(self, fold: Fold) -> WeightRef:
        module, weight = self.model.get_submodule(self.module), fold.target.weight
        if not is_linear_module(module) or weight is None:
            reason = f"`{self.module}` has no bias to hold a constant, and a {type(module).__name__} takes none"
            raise CannotFold(fold.site_edit.edit, reason)
        if not self.new_biases:
            raise CannotFold(fold.site_edit.edit, NEW_KEY.format(self.module))
        own, bias = self.stored(weight), WeightRef(self.module, "bias", weight.rows)
        self.values[self.name(bias)] = own.new_zeros(own.shape[0], dtype=sum_dtype(own.dtype))
        self.created.add(self.name(bias))
        return bias

    def rounded(self, edits: tuple[str, ...]) -> Iterator[tuple[str, tuple[Tensor, Change]]]:
        for name, value in [*self.values.items(), *self.sums.items()]:
            owner, created = name.rpartition(".")[0], name in self.created
            before = self.before.get(name)
            if isinstance(value, Tensor) and before is None:  # a new bias
                like = dense(evaluated(self.model.get_submodule(owner), "weight"))
                before = torch.zeros_like(value, dtype=like.dtype)
            assert before is not None
            new, change = rounded_change(name, before, value, edits, created)
            if change.entries or change.survived == 0 or created:
                yield name, (new, change)


def is_linear_module(module: nn.Module) -> bool:
    """An nn.Linear that computes as one, whatever edits did to its class."""
    base = base_class(module)
    return issubclass(base, nn.Linear) and base.forward is nn.Linear.forward


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
