"""Putting a saved adapter onto its base. Everything is checked before the model is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftc.adapters.base import differences, distance_from
from peftc.adapters.files import listed_tensors, path_of, read
from peftc.adapters.metadata import METADATA, Adapter, Base
from peftc.adapters.readable_weights import require_values
from peftc.adapters.weight_sample import Distance
from peftc.diagnostics import Diagnostic, PeftcError, warn
from peftc.forms.module import FormModule, build, build_of_all, build_owner
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.contents import parameters, states
from peftc.installation.record import InstalledSpec
from peftc.installation.spec_conflicts import free_name, prefixed
from peftc.installation.task_names import task_names
from peftc.modules.offload import offloaded_parameters
from peftc.planning.planner import PlanResult
from peftc.recognition.analysis import Analysis
from peftc.rewriting.assembly import regions_of
from peftc.semantics.expand import expand
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


def load(
    directory: str | PathLike[str],
    model: nn.Module,
    *,
    name: str | None = None,
    prefix: str | None = None,
    sample: Mapping[str, Any] | None = None,
    other_weights: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Compiles a saved adapter onto its base, in place, and returns the model: the same function, bit for bit.

    Dtype and device are those of `model`, as `compile` chooses them. The model may have other specs, as for `compile`.
    Nothing that is read is executed.

    Args: `name`, `prefix`, `sample`: as in `compile`; the default of `name` is that of the directory. `other_weights`: say
    that a base of the same architecture with other weights is meant; without it such a base is warned of (`PeftcWarning` P524, with
    its distance), with `strict` it is refused. Weights that are quantised cannot be compared: they pass, unless `strict`.
    Raises: P412 and P414 (names and parameters of another spec on the model), P520-P522 (the files), P523 (another base), P524 (other weights, where it is
    `strict`), P537 (other tasks than the model has), P525 (tensors that do not fit), P527 (no weights). After an error the model is as it was.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"an adapter is loaded onto a module, not a {type(model).__name__}"
        raise PeftcError(Diagnostic("P545", message, help="build the model first"))
    compiled = CompiledModel.active(model, sample)
    path = path_of(directory)
    plans: list[tuple[tuple[str, ...], ast.Spec, PlanResult, dict[str, Tensor]]] = []

    def check(adapter: Adapter) -> None:  # several descriptions, where the adapter is replaced meanwhile
        check_base(adapter, model, other_weights, strict)
        tasks = task_names(tasks_in(adapter, path) or None, compiled.tasks)
        flat, found = planned_saved(adapter, path, compiled, tasks)
        expected = dict(wanted(found, compiled))
        check_tensors(listed_tensors(adapter), expected)
        plans.append((tasks, flat, found, expected))

    adapter, tensors = read(path, check)
    tasks, flat, found, expected = plans[-1]
    check_tensors(tensors, expected)
    if prefix is not None:
        flat = prefixed(flat, prefix)
        found = compiled.plan(flat, tasks)
        renamed = dict(zip((n for n, _ in wanted(found, compiled)), expected, strict=True))
        tensors = {new: tensors[old] for new, old in renamed.items()}
    named = free_name(compiled.specs, name or prefix, path.resolve().name or "default")
    spec = InstalledSpec(named, flat, found.plan, adapter.seed)
    return compiled.add(spec, found, tasks=tasks, finish=lambda model: _fill(model, named, tensors))


@torch.no_grad()
def _fill(model: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    for saved, tensor in {**parameters(model, name), **states(model, name)}.items():
        tensor.copy_(tensors[saved])
    for form in model.modules():
        if isinstance(form, FormModule):
            form.loaded()


def check_base(adapter: Adapter, model: nn.Module, other_weights: bool = False, strict: bool = False) -> None:
    """Raises: P523 for another architecture, P524 for other weights where it is strict, P527 for none, P545 for two arguments that
    exclude each other. Warns: P524 for other weights, unless these are expected.
    """
    if other_weights and strict:
        message = "`strict` refuses other weights, and `other_weights` expects them"
        raise PeftcError(Diagnostic("P545", message, help="give one of the two"))
    elsewhere = offloaded_parameters(model)
    require_values((n, p) for n, p in model.named_parameters() if n not in elsewhere)
    if different := differences(adapter.base, model):
        message = f"the adapter was saved for another base ({adapter.base.id}, {adapter.base.parameters:,} parameters)"
        raise PeftcError(Diagnostic("P523", message, notes=tuple(different)))
    if not other_weights:
        _check_weights(adapter.base, distance_from(adapter.base, model), strict)


def _check_weights(base: Base, found: Distance, strict: bool) -> None:
    notes = list[str]()
    if found.changed:
        shown = ", ".join(f"`{name}`" for name in found.changed[:3])
        notes.append(f"{len(found.changed)} of {found.compared} parameters differ, such as {shown}")
        name, most = found.farthest
        notes.append(
            f"relative distance ‖here − there‖ / ‖there‖ on the sample: {found.relative:.2g}; the largest {most:.2g}, in `{name}`"
        )
    if found.unreadable and strict:
        message = f"{len(found.unreadable)} parameters cannot be compared, such as `{found.unreadable[0]}`: they are quantised"
        notes.append(message)
    if not notes:
        return
    diagnostic = Diagnostic(
        "P524",
        f"the adapter was saved for other weights of {base.id}",
        notes=tuple(notes),
        help="load the checkpoint it was trained on; `other_weights=True` says that others are meant",
    )
    if strict:
        raise PeftcError(diagnostic)
    warn(diagnostic)


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    said: str = "the tensors of the adapter do not fit its spec",
    help_: str | None = None,
) -> None:
    """Raises: P525 where names, shapes or kinds of numbers differ, in the words of who asks; P561 where values are not finite."""
    lost, more = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    both = {n: (tensors[n], like) for n, like in expected.items() if n in tensors}
    notes = [f"{len(lost)} are missing, such as `{lost[0]}`"] if lost else []
    notes += [f"{len(more)} belong nowhere, such as `{more[0]}`"] if more else []
    other = [(n, tensor, like) for n, (tensor, like) in both.items() if tensor.shape != like.shape]
    notes += [f"`{n}` is {list(tensor.shape)}, but {list(like.shape)} is wanted" for n, tensor, like in other[:3]]
    kinds = [(n, tensor, like) for n, (tensor, like) in both.items() if not _same_kind(tensor, like)]
    notes += [f"`{n}` is {_dtype(tensor)}, but {_dtype(like)} is wanted" for n, tensor, like in kinds[:3]]
    if notes:
        raise PeftcError(Diagnostic("P525", said, notes=tuple(notes), help=help_))
    wrong = [n for n, (tensor, _) in both.items() if tensor.is_floating_point() and not _is_finite(tensor)]
    if wrong:
        notes = [f"{len(wrong)} of {len(both)} tensors, such as `{wrong[0]}`"]
        raise PeftcError(
            Diagnostic("P561", "the adapter has values that are infinite, or no numbers", notes=tuple(notes))
        )


def _same_kind(tensor: Tensor, like: Tensor) -> bool:
    """Whether values can be taken over: from one floating-point dtype to another, else of the same dtype."""
    return tensor.dtype == like.dtype or (tensor.is_floating_point() and like.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True
    plain = tensor if tensor.element_size() > 1 else tensor.float()  # torch has little for floats of 8 bits
    return bool(plain.isfinite().all())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def wanted(found: PlanResult, compiled: CompiledModel) -> Iterator[tuple[str, Tensor]]:
    """What a plan has to have saved, by name: tensors of the shapes and dtypes, without values."""
    for name, made in _forms(found, compiled.analysis):
        yield from ((f"{name}.{n}", p) for n, p in made.named_parameters())
        yield from ((f"{name}.{n}", made.get_buffer(n)) for n in made.states())
    yield from ((name, compiled.module.get_parameter(place)) for name, place in found.trained_parameters.items())


def _forms(found: PlanResult, analysis: Analysis) -> Iterator[tuple[str, FormModule]]:
    owners = set[str]()
    for placed in (p for region in regions_of(found.site_edits, analysis.structure) for p in region.site_edits):
        for one in placed.instances:
            for owner in one.owners():
                if owner not in owners:
                    owners.add(owner)
                    make = build_of_all if owner == one.all_tasks_owner else build_owner
                    yield f"{placed.edit}/{owner}/{one.key}", make(one, dtype=torch.float32, device="meta")
            if one.has_site_parameters:
                for _, tail in one.task_suffixes():
                    name = f"{placed.edit}/{placed.owner_path}/{one.key}{tail}"
                    yield name, build(one, dtype=torch.float32, device="meta")


def tasks_in(adapter: Adapter, directory: Path) -> tuple[str, ...]:
    """The tasks that the tensors of an adapter are of; it may name more, those of other specs on its model.

    Raises: P525 where it names more than it can have tensors of.
    """
    if not any(isinstance(s, ast.Edit) and s.per_task for s in expanded(adapter, directory).statements):
        return ()
    if len(adapter.tasks) > len(adapter.tensors):
        message = f"the adapter has {len(adapter.tensors):,} tensors for {len(adapter.tasks):,} tasks"
        raise PeftcError(Diagnostic("P525", message))
    return adapter.tasks


def expanded(adapter: Adapter, directory: Path) -> ast.Spec:
    """The spec of an adapter, which may use no files. Raises: P525 where it is none, with the reason."""
    try:
        return expand(parse_text(adapter.spec, f"{directory / METADATA}: spec"), include=None)
    except PeftcError as error:
        raise _not_planned(error) from error


def planned_saved(
    adapter: Adapter, directory: Path, compiled: CompiledModel, tasks: tuple[str, ...]
) -> tuple[ast.Spec, PlanResult]:
    """The spec of the adapter, planned on the model. Raises: P525 where it cannot be, with the reason."""
    flat = expanded(adapter, directory)
    try:
        return flat, compiled.plan(flat, tasks)
    except PeftcError as error:
        raise _not_planned(error) from error


def _not_planned(error: PeftcError) -> PeftcError:
    notes = tuple(str(found) for found in error.diagnostics[:3])
    return PeftcError(Diagnostic("P525", "the spec of the adapter cannot be planned on this model", notes=notes))
