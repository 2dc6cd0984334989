"""Attaches saved adapters to a model, inactive until chosen; those of one spec share its edits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peftc.adapters.files import listed_tensors, path_of, read, read_description, require_module
from peftc.adapters.loading import Fit, adapter_tasks, check_base, expanded_spec, notify_forms, own_fit
from peftc.adapters.metadata import Adapter
from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.completeness import active_installation
from peftc.installation.contents import parameters, states
from peftc.installation.disable import check_readable
from peftc.installation.journal import copy_all
from peftc.installation.record import InstalledSpec, installation_of
from peftc.installation.spec_names import NAME, prefixed
from peftc.models.samples import joint_sample
from peftc.modules.sharded_tensors import distributed_like
from peftc.planning.planner import PlanResult
from peftc.syntax import ast
from peftc.syntax.printer import print_spec


def attach(
    directory: str | PathLike[str],
    model: nn.Module,
    *,
    name: str | None = None,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    other_weights: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Attaches a saved adapter to its base, in place. It acts when it is chosen.

    `peftc.activate` chooses one for all calls, `peftc.adapter` for a block, or one for each row of
    a batch. Adapters with equal specs share the edits of the model, each with parameters of its
    own: another one costs memory, and no time in a forward. `load` is for one adapter that acts.

    What an adapter trains in the base (`train`), such as the head of a classifier, it has a copy
    of. While it acts, the parameter is read as this copy; the base itself does not change.

    An adapter is saved alone, `peftc.save(model, directory, name=name)`, as it was attached.

    Args:
        directory: with an adapter that `save` wrote.
        model: the base, or a model with edits already.
        name: for `activate` and others; by default that of the directory.
        sample: as in `compile`.
        samples: as in `compile`.
        other_weights: as in `load`.
        strict: as in `load`.

    Returns:
        The model, the same object.

    Raises:
        PeftcError: as `load`, and P548 (the name), P549 (an adapter that has tasks or passes of its
            own, edits without parameters, or parameters that all sites of a model compute
            together). Of an adapter that trains parameters of the base: P414 (a spec on the model
            trains one, too), P432 (a module has one in a list), P448 (sharded), P542 (quantised).
            After an error the model is unchanged.
    """
    require_module(model, directory, "attached to", "attach")
    path = path_of(directory)
    with paused_gc(promote=True):
        compiled = CompiledModel.active(model, joint_sample(sample, samples))
        saved = read_attachable(path, compiled, other_weights=other_weights, strict=strict)
        name = free_adapter(compiled, name, path)
        group = next((spec for spec in compiled.specs if spec.adapters and is_like(spec, saved)), None)
        if group is None:
            spec, names = saved.fit.spec, {spec.name for spec in compiled.specs}
            free = next(free for number in count(1) if (free := f"adapters_{number}") not in names)
            alone = InstalledSpec(name, spec, saved.fit.planned.deferred_plan, saved.adapter.seed)
            group = replace(alone, name=free, alone=alone)
        return set_adapters(compiled, group, {**group.adapters, name: saved.adapter.seed}, {name: saved.tensors})


def detach(model: nn.Module, name: str) -> nn.Module:
    """Takes an attached adapter, with its parameters, from a model.

    Args:
        model: a compiled model.
        name: of the adapter.

    Returns:
        The model. Without the last adapter, and other specs, it is the base again.

    Raises:
        PeftcError: P410 (not compiled), P436 (an edited module was replaced), P529 (switched off),
            P547 (no adapter of that name).
    """
    record = active_installation(model)
    group = record.group(name)
    compiled = CompiledModel.active(model)
    rest = {other: seed for other, seed in group.adapters.items() if other != name}
    return set_adapters(compiled, group, rest) if rest else compiled.remove(group.name)


