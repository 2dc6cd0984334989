"""Loads a saved adapter onto its base. All checks precede the first change of the model."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftc.adapters.base import Distance, differences, distance_from, dtype_name, require_finite, require_values
from peftc.adapters.files import listed_tensors, path_of, read
from peftc.adapters.metadata import METADATA, Adapter, Base, changed_edits
from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError, warn
from peftc.equations.table import with_built_in
from peftc.forms import PYTHON_FORMS
from peftc.forms.module import FormModule, build, build_of_all, build_owner
from peftc.forms.registry import class_path
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.contents import parameters, states
from peftc.installation.record import InstalledSpec
from peftc.installation.spec_names import free_name, prefixed, task_names
from peftc.models.samples import joint_sample
from peftc.modules.offload import offloaded_parameters
from peftc.planning import ir
from peftc.planning.planner import PlanResult
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
    samples: Sequence[Mapping[str, Any]] | None = None,
    other_weights: bool = False,
    strict: bool = False,
    cache: bool = True,
) -> nn.Module:
    """Compiles a saved adapter onto its base, in place, and returns the model.

    The model computes the same function, bit for bit. Parameters have the dtype and device that
    `compile` chooses for `model`. Nothing that is read is executed.

    Args:
        directory: with an adapter that `save` wrote.
        model: the base.
        name: as in `compile`; by default the name of the directory.
        prefix: as in `compile`.
        sample: as in `compile`.
        samples: as in `compile`.
        other_weights: expects a base of the same architecture with other weights. Without it such a
            base gives a `PeftcWarning` (P524) with its distance.
        strict: refuses other weights, and quantised weights, which cannot be compared.
        cache: as in `compile`.

    Returns:
        The model, the same object.

    Raises:
        PeftcError: P412 and P414 (names and parameters of another spec), P520-P522 (the files),
            P523 (another base), P524 (other weights, if `strict`), P525 (tensors that do not fit),
            P527 (no weights), P537 (other tasks than the model has), P567 (an edit that had
            another meaning). After an error the model is unchanged.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"an adapter is loaded onto a module, not a {type(model).__name__}"
        raise PeftcError(Diagnostic("P545", message, help="build the model first"))
    path = path_of(directory)
    with paused_gc(promote=True):
        compiled = CompiledModel.active(model, joint_sample(sample, samples))
        return _load(path, compiled, name, prefix, other_weights, strict, cache)


def _load(
    path: Path,
    compiled: CompiledModel,
    name: str | None,
    prefix: str | None,
    other_weights: bool,
    strict: bool,
    cache: bool,
) -> nn.Module:
    plans: list[tuple[tuple[str, ...], ast.Spec, PlanResult, dict[str, Tensor]]] = []

    def check(adapter: Adapter) -> None:  # called again if the adapter is replaced meanwhile
        check_base(adapter, compiled.module, other_weights, strict)
        spec = expanded_spec(adapter, path)
        tasks = task_names(adapter_tasks(adapter, spec) or None, compiled.tasks)
        planned = plan_adapter(adapter, spec, compiled, tasks, cache and prefix is None)
        expected = dict(expected_tensors(planned, compiled))
        check_tensors(listed_tensors(adapter), expected)
        plans.append((tasks, spec, planned, expected))

    adapter, tensors = read(path, check)
    tasks, spec, planned, expected = plans[-1]
    check_tensors(tensors, expected)
    if prefix is not None:
        spec = prefixed(spec, prefix)
        planned = compiled.plan(spec, tasks)
        names = zip((n for n, _ in expected_tensors(planned, compiled)), expected, strict=True)
        tensors = {new: tensors[old] for new, old in names}
    spec_name = free_name(compiled.specs, name or prefix, path.resolve().name or "default")
    installed = InstalledSpec(spec_name, spec, planned.plan, adapter.seed)
    finish = partial(_fill, name=spec_name, tensors=tensors)
    return compiled.add(installed, planned, tasks=tasks, finish=finish, draw=False)


