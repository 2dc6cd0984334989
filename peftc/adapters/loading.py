"""Loads a saved adapter onto its base. All checks precede the first change of the model."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peftc.adapters.base import Distance, differences, distance_from, dtype_name, require_finite, require_values
from peftc.adapters.expected_tensors import expected_sizes, expected_tensors
from peftc.adapters.files import listed_tensors, path_of, read, require_module
from peftc.adapters.metadata import METADATA, Adapter, Base, changed_edits
from peftc.adapters.passes import Passes, require_no_passes, statements_of_passes
from peftc.comparison.breaking import breaking
from peftc.comparison.findings import OnModel
from peftc.comparison.moves import Moves
from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError, warn
from peftc.equations.table import registered_forms, with_built_in
from peftc.forms import PYTHON_FORMS
from peftc.forms.module import FormModule
from peftc.forms.registry import class_path
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.contents import parameters, states
from peftc.installation.record import InstalledSpec
from peftc.installation.spec_names import free_name, prefixed, task_names
from peftc.models.samples import joint_sample
from peftc.modules.offload import offloaded_parameters
from peftc.modules.sharded_tensors import distributed_like
from peftc.planning.planner import PlanResult
from peftc.semantics.expand import expand
from peftc.semantics.export_forms import stored_statements
from peftc.semantics.files import Include
from peftc.semantics.spec_argument import Settings, SpecLike, flat_spec
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
    spec: SpecLike | None = None,
    settings: Settings | None = None,
    include: Include = (),
    passes: Passes | None = None,
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
        spec: loads the adapter under this spec, by default under the one that it holds. Its
            statements `moved` say which names the adapter has. A spec that gives the values
            another meaning is a `PeftcWarning` (P854).
        settings: as in `compile`, of `spec`.
        include: as in `compile`, of `spec`.
        passes: the functions of its passes (`peftc.apply`), by name. They are never saved.

    Returns:
        The model, the same object.

    Raises:
        PeftcError: P412 and P414 (names and parameters of another spec), P520-P522 (the files),
            P523 (another base), P524 (other weights, if `strict`), P525 (tensors that do not fit),
            P527 (no weights), P537 (other tasks than the model has), P567 (an edit that had
            another meaning), P447 (`passes`), P440-P445 (the run of a pass); with
            `spec`, as `compile`. After an error the model is unchanged.
    """
    require_module(model, directory, "loaded onto", "load")
    path = path_of(directory)
    with paused_gc(promote=True):
        compiled = CompiledModel.active(model, joint_sample(sample, samples))
        if spec is None:
            fit = partial(own_fit, path, compiled, cache and prefix is None, passes)
        else:
            fit = partial(fit_under, flat_spec(spec, settings, include), compiled)
        check = partial(check_base, model=model, other_weights=other_weights, strict=strict)
        return _load(path, compiled, name, prefix, check, fit)


