"""The tensors that an adapter of a plan has."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from peftc.forms.module import FormModule, build, build_of_all, build_owner
from peftc.installation.compiled_model import CompiledModel
from peftc.planning import ir
from peftc.planning.planner import PlanResult


def expected_tensors(planned: PlanResult, compiled: CompiledModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an adapter of this plan has, by name: shapes and dtypes without values."""
    yield from _form_tensors(planned)
    trained = planned.trained_parameters.items()
    yield from ((name, compiled.module.get_parameter(parameter)) for name, parameter in trained)


def expected_sizes(planned: PlanResult) -> dict[str, tuple[int, ...]]:
    """The sizes of these tensors; () for parameters of the base."""
    sizes = {name: tuple(tensor.shape) for name, tensor in _form_tensors(planned)}
    return sizes | dict.fromkeys(planned.trained_parameters, ())


def _form_tensors(planned: PlanResult) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the forms of a plan, on the meta device."""
    known: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}  # of forms with equal arguments and shapes
    for name, make, instance in _forms(planned):
        key = (make, instance.form, *sorted(instance.args.items()), instance.dims)
        if key not in known:
            form = make(instance, dtype=torch.float32, device="meta")
            known[key] = [*form.named_parameters(), *((n, form.get_buffer(n)) for n in form.states())]
        yield from ((f"{name}.{n}", tensor) for n, tensor in known[key])


def _forms(planned: PlanResult) -> Iterator[tuple[str, Callable[..., FormModule], ir.FormInstance]]:
    """The forms of a plan that have parameters: the saved name, its builder, the instance."""
    seen = set[str]()
    for site_edit in planned.site_edits:
        for instance in site_edit.instances:
            for owner in instance.owners():
                if owner not in seen:
                    seen.add(owner)
                    make = build_of_all if owner == instance.all_tasks_owner else build_owner
                    yield f"{site_edit.edit}/{owner}/{instance.key}", make, instance
            if instance.has_site_parameters:
                for _, suffix in instance.task_suffixes():
                    yield f"{site_edit.edit}/{site_edit.owner_path}/{instance.key}{suffix}", build, instance
