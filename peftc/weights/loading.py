"""Putting a saved adapter onto its base. Everything is checked before the model is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftc.compiler import added, analysed, checked_tasks, parameters, planned, states, tasks_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule, build, build_of_all, build_owner
from peftc.planning.plan import Planned
from peftc.rewriting.beside import free_name, prefixed
from peftc.rewriting.install import regions_of
from peftc.rewriting.record import Part, acting, installed, is_installed
from peftc.semantics.expand import expand
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from peftc.tracing.analysis import Analysis
from peftc.weights.adapter import METADATA, Adapter
from peftc.weights.base import differences, other_values
from peftc.weights.compiled import require_values
from peftc.weights.files import path_of, read


def load(
    directory: str | PathLike[str],
    model: nn.Module,
    *,
    name: str | None = None,
    prefix: str | None = None,
    sample: Mapping[str, Any] | None = None,
    other_weights: bool = False,
) -> nn.Module:
    """Compiles a saved adapter onto its base, in place, and returns the model: the same function, bit for bit.

    Dtype and device are those of `model`, as `compile` chooses them. The model may have other specs, as for `compile`.
    Nothing that is read is executed.

    Args: `name`, `prefix`, `sample`: as in `compile`; the default of `name` is that of the directory. `other_weights`: take
    a base of the same architecture whose weights are others.
    Raises: P412 and P414 (names and parameters of another spec on the model), P520-P522 (the files), P523 and P524
    (another base), P537 (other tasks than the model has), P525 (tensors that do not fit), P527 (no weights). After an error the model is as it was.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"an adapter is loaded onto a module, not a {type(model).__name__}"
        raise PeftcError(Diagnostic("P545", message, help="build the model first"))
    if is_installed(model):
        acting(model)
    path = path_of(directory)
    adapter, tensors = read(path)
    check_base(adapter, model, other_weights)
    analysis = analysed(model, sample)
    record = installed(model) if is_installed(model) else None
    tasks = checked_tasks(adapter.tasks or None, tasks_of(record))
    flat, found = planned_saved(adapter, path, analysis, tasks)
    shapes = dict(wanted(found, analysis, model))
    check_tensors(tensors, shapes)
    if prefix is not None:
        flat = prefixed(flat, prefix)
        found = planned(flat, analysis, tasks)
        renamed = dict(zip((n for n, _ in wanted(found, analysis, model)), shapes, strict=True))
        tensors = {new: tensors[old] for new, old in renamed.items()}
    named = free_name(record, name or prefix, path.resolve().name or "default")
    part = Part(named, print_spec(flat), found.plan, adapter.seed)
    return added(
        model, part, flat, found, analysis, sample, tasks=tasks, then=lambda model: _fill(model, named, tensors)
    )


@torch.no_grad()
def _fill(model: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    for saved, tensor in {**parameters(model, name), **states(model, name)}.items():
        tensor.copy_(tensors[saved])
    for form in model.modules():
        if isinstance(form, FormModule):
            form.loaded()


def check_base(adapter: Adapter, model: nn.Module, other_weights: bool = False) -> None:
    """Raises: P523 for another architecture, P524 for other weights, P527 for none."""
    require_values(model.named_parameters())
    if different := differences(adapter.base, model):
        message = f"the adapter was saved for another base ({adapter.base.id}, {adapter.base.parameters:,} parameters)"
        raise PeftcError(Diagnostic("P523", message, notes=tuple(different)))
    changed = [] if other_weights else other_values(adapter.base, model)
    if changed:
        checked = sum(bool(tensor.sample) for tensor in adapter.base.tensors.values())
        shown = ", ".join(f"`{name}`" for name in changed[:3])
        raise PeftcError(
            Diagnostic(
                "P524",
                f"the adapter was saved for other weights of {adapter.base.id}",
                notes=(f"{len(changed)} of {checked} parameters differ, such as {shown}",),
                help="load the checkpoint it was trained on, or pass `other_weights=True`",
            )
        )


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    said: str = "the tensors of the adapter do not fit its spec",
    help_: str | None = None,
) -> None:
    """Raises: P525 where names or shapes differ, in the words of who asks."""
    lost, more = [n for n in shapes if n not in tensors], [n for n in tensors if n not in shapes]
    other = [n for n in shapes if n in tensors and tensors[n].shape != shapes[n]]
    notes = [f"{len(lost)} are missing, such as `{lost[0]}`"] if lost else []
    notes += [f"{len(more)} belong nowhere, such as `{more[0]}`"] if more else []
    notes += [f"`{n}` is {list(tensors[n].shape)}, but {list(shapes[n])} is wanted" for n in other[:3]]
    if notes:
        raise PeftcError(Diagnostic("P525", said, notes=tuple(notes), help=help_))


def wanted(found: Planned, analysis: Analysis, model: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """The tensors that a plan has, by the names under which they are saved."""
    for name, made in _forms(found, analysis):
        yield from ((f"{name}.{n}", p.shape) for n, p in made.named_parameters())
        yield from ((f"{name}.{n}", made.get_buffer(n).shape) for n in made.states())
    yield from ((name, model.get_parameter(place).shape) for name, place in found.trained.items())


def _forms(found: Planned, analysis: Analysis) -> Iterator[tuple[str, FormModule]]:
    owners = set[str]()
    for placed in (p for region in regions_of(found.placed, analysis.anatomy) for p in region.placed):
        for one in placed.instances:
            for owner in one.owners():
                if owner not in owners:
                    owners.add(owner)
                    make = build_of_all if owner == one.of_all else build_owner
                    yield f"{placed.edit}/{owner}/{one.key}", make(one, dtype=torch.float32, device="meta")
            if one.owns:
                for _, tail in one.copies():
                    name = f"{placed.edit}/{placed.site.path}/{one.key}{tail}"
                    yield name, build(one, dtype=torch.float32, device="meta")


def planned_saved(
    adapter: Adapter, directory: Path, analysis: Analysis, tasks: tuple[str, ...]
) -> tuple[ast.Spec, Planned]:
    """The spec of the adapter, planned on the model. Raises: P525 where it cannot be, with the reason."""
    try:
        flat = expand(parse_text(adapter.spec, f"{directory / METADATA}: spec"))
        return flat, planned(flat, analysis, tasks)
    except PeftcError as error:
        notes = tuple(str(found) for found in error.diagnostics[:3])
        raise PeftcError(
            Diagnostic("P525", "the spec of the adapter cannot be planned on this model", notes=notes)
        ) from error