class Fit(NamedTuple):
    """An adapter under a spec.

    Attributes:
        spec: expanded; that of its own tensors, or another one.
        tasks: of its edits `per task`.
        planned: the plan of the spec.
        expected: the tensors that the plan has, by name.
        names: of the adapter's tensors, as the plan has them.
        is_own: whether the adapter holds the spec.
    """

    spec: ast.Spec
    tasks: tuple[str, ...]
    planned: PlanResult
    expected: dict[str, Tensor]
    names: Mapping[str, str]
    is_own: bool

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises: P525, P561."""
        here = {self.names[name]: tensor for name, tensor in tensors.items()}
        check_tensors(here, self.expected, *(() if self.is_own else (_OTHER_SPEC, _BREAKING)))


_OTHER_SPEC = "the tensors of the adapter do not fit the spec"
_BREAKING = "`peftc breaking SPEC --against ADAPTER` says why; without `spec=` the adapter is loaded as it was saved"


def _load(
    path: Path,
    compiled: CompiledModel,
    name: str | None,
    prefix: str | None,
    check_model: Callable[[Adapter], None],
    fit_of: Callable[[Adapter], Fit],
) -> nn.Module:
    fits: list[Fit] = []

    def check(adapter: Adapter) -> None:  # called again if the adapter is replaced meanwhile
        check_model(adapter)
        fits.append(fit_of(adapter))
        fits[-1].check(listed_tensors(adapter))

    adapter, tensors = read(path, check)
    fit = fits[-1]
    fit.check(tensors)
    if not fit.is_own:
        _warn_of_meaning(adapter, path, compiled, fit)
    tensors = {fit.names[name]: tensor for name, tensor in tensors.items()}
    spec, planned = fit.spec, fit.planned
    if prefix is not None:
        spec = prefixed(spec, prefix)
        planned = compiled.plan(spec, fit.tasks)
        names = zip((n for n, _ in expected_tensors(planned, compiled)), fit.expected, strict=True)
        tensors = {new: tensors[old] for new, old in names}
    spec_name = free_name(compiled.specs, name or prefix, path.resolve().name or "default")
    installed = InstalledSpec(spec_name, spec, planned.deferred_plan, adapter.seed)
    finish = partial(_fill, name=spec_name, tensors=tensors)
    return compiled.add(installed, planned, tasks=fit.tasks, finish=finish, draw=False)


def own_fit(path: Path, compiled: CompiledModel, cache: bool, passes: Passes | None, adapter: Adapter) -> Fit:
    """An adapter under its own spec. `cache`: as in `compile`. Raises: P447, P525, P567."""
    spec = spec_with_passes(adapter, path, passes, compiled) if adapter.passes else expanded_spec(adapter, path)
    cache = cache and not adapter.passes
    tasks = task_names(adapter_tasks(adapter, spec) or None, compiled.tasks)
    planned = plan_adapter(adapter, spec, compiled, tasks, cache)
    expected = dict(expected_tensors(planned, compiled))
    return Fit(spec, tasks, planned, expected, {name: name for name in adapter.tensors}, is_own=True)


def fit_under(flat: ast.Spec, compiled: CompiledModel, adapter: Adapter) -> Fit:
    """An adapter under another expanded spec, with its parameters as they are trained or, where
    these do not fit, in their export form. Raises: P2xx-P3xx (the spec), P304, P525, P567, P573.
    """
    require_no_passes(adapter)
    check_python_forms(adapter, registered_forms(flat))
    tasks = task_names(adapter_tasks(adapter, flat) or None, compiled.tasks)
    fits: list[Fit] = []
    for spec in dict.fromkeys((flat, stored_statements(flat))):
        planned = compiled.plan(spec, tasks)
        if planned.failed_expectations:
            raise PeftcError(planned.failed_expectations)
        check_changes(adapter, planned)
        expected = dict(expected_tensors(planned, compiled))
        names = Moves.of(spec).renamed(adapter.tensors, expected)
        fits.append(Fit(spec, tasks, planned, expected, names, is_own=False))
        if set(names.values()) == set(expected):
            return fits[-1]
    return fits[-1]


def _warn_of_meaning(adapter: Adapter, path: Path, compiled: CompiledModel, fit: Fit) -> None:
    """Warns of edits that compute something else than under the spec of the adapter (P854)."""
    spec = expanded_spec(adapter, path)
    own = compiled.plan(spec, fit.tasks)
    on_model = (OnModel(own, expected_sizes(own)), OnModel(fit.planned, expected_sizes(fit.planned)))
    findings = [one for one in breaking(("", ""), (spec, fit.spec), on_model).findings if one.category == "NUMERIC"]
    if findings:
        message = "the adapter computes something else under this spec than under its own"
        notes = tuple(f"{one.edit}: {one.reason}" for one in findings)
        warn(Diagnostic("P854", message, notes=notes, help="load it without `spec=`, or train it again"))


@torch.no_grad()
def _fill(model: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    for saved, tensor in {**parameters(model, name), **states(model, name)}.items():
        tensor.copy_(distributed_like(tensors[saved].reshape(tensor.shape), tensor))
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


def adapter_tasks(adapter: Adapter, spec: ast.Spec) -> tuple[str, ...]:
    """The tasks of an adapter's tensors. It may list more, of other specs. Raises: P525.

    Args: `spec`: `expanded_spec` of the adapter.
    """
    if not spec.per_task:
        return ()
    if len(adapter.tasks) > len(adapter.tensors):
        message = f"the adapter has {len(adapter.tensors):,} tensors for {len(adapter.tasks):,} tasks"
        raise PeftcError(Diagnostic("P525", message))
    return adapter.tasks


def expanded_spec(adapter: Adapter, directory: Path) -> ast.Spec:
    """The spec of an adapter, which may not include files. Raises: P447, P525."""
    require_no_passes(adapter)
    return _expanded(adapter, _parsed_spec(adapter, directory))


def spec_with_passes(adapter: Adapter, directory: Path, passes: Passes | None, compiled: CompiledModel) -> ast.Spec:
    """The same of an adapter with passes. Raises: P447, P440-P445, P525."""
    spec = _parsed_spec(adapter, directory)
    statements = statements_of_passes(adapter, spec, passes, compiled)
    others = tuple(s for s in spec.statements if getattr(s, "name", None) not in statements)
    expanded = _expanded(adapter, replace(spec, statements=others)).statements if others else ()
    statements = {getattr(s, "name", ""): s for s in expanded} | statements
    order = [name for s in spec.statements if (name := getattr(s, "name", "")) in statements]
    rest = [name for name in statements if name not in order]  # the forms that the edits call
    return replace(spec, statements=tuple(statements[name] for name in dict.fromkeys([*rest, *order])))


def _expanded(adapter: Adapter, spec: ast.Spec) -> ast.Spec:
    check_python_forms(adapter)
    with _planning_errors():
        return expand(with_built_in(spec, adapter.forms), include=None)


def _parsed_spec(adapter: Adapter, directory: Path) -> ast.Spec:
    with _planning_errors():
        return _parsed(adapter.spec, f"{directory / METADATA}: spec")


@lru_cache(8)
def _parsed(text: str, path: str) -> ast.Spec:
    return parse_text(text, path)


def check_python_forms(adapter: Adapter, names: Collection[str] | None = None) -> None:
    """Raises: P573 for a Python form that is not registered, or has another version.

    `names`: the forms to look at, by default all of the adapter.
    """
    for name, saved in adapter.python_forms.items():
        if names is not None and name not in names:
            continue
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
    check_changes(adapter, planned)
    return planned


def check_changes(adapter: Adapter, planned: PlanResult) -> None:
    """Raises: P567 for an edit that had another meaning when the adapter was saved."""
    for edit, change in changed_edits(adapter, planned.site_edits):
        message = f"`{edit.edit}` at `{edit.site.path}` {change.before} when the adapter was saved"
        notes = (f"since format {change.format}, {change.now}",)
        help_ = "load it with the version of peftc that saved it, or train it again"
        raise PeftcError(Diagnostic("P567", message, notes=notes, help=help_))


@contextmanager
def _planning_errors() -> Generator[None]:
    try:
        yield
    except PeftcError as error:
        if error.diagnostics[0].code in ("P507", "P509"):  # of the model, for which another sample may do
            raise
        notes = tuple(map(str, error.diagnostics[:3]))
        message = "the spec of the adapter cannot be planned on this model"
        raise PeftcError(Diagnostic("P525", message, notes=notes)) from error