@torch.no_grad()
def _fill(model: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    for saved, tensor in {**parameters(model, name), **states(model, name)}.items():
        tensor.copy_(tensors[saved].reshape(tensor.shape))
    notify_forms(model)


def _without_ones(shape: torch.Size) -> list[int]:
    """The sizes of which the order of entries depends: earlier versions have had others of one."""
    return [size for size in shape if size != 1]


def notify_forms(model: nn.Module) -> None:
    """Tells the forms of a model that their values have changed."""
    for form in model.modules():
        if isinstance(form, FormModule):
            form.after_load()


def check_base(adapter: Adapter, model: nn.Module, other_weights: bool = False, strict: bool = False) -> None:
    """Compares a model to the base of an adapter. Warns of other weights (P524) unless expected.

    Raises: P523 (another architecture), P524 (if `strict`), P527 (no weights), P545 (arguments).
    """
    if other_weights and strict:
        message = "`strict` refuses other weights, and `other_weights` expects them"
        raise PeftcError(Diagnostic("P545", message, help="give one of the two"))
    offloaded = offloaded_parameters(model)
    require_values((n, p) for n, p in model.named_parameters() if n not in offloaded)
    if notes := differences(adapter.base, model):
        message = f"the adapter was saved for another base ({adapter.base.id}, {adapter.base.parameters:,} parameters)"
        raise PeftcError(Diagnostic("P523", message, notes=tuple(notes)))
    if not other_weights:
        check_weights(adapter.base, distance_from(adapter.base, model), strict)


def check_weights(
    base: Base, distance: Distance, strict: bool, way_out: str = "`other_weights=True` says that others are meant"
) -> None:
    """Warns of weights that differ from the samples of an adapter. Raises: P524, if `strict`."""
    notes = list[str]()
    if distance.changed:
        names = ", ".join(f"`{name}`" for name in distance.changed[:3])
        notes.append(f"{len(distance.changed)} of {distance.compared} parameters differ, such as {names}")
        name, most = distance.farthest
        relative = f"relative distance ‖here − there‖ / ‖there‖ on the sample: {distance.relative:.2g}"
        notes.append(f"{relative}; the largest {most:.2g}, in `{name}`")
    if strict and (names := distance.unreadable):
        notes.append(f"{len(names)} parameters cannot be compared, such as `{names[0]}`: they are quantised")
    if not notes:
        return
    message = f"the adapter was saved for other weights of {base.id}"
    help_ = f"load the checkpoint it was trained on; {way_out}"
    diagnostic = Diagnostic("P524", message, notes=tuple(notes), help=help_)
    if strict:
        raise PeftcError(diagnostic)
    warn(diagnostic)


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    message: str = "the tensors of the adapter do not fit its spec",
    help_: str | None = None,
) -> None:
    """Raises: P525 if names, shapes or kinds of dtypes differ, P561 if values are not finite."""
    missing, unknown = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    pairs = [(n, tensors[n], like) for n, like in expected.items() if n in tensors]
    notes = [f"{len(missing)} are missing, such as `{missing[0]}`"] if missing else []
    notes += [f"{len(unknown)} are unknown, such as `{unknown[0]}`"] if unknown else []
    differ = ((n, tensor.shape, like.shape) for n, tensor, like in pairs)
    shapes = [(n, list(own), list(like)) for n, own, like in differ if _without_ones(own) != _without_ones(like)]
    others = [(n, t, like) for n, t, like in pairs if not (t.is_floating_point() and like.is_floating_point())]
    dtypes = [(n, dtype_name(t), dtype_name(like)) for n, t, like in others if t.dtype != like.dtype]
    notes += [f"`{n}` is {actual}, expected {like}" for n, actual, like in (*shapes[:3], *dtypes[:3])]
    if notes:
        raise PeftcError(Diagnostic("P525", message, notes=tuple(notes), help=help_))
    require_finite((n, tensor) for n, tensor, _ in pairs)


def expected_tensors(planned: PlanResult, compiled: CompiledModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an adapter of this plan has, by name: shapes and dtypes without values."""
    known: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}  # of forms with equal arguments and shapes
    for name, make, instance in _forms(planned):
        key = (make, instance.form.name, *sorted(instance.args.items()), instance.dims)
        if key not in known:
            form = make(instance, dtype=torch.float32, device="meta")
            known[key] = [*form.named_parameters(), *((n, form.get_buffer(n)) for n in form.states())]
        yield from ((f"{name}.{n}", tensor) for n, tensor in known[key])
    trained = planned.trained_parameters.items()
    yield from ((name, compiled.module.get_parameter(parameter)) for name, parameter in trained)


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


def adapter_tasks(adapter: Adapter, spec: ast.Spec) -> tuple[str, ...]:
    """The tasks of an adapter's tensors. It may list more, of other specs. Raises: P525.

    Args: `spec`: `expanded_spec` of the adapter.
    """
    if not any(isinstance(s, ast.Edit) and s.per_task for s in spec.statements):
        return ()
    if len(adapter.tasks) > len(adapter.tensors):
        message = f"the adapter has {len(adapter.tensors):,} tensors for {len(adapter.tasks):,} tasks"
        raise PeftcError(Diagnostic("P525", message))
    return adapter.tasks


def expanded_spec(adapter: Adapter, directory: Path) -> ast.Spec:
    """The spec of an adapter, which may not include files. Raises: P525."""
    check_python_forms(adapter)
    with _planning_errors():
        spec = _parsed(adapter.spec, f"{directory / METADATA}: spec")
        return expand(with_built_in(spec, adapter.forms), include=None)


@lru_cache(8)
def _parsed(text: str, path: str) -> ast.Spec:
    return parse_text(text, path)


def check_python_forms(adapter: Adapter) -> None:
    """Raises: P573 for a Python form that is not registered, or has another version."""
    for name, saved in adapter.python_forms.items():
        form = PYTHON_FORMS.get(name)
        if form is None:
            message = f"the adapter needs the Python form `{name}`, which is not registered"
            help_ = f"register `{saved.path}`: `peftc.forms.register`, or `--forms {name}`"
            raise PeftcError(Diagnostic("P573", message, help=help_))
        if form.version != saved.version:
            message = f"the adapter has version {saved.version} of the Python form `{name}`"
            notes = (f"registered is version {form.version}, `{class_path(form)}`",)
            help_ = "register the version that it was saved with, or train it again"
            raise PeftcError(Diagnostic("P573", message, notes=notes, help=help_))


def plan_adapter(
    adapter: Adapter, spec: ast.Spec, compiled: CompiledModel, tasks: tuple[str, ...], cache: bool = False
) -> PlanResult:
    """The plan of an adapter's expanded spec for a model. `cache`: as in `compile`.

    Raises: P525, P567.
    """
    with _planning_errors():
        planned = compiled.first_plan(spec, tasks) if cache else compiled.plan(spec, tasks)
    for edit, change in changed_edits(adapter, planned.site_edits):
        message = f"`{edit.edit}` at `{edit.site.path}` {change.before} when the adapter was saved"
        notes = (f"since format {change.format}, {change.now}",)
        help_ = "load it with the version of peftc that saved it, or train it again"
        raise PeftcError(Diagnostic("P567", message, notes=notes, help=help_))
    return planned


@contextmanager
def _planning_errors() -> Generator[None]:
    try:
        yield
    except PeftcError as error:
        notes = tuple(map(str, error.diagnostics[:3]))
        message = "the spec of the adapter cannot be planned on this model"
        raise PeftcError(Diagnostic("P525", message, notes=notes)) from error
