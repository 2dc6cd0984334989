"""How edited modules compute where tensor parallelism has split their weights over processes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.module import EquationModule
from peftc.forms.module import FormModule, has_values
from peftc.forms.shapes import Heads, KeyValue, Rows, Shape, Tokens
from peftc.modules.sharded_tensors import is_sharded
from peftc.modules.walk import modules_in
from peftc.planning import ir
from peftc.rewriting.edits import CONTAINER, SHARED, RegionEdit, RegionState
from peftc.sharding.derivation import Dimension, NotDerivable, edit_dimensions
from peftc.sharding.meshes import Meshes
from peftc.syntax.printer import print_expression

LAYOUT = "peftc_layout"  # attribute of an edited module
# Not empty once an edited module of this process has one: a look at it costs less than at a module.
LAYOUTS: list[bool] = []
_COLUMN, _ROW = 0, 1  # the dimension of a Linear's weight that is split: its results, or its inputs
_edited = weakref.WeakSet[nn.Module]()  # the models that have edits


@dataclass(frozen=True)
class FormTensor:
    """A parameter of a form: its module, from the container, its name, and the dimension that is
    split. `is_partial`: whether each rank has one part of the sum that is its gradient.
    """

    module: str
    name: str
    dimension: Dimension = None
    is_partial: bool = False


@dataclass(frozen=True, eq=False)
class Layout:
    """How the parameters of a module's edits are sharded, and how its call computes.

    Attributes:
        meshes: the processes.
        split: of a Linear, the dimension of its weight that is split; None for other modules.
        is_split: whether the equations compute with parts; else each rank computes with the whole.
        tensors: the parameters of the edits.
    """

    meshes: Meshes
    split: Dimension
    is_split: bool
    tensors: tuple[FormTensor, ...]

    def __deepcopy__(self, memo: object) -> Layout:
        return self


def note_edits(model: nn.Module) -> None:
    """Shards the edits of a compiled model as its weights are, now or once these are."""
    _edited.add(model)
    if dist.is_available() and dist.is_initialized() and (meshes := Meshes.of(model)) is not None:
        shard_edits(model, meshes)


def note_split(module: nn.Module) -> None:
    """Shards the edits of the model of a Linear that `parallelize_module` has just split."""
    weight: Any = vars(module)["_parameters"].get("weight")
    roots = [model for model in _edited if any(part is module for part in modules_in(model))]
    for root in roots or [module]:
        shard_edits(root, Meshes(weight.device_mesh, None, weight.device_mesh), module)


@torch.no_grad()
def shard_edits(model: nn.Module, meshes: Meshes, split: nn.Module | None = None) -> None:
    """Gives edited modules their layout, and their parameters their parts. Raises: P448, P449.

    Args: `split`: the module that has changed; others are those that it is the first one of.
    """
    regions = [module for module in modules_in(model) if is_region(module)]
    form = next((form for form in map(_further_form, regions) if form is not None), None)
    distributes = form is None and SHARED not in vars(model)["_modules"]
    if meshes.data is not None and not distributes:
        name = "a form" if form is None else f"`{form.definition.name}`"
        message = f"FSDP2 has the parameters of this model already, and {name} has more than parameters of its own"
        raise PeftcError(Diagnostic("P449", message, help="compile the model before `fully_shard`"))
    if split is not None:
        regions = [region for region in regions if region is split or not _is_known(region)]
    layouts = [(region, layout_of(region, meshes, distributes)) for region in regions]
    if not distributes:
        _share_values(model, regions, meshes.joint)
    for region, layout in layouts:
        for one in layout.tensors if distributes else ():
            _distribute(vars(region)["_modules"][CONTAINER].get_submodule(one.module), one, meshes)
        is_late = edits_heads(cast(Any, type(region))._peftc_kind) and not has_split_weights(region)
        if meshes.parallel is None or not is_late:  # of a late one the projections may be split later
            _set_layout(region, layout)


def note_call(region: nn.Module) -> None:
    """Gives a module whose edits change heads its layout, once its projections are split.

    Its parameters stay as they are: an optimizer may have them. Raises: P448.
    """
    forms = (p for p in vars(region)["_modules"][CONTAINER].parameters() if is_sharded(p))
    for parameter in (*_split_weights(region), *forms):
        mesh = cast(Any, parameter).device_mesh
        with torch.no_grad():
            _set_layout(region, layout_of(region, Meshes(mesh, None, mesh), distributes=False))
        return


def _set_layout(region: nn.Module, layout: Layout) -> None:
    vars(region)[LAYOUT] = layout
    LAYOUTS[:] = [True]


def has_split_weights(region: nn.Module) -> bool:
    return any(True for _ in _split_weights(region))


def _split_weights(region: nn.Module) -> Iterator[Tensor]:
    """The weights in a module, without those of its edits, that are split."""
    for name, child in vars(region)["_modules"].items():
        if child is not None and name != CONTAINER:
            yield from (parameter for parameter in child.parameters() if is_sharded(parameter))


def edits_heads(kind: Any) -> bool:
    """Whether edits of a `GeneratedClass` change heads of an attention."""
    return any(map(_heads, kind.edits))


def is_region(module: nn.Module) -> bool:
    return CONTAINER in vars(module)["_modules"] and hasattr(type(module), "_peftc_kind")


def _is_known(region: nn.Module) -> bool:
    return LAYOUT in vars(region) or any(map(is_sharded, vars(region)["_modules"][CONTAINER].parameters()))


def _further_form(region: nn.Module) -> FormModule | None:
    """A form of a module that has more than parameters of its own, if there is one."""
    for form in vars(region)["_modules"][CONTAINER].modules():
        if isinstance(form, FormModule):
            if not isinstance(form, EquationModule) or form.owner_module is not None or vars(form)["_buffers"]:
                return form
            if form.place.losses or form.place.layer_calls or form.place.budget:
                return form
    return None


def _share_values(model: nn.Module, regions: list[nn.Module], mesh: Any) -> None:
    """Gives the edits of all processes the values of the first one: seeds may differ."""
    containers = [vars(region)["_modules"][CONTAINER] for region in regions]
    containers += filter(None, [vars(model)["_modules"].get(SHARED)])
    tensors = {id(t): t for part in containers for t in (*part.parameters(), *part.buffers())}
    for tensor in filter(has_values, tensors.values()):
        dist.broadcast(tensor, group=mesh.get_group(), group_src=0)


def _distribute(form: nn.Module, one: FormTensor, meshes: Meshes) -> None:
    parameter: Any = vars(form)["_parameters"][one.name]
    torch_tensor = import_module("torch.distributed.tensor")  # slow to import
    placement = torch_tensor.Replicate() if one.dimension is None else torch_tensor.Shard(one.dimension)
    placements = meshes.placements(placement)
    if is_sharded(parameter):
        value = parameter.redistribute(meshes.joint, placements)
    else:
        value = torch_tensor.distribute_tensor(parameter.detach(), meshes.joint, placements)
    vars(form)["_parameters"][one.name] = nn.Parameter(value, requires_grad=parameter.requires_grad)


# Layouts ------------------------------------------------------------------------------------------


def layout_of(region: nn.Module, meshes: Meshes, distributes: bool) -> Layout:
    """The layout of an edited module. `distributes`: whether equations may be computed of parts.
    Raises: P448.
    """
    edits: tuple[RegionEdit, ...] = cast(Any, type(region))._peftc_kind.edits
    weight: Any = vars(region)["_parameters"].get("weight")
    if meshes.parallel is not None and is_sharded(weight) and weight.device_mesh.ndim == meshes.joint.ndim:
        return _layout_of_linear(region, edits, weight.placements[-1], meshes, distributes)
    is_parallel = meshes.parallel is not None and has_split_weights(region)
    dimensions = [_inside(region, edit) if is_parallel else ({}, False) for edit in edits]
    pairs = zip(edits, dimensions, strict=True)
    return Layout(meshes, None, False, tuple(one for edit, own in pairs for one in _tensors(region, edit, *own)))


def _layout_of_linear(
    region: nn.Module, edits: tuple[RegionEdit, ...], placement: Any, meshes: Meshes, distributes: bool
) -> Layout:
    torch_tensor = import_module("torch.distributed.tensor")
    split = next((d for d in (_COLUMN, _ROW) if placement == torch_tensor.Shard(d)), None)
    if not isinstance(region, nn.Linear) or split is None or getattr(region, "_hf_quantized_needs_local_tp", False):
        message = f"`{edits[0].edit}` edits a {type(region).__name__} whose weight is sharded as {placement}"
        help_ = "weights of Linears are sharded by rows or columns, and not quantised, where they are edited"
        raise PeftcError(Diagnostic("P448", message, help=help_))
    try:
        dimensions = [edit_dimensions(edit, _states_of_linear(edit, split)) for edit in edits] if distributes else None
    except NotDerivable:
        dimensions = None
    if dimensions is None:
        return Layout(meshes, split, False, tuple(one for edit in edits for one in _tensors(region, edit, {})))
    pairs = zip(edits, dimensions, strict=True)
    return Layout(meshes, split, True, tuple(one for edit, own in pairs for one in _tensors(region, edit, own)))


def _states_of_linear(edit: RegionEdit, split: int) -> dict[str, Dimension]:
    """The split dimension of each state: of a column-parallel Linear that of what it computes."""
    return {name: _split_of_state(state, split) for name, state in edit.states.items()}


def _split_of_state(state: RegionState, split: int) -> Dimension:
    if state.weight is not None:
        return split if state.weight.attribute == "weight" else 0 if split == _COLUMN else None
    is_input = state.anchor is not None and state.anchor.kind == "in"
    return 0 if is_input == (split == _ROW) else None


def _inside(region: nn.Module, edit: RegionEdit) -> tuple[dict[str, dict[str, Dimension]], bool]:
    """Of an edit in a module around Linears: the dimensions of its forms' parameters, and whether
    each rank has a part of their gradients. Raises: P448.
    """
    heads = _heads(edit)
    if not heads:
        _check_widths(region, edit)
        return {}, False
    terms = [term for assign in edit.assigns for term in ir.subterms(assign.value)]
    try:
        for term in terms:
            if isinstance(term, ir.Read) and term.state not in heads:
                raise NotDerivable(term.source, print_expression(term.source))
        return edit_dimensions(edit, heads), True
    except NotDerivable as error:
        message = f"`{edit.edit}` changes heads that are split over processes, and needs the whole of `{error.text}`"
        help_ = "edit the projections instead, or leave those of the attention whole in the plan"
        raise PeftcError(Diagnostic("P448", message, help=help_)) from None


def _check_widths(region: nn.Module, edit: RegionEdit) -> None:
    """Raises: P448 for a state between the Linears of a region, of whose features each rank has a
    part.
    """
    linears = [module for module in modules_in(region) if isinstance(module, nn.Linear) and is_sharded(module.weight)]
    column, row = (_linears_of(linears, dimension) for dimension in (_COLUMN, _ROW))
    widths = {m.out_features for m in column} | {m.in_features for m in row}
    widths -= {m.in_features for m in column} | {m.out_features for m in row}
    for name, shape in _shapes(edit).items():
        if isinstance(shape, Tokens) and shape.d in widths:
            message = f"`{edit.edit}` reads or changes `{name}` {shape}, of which each process has a part"
            raise PeftcError(Diagnostic("P448", message, help="edit the Linears that compute or read it"))


def _linears_of(linears: list[nn.Linear], dimension: int) -> list[nn.Linear]:
    shard = import_module("torch.distributed.tensor").Shard(dimension)
    return [module for module in linears if cast(Any, module.weight).placements[-1] == shard]


def _heads(edit: RegionEdit) -> dict[str, Dimension]:
    """The states of an edit that have heads, which their type has first."""
    return {name: 0 for name, shape in _shapes(edit).items() if isinstance(shape, Rows | Heads | KeyValue)}


def _shapes(edit: RegionEdit) -> dict[str, Shape]:
    """Of the states of an edit."""
    shapes = {assign.state: assign.value.shape for assign in edit.assigns}
    values = [*(assign.value for assign in edit.assigns), *(term for _, term in edit.lets)]
    reads = (term for value in values for term in ir.subterms(value) if isinstance(term, ir.Read))
    return shapes | {term.state: term.shape for term in reads}


def _tensors(
    region: nn.Module, edit: RegionEdit, dimensions: dict[str, dict[str, Dimension]], is_partial: bool = False
) -> Iterator[FormTensor]:
    """The parameters of an edit."""
    container = vars(region)["_modules"][CONTAINER]
    for place, form in container.get_submodule(edit.place.partition(".")[2]).named_modules():
        key, path = place.partition(".")[0], f"{edit.place.partition('.')[2]}.{place}".rstrip(".")
        for name, parameter in vars(form)["_parameters"].items():
            if isinstance(parameter, Tensor):
                dimension = dimensions.get(key, {}).get(name)
                yield FormTensor(path, name, dimension, is_partial and dimension is None)
