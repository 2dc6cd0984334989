"""A model with the edits of an adapter, for which weights need not be there."""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.adapters.files import path_of, read_description
from peftc.adapters.loading import load
from peftc.addressing.sites import WeightRef, parameter_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.low_rank_changes.products import rows_of_site
from peftc.forms.module import has_values
from peftc.installation.completeness import active_installation
from peftc.installation.edited_classes import strip, true_parameter
from peftc.installation.record import find_installation
from peftc.installation.spec_names import with_note
from peftc.merging.base_model import BaseModel, load_adapters, open_base
from peftc.merging.checkpoint import placeholder
from peftc.models.skeleton import meta_model
from peftc.models.sources import ModelSource, has_local_weights, resolve
from peftc.runtime.parameters import as_matrix, dense_parameter

Model = str | PathLike[str] | nn.Module


@dataclass(eq=False)
class Base:
    """A base model. `checkpoint`: where its weights are read from; None if they are in memory, or
    not there (`has_weights`).
    """

    module: nn.Module
    id: str
    checkpoint: BaseModel | None = None
    has_weights: bool = True

    def weight(self, ref: WeightRef) -> Tensor:
        """The rows of a weight, in float64. Raises: P806."""
        name = parameter_name(ref)
        with self.values([name]):
            value = dense_parameter(self.module.get_submodule(ref.module), ref.attribute)
            value = as_matrix(value, ref.layout.order, ref.layout.rows) if ref.layout is not None else value
            value = value.t() if ref.transposed else value
            return rows_of_site(value, ref).flatten(0, 1).to(torch.float64, copy=True)

    def of_linear(self, module: str, name: str = "weight") -> Tensor:
        """The weight (out, in) or the bias of a Linear, in its dtype. Raises: P806."""
        with self.values([f"{module}.{name}"]):
            owner = self.module.get_submodule(module)
            value = dense_parameter(owner, name).clone()
            return value.t() if isinstance(owner, Conv1D) and name == "weight" else value

    @contextmanager
    def values(self, names: Collection[str]) -> Generator[None]:
        """Inside of the block, these parameters have their values. Raises: P806."""
        if not self.has_weights:
            message = f"what the edits make of `{next(iter(names))}` depends on it, and {self.id} has no weights here"
            raise PeftcError(
                Diagnostic("P806", message, help="name a folder with the weights as `model`, or `--model`")
            )
        with nullcontext() if self.checkpoint is None else self.checkpoint.loaded(names):
            parameters = dict(self.module.named_parameters(remove_duplicate=False))
            for name in names:
                if name in parameters and not has_values(parameters[name]):
                    raise PeftcError(Diagnostic("P806", f"`{name}` has no values", help="load the weights first"))
            yield

    def height(self, ref: WeightRef) -> int:
        """How many rows a weight has, as `nn.Linear` stores it."""
        shape = self.module.get_parameter(parameter_name(ref)).shape
        return shape[-1 if ref.transposed else -2]  # of each stacked slice

    def close(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.checkpoint.close()


def open_model(model: Model, trust_remote_code: bool = False) -> Base:
    """A model: with its weights where they are on this machine, else without.

    Raises: P501-P506 (the model), P701, P702 (its checkpoint).
    """
    if isinstance(model, nn.Module):
        return Base(model, resolve(model).id)
    source = resolve(model, trust_remote_code)
    if has_local_weights(source) and getattr(source.config, "quantization_config", None) is None:
        opened = open_base(model, trust_remote_code)
        return Base(opened.model, source.checkpoint, opened)
    return Base(_without_weights(source), source.checkpoint, None, has_weights=False)


def _without_weights(source: ModelSource) -> nn.Module:
    """The model of a configuration, whose weights take no memory."""
    module = meta_model(source)
    known: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in known:
                known[id(old)] = nn.Parameter(placeholder(old.shape, old.dtype), old.is_floating_point())
            setattr(owner, name, known[id(old)])
    return module


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy without edits, with its weights in the same memory, but for those that edits train."""
    record = find_installation(model)
    names = () if record is None else record.parameters_of_base
    own = {id(true_parameter(model, name)) for name in names}
    values = ((p, p.detach().clone() if id(p) in own else p.detach()) for p in model.parameters())
    memory = {id(p): nn.Parameter(value, p.requires_grad) for p, value in values}
    memory |= {id(b): b for b in model.buffers()}
    copied = copy.deepcopy(model, cast("dict[int, object]", memory))
    return copied if record is None else strip(copied)


@contextmanager
def edited(
    adapter: Model, model: Model | None, other_weights: bool = False, trust_remote_code: bool = False
) -> Generator[Base]:
    """A base with edits: a compiled model, or the base of a saved adapter, with it.

    Args: `model`: the base, by default the one whose name the adapter has. A module stays as it
        is: a copy without its edits, with the weights in the same memory, has those of the adapter.
    Raises: P410 (not compiled), P501-P506, P520-P525 (the adapter), P545.
    """
    if isinstance(adapter, nn.Module):
        if model is not None:
            raise PeftcError(Diagnostic("P545", "a compiled model is its own base", help="leave out `model`"))
        active_installation(adapter)
        yield Base(adapter, resolve(adapter).id)
        return
    path = path_of(adapter)
    with nullcontext() if model is not None else with_note("the adapter names this base; `model` names another"):
        own = bare_copy(model) if isinstance(model, nn.Module) else model
        base = open_model(read_description(path).base.id if own is None else own, trust_remote_code)
    try:
        _load(base, path, other_weights)
        yield base
    finally:
        base.close()


def _load(base: Base, path: Path, other_weights: bool) -> None:
    if base.checkpoint is not None:
        load_adapters(base.checkpoint, [path], other_weights)
    else:
        load(path, base.module, other_weights=other_weights or not base.has_weights)


def trained_values(base: Base, names: Collection[str]) -> dict[str, Tensor]:
    """Parameters of the base that `train` statements have changed."""
    parameters = cast(Any, dict(base.module.named_parameters(remove_duplicate=False)))
    return {name: parameters[name].detach() for name in names}
