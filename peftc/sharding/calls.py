"""Calls of edited modules whose weights are split."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from peftc.modules.sharded_tensors import is_sharded
from peftc.rewriting.edits import CONTAINER
from peftc.sharding.layouts import LAYOUT, FormTensor, Layout
from peftc.sharding.meshes import form_value
from peftc.tracing.tracer_base import is_tracing

Replacement = tuple[dict[str, Any], str, Any]  # a table of parameters, a name in it, the value in its place


def split_call(dispatch: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of an edited module that has a layout."""
    layout: Layout = module.__dict__[LAYOUT]
    if is_tracing() or is_fake(layout, module):
        return dispatch(module, *args, **kwargs)
    if layout.split is not None:
        x, *others = args or (kwargs.pop("input"),)
        return _call_linear(layout, dispatch, module, x, others, kwargs)
    with _replaced(_form_values(layout, module)):
        return dispatch(module, *args, **kwargs)


def _call_linear(
    layout: Layout, dispatch: Callable[..., Any], module: Any, x: Any, others: list[Any], kwargs: dict[str, Any]
) -> Any:
    """The input and the result are distributed, or the parts of this rank: those that the plans of
    transformers pass where no gradient is needed. Then the sum over the ranks is the caller's.
    """
    torch_tensor = import_module("torch.distributed.tensor")
    replicate, shard = torch_tensor.Replicate(), torch_tensor.Shard
    mesh, is_local = layout.meshes.parallel, not is_sharded(x)
    tables = vars(module)["_parameters"]
    own: list[Replacement] = []
    if is_local:
        x = from_local(x, layout, shard(-1) if layout.split else replicate)
        of_weight = {"weight": shard(layout.split), "bias": replicate if layout.split else shard(0)}
        for name, value in tables.items():
            if value is not None and not is_sharded(value):
                own.append((tables, name, from_local(value, layout, of_weight[name])))
    if layout.is_split:
        own += _form_values(layout, module)
    else:
        weights = {name: value for name, value in tables.items() if value is not None}
        weights |= {name: value for _, name, value in own}
        own = [(tables, name, whole(value)) for name, value in weights.items()]
        own += _form_values(layout, module)
        x = whole(x)
    with _replaced(own):
        result = dispatch(module, x, *others, **kwargs)
    if not is_sharded(result):
        result = torch_tensor.DTensor.from_local(result, mesh, [replicate], run_check=False)
    if not is_local:
        return result
    if not layout.split:
        return result.redistribute(placements=[shard(-1)]).to_local()
    if result.placements == (replicate,):  # one term of the sum is the value, and the others are zero
        return result.to_local() if mesh.get_local_rank() == 0 else torch.zeros_like(result.to_local())
    return result.to_local()


def from_local(part: Tensor, layout: Layout, placement: Any) -> Any:
    """The distributed tensor of which this rank has a part."""
    return import_module("torch.distributed.tensor").DTensor.from_local(
        part, layout.meshes.parallel, [placement], run_check=False
    )


def whole(value: Any) -> Tensor:
    """All of a distributed tensor. Each rank computes the whole gradient, and takes its part."""
    return value.redistribute(placements=[import_module("torch.distributed.tensor").Replicate()]).to_local()


def _form_values(layout: Layout, module: Any) -> list[Replacement]:
    """What this rank computes with in the place of the parameters of edits."""
    tables = form_tables(layout, module)
    pairs = zip(layout.tensors, tables, strict=True)
    return [(table, one.name, _value(layout, one, table[one.name])) for one, table in pairs]


def form_tables(layout: Layout, module: Any) -> list[dict[str, Any]]:
    """The tables that have the parameters of the edits of a module."""
    container = vars(module)["_modules"][CONTAINER]
    tables = {one.module: vars(container.get_submodule(one.module))["_parameters"] for one in layout.tensors}
    return [tables[one.module] for one in layout.tensors]


def is_fake(layout: Layout, module: Any) -> bool:
    """Whether a module is one of a skeleton, whose weights are whole."""
    weight = vars(module)["_parameters"].get("weight")
    forms = (table[one.name] for one, table in zip(layout.tensors, form_tables(layout, module), strict=True))
    return isinstance(weight, FakeTensor) or any(isinstance(parameter, FakeTensor) for parameter in forms)


def _value(layout: Layout, one: FormTensor, parameter: Any) -> Any:
    """What is redistributed has a gradient with the placement of the parameter."""
    torch_tensor = import_module("torch.distributed.tensor")
    replicate = torch_tensor.Replicate()
    placement = replicate if one.dimension is None else torch_tensor.Shard(one.dimension)
    if layout.meshes.data is not None:
        parameter = form_value(parameter, layout.meshes, placement)
    if not is_sharded(parameter):
        if one.dimension is None and not one.is_partial:
            return parameter
        parameter = from_local(parameter, layout, replicate)
    value = parameter.redistribute(placements=[placement])
    if layout.is_split:
        return value
    return value.to_local(grad_placements=[torch_tensor.Partial()] if one.is_partial else None)


@contextmanager
def _replaced(values: list[Replacement]) -> Generator[None]:
    before = [(table, name, table[name]) for table, name, _ in values]
    for table, name, value in values:
        table[name] = value
    try:
        yield
    finally:
        for table, name, value in before:
            table[name] = value
