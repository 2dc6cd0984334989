"""Weights of the base as `nn.Linear` stores them, whatever their layout."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import torch
from torch import nn

from peftc.addressing.sites import Site, WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.offload import offloaded_value
from peftc.modules.packed import packed_names
from peftc.modules.sharded_tensors import is_sharded, whole
from peftc.rewriting.legality.preconditions import missing_values
from peftc.rewriting.node_builder import row_arguments
from peftc.runtime.parameters import as_matrix, dense, dense_parameter, is_quantised, rows_of, stacked_slice


class BaseWeights(Mapping[str, torch.Tensor]):
    """Weights that the initial values of a form may depend on, read when the form asks for them."""

    def __init__(self, model: nn.Module, site: Site, form: str) -> None:
        self.model, self.site, self.form = model, site, form

    @cached_property
    def weights(self) -> dict[str, WeightRef]:
        return {name: state.weight for name, state in self.site.states.items() if state.weight is not None}

    def __getitem__(self, key: str) -> torch.Tensor:
        ref = self.weights[key]
        module = self.model.get_submodule(ref.module)
        stored: torch.Tensor = getattr(module, ref.attribute)
        value = offloaded_value(module, ref.attribute) if stored.is_meta else None
        value = whole(stored) if value is None and is_sharded(stored) else value
        weight = view_of(dense_parameter(module, ref.attribute) if value is None else dense(value), ref).detach()
        if weight.is_meta:
            raise PeftcError(missing_values([f"{key} of {self.form}"], "the initial values are computed from it"))
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def view_of(tensor: torch.Tensor, ref: WeightRef) -> torch.Tensor:
    """A weight (out, in), the rows of a site alone; or its gradient, stored as the parameter is."""
    if ref.stacked_slice is not None:
        tensor = stacked_slice(tensor, ref.stacked_slice.count, ref.stacked_slice.index)
    if ref.layout is not None:
        tensor = as_matrix(tensor, ref.layout.order, ref.layout.rows)
    tensor = tensor.t() if ref.transposed else tensor
    if ref.rows is None:
        return tensor
    if ref.rows.count == 1:
        return tensor[ref.rows.start : ref.rows.stop]
    return rows_of(tensor, 0, *row_arguments(ref.rows, tensor.shape[0]))


def refuse_quantised(model: nn.Module, parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Raises: P542 for parameters that are stored in few bits: no training step can change them."""
    names = tuple(names)
    packed = packed_names(model) if names else ()
    for name in names:
        parameter = parameters[name]
        if is_quantised(parameter) or not parameter.is_floating_point() or name in packed:
            kind = type(parameter.data).__name__ if is_quantised(parameter) else parameter.dtype
            help_ = "change it by an edit, such as `h += lora(x, r=8)`, and leave it as it is"
            raise PeftcError(Diagnostic("P542", f"`{name}` is quantised ({kind}) and cannot be trained", help=help_))