def swap(
    model: nn.Module,
    name: str,
    directory: str | PathLike[str],
    *,
    other_weights: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Gives an attached adapter the parameters of another saved one, with an equal spec, in place.

    Nothing is compiled again, under `torch.compile` neither. Adapters of other ranks have other
    specs: `detach` and `attach` exchange these.

    Args:
        model: a compiled model.
        name: of the attached adapter.
        directory: with an adapter that `save` wrote.
        other_weights: as in `load`.
        strict: as in `load`.

    Returns:
        The model.

    Raises:
        PeftcError: as `attach`, and P547 (no adapter of that name), P525 (another spec). After an
            error the model is unchanged.
    """
    record = active_installation(model)
    group, path = record.group(name), path_of(directory)
    compiled = CompiledModel.active(model)
    saved = read_attachable(path, compiled, other_weights=other_weights, strict=strict)
    if not is_like(group, saved):
        message = f"the adapter in {directory} has another spec than `{name}`"
        raise PeftcError(Diagnostic("P525", message, help="`peftc.detach` one and `peftc.attach` the other"))
    values = {**parameters(model, name), **states(model, name)}
    pairs = ((values[n], distributed_like(t.reshape(values[n].shape), values[n])) for n, t in saved.tensors.items())
    copy_all(pairs, partial(notify_forms, model))
    return model


class SavedAdapter(NamedTuple):
    """An adapter that can be attached, under its own spec."""

    adapter: Adapter
    fit: Fit
    tensors: Mapping[str, Tensor]


def read_attachable(path: Path, compiled: CompiledModel, *, other_weights: bool, strict: bool) -> SavedAdapter:
    """Raises: as `attach`."""
    fits: list[Fit] = []

    def check(adapter: Adapter) -> None:  # called again if the adapter is replaced meanwhile
        check_base(adapter, compiled.module, other_weights, strict)
        if adapter.passes:
            raise not_attachable("it has a pass, a function that no file holds")
        if adapter_tasks(adapter, expanded_spec(adapter, path)):
            raise not_attachable("it has tasks of its own")
        fits.append(own_fit(path, compiled, False, None, adapter))
        require_attachable(fits[-1].planned)
        check_readable(compiled.module, fits[-1].planned.trained_parameters.values())
        fits[-1].check(listed_tensors(adapter))

    adapter, tensors = read(path, check)
    fits[-1].check(tensors)
    return SavedAdapter(adapter, fits[-1], tensors)


def require_attachable(planned: PlanResult) -> None:
    """Raises: P549 for an adapter whose edits cannot be chosen row by row."""
    for one in planned.site_edits.representatives:
        if not one.instances:
            raise not_attachable(f"its edit `{one.edit}` has no parameters")
        if shared := next((i.form.name for i in one.instances if i.form.tasks_module), None):
            raise not_attachable(f"`{shared}` has parameters that all tasks of a model have in common")


def not_attachable(reason: str) -> PeftcError:
    message = f"the adapter cannot be attached beside others: {reason}"
    return PeftcError(Diagnostic("P549", message, help="`peftc.load` lets it act alone"))


def is_like(group: InstalledSpec, saved: SavedAdapter) -> bool:
    """Whether an adapter fits into a group. Fixed values do not depend on the seed."""
    assert group.alone is not None
    return group.alone.text == print_spec(saved.fit.spec)


def is_attached(model: nn.Module, name: str, folder: Path) -> bool:
    """Whether the adapter in a folder fits into the parameters of an attached one."""
    alone = installation_of(model).adapter_alone(name)
    return print_spec(expanded_spec(read_description(folder), folder)) == alone.text


def free_adapter(compiled: CompiledModel, name: str | None, path: Path) -> str:
    """Raises: P548 for an invalid name, or that of an attached adapter."""
    present = compiled.installation.adapter.names if compiled.specs else ()
    name = (path.resolve().name or "adapter") if name is None else name
    if not isinstance(name, str) or not NAME.fullmatch(name) or hasattr(nn.ModuleDict(), name):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        help_ = "give it a `name` of letters, digits, `_` and `-`"
        raise PeftcError(Diagnostic("P548", f"`{name}` cannot be the name of an adapter", help=help_))
    if name in present:
        help_ = "give this one another `name`, or `peftc.swap` its values"
        raise PeftcError(Diagnostic("P548", f"an adapter `{name}` is attached already", help=help_))
    return name


def set_adapters(
    compiled: CompiledModel,
    group: InstalledSpec,
    adapters: Mapping[str, int],
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> nn.Module:
    """Leaves a group with these adapters. `tensors`: of new ones, as their files name them."""
    assert group.alone is not None
    spec = spec_of(group.alone.spec, group.name, tuple(adapters))
    new = replace(group, spec=spec, deferred_plan=compiled.plan(spec).deferred_plan, adapters=adapters)

    def finish(model: nn.Module) -> None:
        for name, values in (tensors or {}).items():
            own = {**parameters(model, name), **states(model, name)}
            for saved, tensor in values.items():
                own[saved].copy_(tensor.reshape(own[saved].shape))
        notify_forms(model)

    if group in compiled.specs:
        specs = tuple(new if spec is group else spec for spec in compiled.specs)
        return compiled.set_specs(specs, finish=torch.no_grad()(finish), draw=False)
    return compiled.add(new, compiled.plan(spec), finish=torch.no_grad()(finish), draw=False)


def spec_of(saved: ast.Spec, group: str, adapters: tuple[str, ...]) -> ast.Spec:
    """The spec of a group: the edits of its adapters, under names of its own."""
    spec = prefixed(saved, group)
    edits = (replace(s, adapters=adapters) if isinstance(s, ast.Edit | ast.Train) else s for s in spec.statements)
    return replace(spec, statements=tuple(edits))
