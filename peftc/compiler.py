"""The pipeline, in order. Read this first.

text → `parse` → Spec → `expand` → a flat Spec → `analyse` a model → `make_plan` → `regions_of` → `Surgery` → the same model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from peftc.addressing.sites import SiteTable
from peftc.concurrency.context import ChoiceBlock
from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.diagnostics.suggestions import join_names
from peftc.fakes.tensors import fake_copy
from peftc.forms.module import FormModule, checked_seed
from peftc.installation.disable import suspended
from peftc.installation.overlay import true_parameter
from peftc.installation.presence import active_installation, complete_installation
from peftc.installation.record import Installation, InstalledSpec, installation_of, is_installed, joint, joint_spec
from peftc.installation.reinstall import Done, reinstall, uninstall
from peftc.installation.spec_conflicts import free_name, noted, prefixed, refuse_second
from peftc.installation.surgery import strip
from peftc.models.load import load_model
from peftc.models.resolve import ModelSource, resolve
from peftc.models.runnable import check_runs, check_sample
from peftc.modules.offload import refuse_offloaded
from peftc.planning.lowering_context import DEFAULT_TASK
from peftc.planning.planner import Plan, PlanResult, make_plan
from peftc.planning.report.design import Design, design_of
from peftc.recognition.analysis import Analysis, ModelLike, analyse
from peftc.rewriting.positions import refused
from peftc.semantics.checks.structure import with_origin
from peftc.semantics.expand import expand
from peftc.semantics.load import Include, read_spec
from peftc.semantics.settings import settings_from
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec

SpecLike = str | PathLike[str] | ast.Spec
TASK = re.compile(r"[A-Za-z0-9_-]+")
_DICT = nn.ModuleDict()  # has attributes, which cannot be names in it
Settings = Mapping[str, object]  # of a method's parameters: numbers, truths, texts as after `--set`, expressions


def parse(text: str, path: str = "<text>") -> ast.Spec:
    """The spec that a text states.

    Raises: P0xx, every syntax error of the text.
    """
    return parse_text(text, path)


def spec_of(spec: SpecLike) -> ast.Spec:
    """A spec from a path, from text (anything with a line break in it, or that begins as specs do), or as it is."""
    if isinstance(spec, ast.Spec):
        return spec
    if not isinstance(spec, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        raise PeftcError(Diagnostic("P545", f"a spec is a path, a text or a parsed Spec, not a {type(spec).__name__}"))
    return parse_text(fspath(spec)) if is_text(spec) else read_spec(fspath(spec))


def is_text(spec: str | PathLike[str]) -> bool:
    return isinstance(spec, str) and (not spec or "\n" in spec or spec.lstrip().startswith("peft "))


def name_of(spec: SpecLike) -> str:
    """What a spec is called where nobody says it: as its file, without the ending."""
    path = spec.source.path if isinstance(spec, ast.Spec) else "<text>" if is_text(spec) else fspath(spec)
    return "default" if path.startswith("<") else Path(path).stem


def flat_of(spec: SpecLike, settings: Settings | None = None, include: Include = ()) -> ast.Spec:
    """A spec expanded: nothing but edits, `train`, `expect` and shared parameters is left."""
    return expand(spec_of(spec), settings_from(settings or {}), include)


def sites(model: ModelLike, *, sample: Mapping[str, Any] | None = None, trust_remote_code: bool = False) -> SiteTable:
    """Every place of a model that an edit can name, with its hidden states, shapes and weights. No weight is read.

    Args: `model`: a module, a config, or a name (hub id, folder, config.json). `sample`: the keyword arguments of one
    forward, for a model that cannot be fed from its config. `trust_remote_code`: run the code that a configuration brings
    along, if it does; it never is otherwise.
    Raises: P501-P510 (the model).
    """
    return analysed(model, sample, trust_remote_code).table


def plan(
    spec: SpecLike,
    model: ModelLike,
    *,
    settings: Settings | None = None,
    include: Include = (),
    sample: Mapping[str, Any] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """What compiling `spec` onto `model` would do: sites, exact parameter counts, fold verdicts. No weight is read.

    Args: `settings`: parameters of the spec's method to override, as `--set` does. `include`: folders from which `use`
    may read beside that of the spec (of a text: the working directory), as `--include` does. `tasks`: those of edits `per task` (one
    without it). `sample`, `trust_remote_code`: as in `sites`.
    Raises: P0xx syntax, P1xx names and arguments, P2xx sites, P3xx shapes, P5xx the model, P537 (tasks).
    """
    names = checked_tasks(tasks, ())
    return used(
        tasks, planned(flat_of(spec, settings, include), analysed(model, sample, trust_remote_code), names)
    ).plan


def design(
    spec: SpecLike,
    model: ModelLike,
    *,
    settings: Settings | None = None,
    include: Include = (),
    sample: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Design, ...]:
    """Each edit along the design dimensions of He et al. 2022 (Table 1), read off its equations: functional form, insertion form,
    modified representation, composition function.

    Args and Raises: as `plan`.
    """
    found = planned(flat_of(spec, settings, include), analysed(model, sample, trust_remote_code))
    edits = dict.fromkeys(placed.edit for placed in found.site_edits)
    return tuple(design_of([placed for placed in found.site_edits if placed.edit == edit]) for edit in edits)


def planned(
    flat: ast.Spec, analysis: Analysis, tasks: tuple[str, ...] = (), source: Source | None = None
) -> PlanResult:
    """The plan of an expanded spec on a model; where a selector matches nothing, what is odd about the model is said, too.

    Args: as `make_plan`. Raises: as `make_plan`; P418, P422 for tokens that nothing takes or tells.
    """
    try:
        found = make_plan(flat, analysis.table, source=source, tasks=tasks or (DEFAULT_TASK,))
    except PeftcError as error:
        notes = analysis.table.warnings
        raise PeftcError(
            replace(d, notes=(*d.notes, *notes)) if d.code == "P201" else d for d in error.diagnostics
        ) from error
    statements = {s.name: s for s in flat.statements if isinstance(s, ast.Edit)}
    wrong = [with_origin(d, statements[edit], flat) for edit, d in refused(found.site_edits, analysis.structure)]
    if wrong:
        raise PeftcError(wrong)
    return found


def analysed(
    model: ModelLike | ModelSource, sample: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> Analysis:
    """The analysis of a model as it is without edits."""
    check_sample(sample)
    if isinstance(model, nn.Module) and is_installed(model):
        record = installation_of(model)
        model, sample = strip(fake_copy(model, whole=True)), sample or record.sample
    source = model if isinstance(model, ModelSource) else resolve(model, trust_remote_code)
    try:
        return analyse(source, sample)
    except PeftcError:
        raise
    except Exception:
        check_runs(source, sample)
        raise


@paused_gc()
def compile(
    spec: SpecLike,
    model: ModelLike,
    seed: int | None = None,
    *,
    name: str | None = None,
    prefix: str | None = None,
    settings: Settings | None = None,
    include: Include = (),
    sample: Mapping[str, Any] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    verify: bool = False,
) -> nn.Module:
    """Changes `model` in place as `spec` says, and returns it. A name is loaded with its weights, a config gets random ones.

    The base is frozen; the parameters of the edits (and those that `train` names) require gradients. The forward of each
    edited region becomes a generated subclass of its own class; everything else of the model stays as it is.
    `remove(model)` undoes it bit for bit.

    A model may have several specs: the function is that of one spec with the texts of all, in the order of compilation,
    and what the earlier ones have trained is kept.

    Args: `seed`: of the initial values, which depend on it, the edit, the site and the parameter alone (default: torch's
    initial seed). `name`: of this spec among those on the model (default: that of its file, else "default"; with a number
    where that is taken). `tasks`: the names of those for which edits `per task` have parameters; `peftc.task` chooses.
    `prefix`: put before the names of its edits, as `apply … as` does; the default of `name`, too. `settings`, `include`, `sample`,
    `trust_remote_code`: as in `plan`. `verify`: run `peftc.verify` on the result, and undo the compilation where it finds something.
    Raises: as `plan`; P304 for an expectation that does not hold; P412 for names that the model has already, P414 for parameters
    that another spec trains; P537 for names of tasks that cannot be, P560 for a seed that is none; with `verify`, P601-P611. After an
    error the model is as it was.
    """
    if not isinstance(model, nn.Module):
        model = load_model(resolve(model, trust_remote_code))
    flat = prefixed(flat_of(spec, settings, include), prefix)
    record = complete_installation(model) if is_installed(model) else None
    analysis = analysed(model, sample)
    names = checked_tasks(tasks, tasks_of(record))
    found = used(tasks, planned(flat, analysis, names))
    if found.failed_expectations:
        raise PeftcError(found.failed_expectations)
    named = free_name(record, name or prefix, name_of(spec))
    part = InstalledSpec(
        named, print_spec(flat), found.plan, torch.initial_seed() if seed is None else checked_seed(seed)
    )
    # Verification is a later stage, which calls this one.
    then = import_module("peftc.verification").last_step(model) if verify else None
    return added(model, part, flat, found, analysis, sample, tasks=names, then=then)


def added(
    model: nn.Module,
    part: InstalledSpec,
    flat: ast.Spec,
    found: PlanResult,
    analysis: Analysis,
    sample: Mapping[str, Any] | None = None,
    tasks: tuple[str, ...] = (),
    then: Done | None = None,
) -> nn.Module:
    """Installs what was planned beside the specs that the model has: all or nothing."""
    parts: tuple[InstalledSpec, ...] = ()
    if is_installed(model):
        record = active_installation(model)
        parts, sample = record.specs, sample or record.sample
        refuse_second(record, flat, found.trained_parameters.values())
        with noted(f"together with {join_names([other.name for other in parts])}, on the model already"):
            found = planned(joint([joint_spec(parts), flat]), analysis, tasks)
    names = (tasks or (DEFAULT_TASK,)) if has_tasks(found) else ()
    return reinstall(model, (*parts, part), found, analysis.structure, sample=sample, tasks=names, then=then)


def remove(model: nn.Module, name: str | None = None, *, sample: Mapping[str, Any] | None = None) -> nn.Module:
    """The base model again: classes, parameters and `requires_grad` as they were before `compile`, bit for bit.

    What `fold` has written into the weights is part of the base from then on, and stays. An edited module that was replaced
    is gone with its edits; where all specs are taken out, the rest of the model is restored.

    Args: `name`: of one spec to take out; the others stay, with what they have trained. `sample`: as in `compile`.
    Raises: P410 for a model that is not compiled, P413 where it has no spec of that name, P436 where others stay and an edited
    module was replaced, P529 inside of `disabled`, P546 where there is no room for the values that `train` has changed. After an
    error, or an interrupt, the model is as it was.
    """
    record = active_installation(model, complete=False)
    gone = record.selected(name)
    rest = tuple(part for part in record.specs if part not in gone)
    if not rest:
        return uninstall(model, values=record.originals)
    complete_installation(model)
    with_sample = sample or record.sample
    analysis = analysed(model, with_sample)
    names = tasks_of(record)
    found = planned(joint_spec(rest), analysis, names)
    names = names if has_tasks(found) else ()

    dropped = {name: value for name, value in record.originals.items() if name not in found.trained_parameters.values()}
    return reinstall(model, rest, found, analysis.structure, sample=with_sample, tasks=names, values=dropped)


def tasks_of(record: Installation | None) -> tuple[str, ...]:
    """The tasks that a model has parameters for."""
    return record.task.names if record is not None else ()


def has_tasks(found: PlanResult) -> bool:
    """Whether an edit is `per task`."""
    return any(one.tasks for placed in found.site_edits for one in placed.instances)


def used(tasks: Sequence[str] | None, found: PlanResult) -> PlanResult:
    """Raises: P537 where tasks are asked for and no edit is `per task`."""
    if tasks is not None and not has_tasks(found):
        raise PeftcError(Diagnostic("P537", "no edit is `per task`, so there is nothing to have for tasks"))
    return found


def checked_tasks(tasks: Sequence[str] | None, present: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks that are asked for, else those that the model has.

    Raises: P537 where they are no names, given twice, or others than the model has.
    """
    if tasks is None:
        return present
    names = (tasks,) if isinstance(tasks, str) or not isinstance(tasks, Iterable) else tuple(tasks)  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
    wrong = [n for n in names if not isinstance(n, str) or not TASK.fullmatch(n) or hasattr(_DICT, n)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong or not names:
        message = f"`{wrong[0]}` is no name of a task" if names else "no task is named"
        raise PeftcError(Diagnostic("P537", message, help="names are of letters, digits, `_` and `-`"))
    if len(set(names)) < len(names):
        raise PeftcError(Diagnostic("P537", f"a task is named twice: {join_names(names)}"))
    if present and names != present:
        message = f"the model has parameters for {join_names(present)}"
        raise PeftcError(Diagnostic("P537", message, help="add a task with `peftc.add_task`, or leave `tasks` out"))
    return names


def disabled(model: nn.Module, name: str | None = None) -> ChoiceBlock:
    """Inside the block the model computes what the base computes; parameters of edits are kept.

    That holds in the present context alone: other threads and coroutines have their own. A thread that is to have it is
    started with `contextvars.copy_context().run`. `save_pretrained` writes the base; `state_dict()`, `named_parameters()` and
    copies are those of the model, with all that it has. Copies are not in the block.

    Args: `name`: of one spec; the others go on acting.
    Raises: P410 for a model that is not compiled, P413 where it has no spec of that name, P431 for a block that is left in another
    context, P432 for a base parameter that is trained and whose first value a module would not see, P436 where an edited module
    was replaced.
    """
    return suspended(model, name)


def specs(model: nn.Module) -> dict[str, str]:
    """The specs on a compiled model, by name, in the order of compilation: each expanded, as text.

    Raises: P410 for a model that is not compiled.
    """
    return {part.name: part.text for part in installation_of(model).specs}


def parameters(model: nn.Module, name: str | None = None) -> dict[str, nn.Parameter]:
    """What a compiled model trains, by the names under which it is saved: `<edit>/<site>/<form>.<parameter>`.

    Parameters of the base that `train` unfroze are named `<edit>/<dotted name>`.
    Args: `name`: of one spec, for its parameters alone.
    Raises: P410 for a model that is not compiled, P413 where it has no spec of that name, P436 where an edited module was
    replaced, P566 (offloaded).
    """
    record = complete_installation(model)
    edits = {edit for part in record.selected(name) for edit in part.edits}
    found: dict[str, nn.Parameter] = {}
    for place, where in record.form_modules.items():
        found |= {f"{place}.{n}": p for n, p in model.get_submodule(where).named_parameters()}
    found |= {saved: true_parameter(model, place) for saved, place in record.trained.items()}
    chosen = {saved: p for saved, p in found.items() if saved.partition("/")[0] in edits}
    refuse_offloaded(model, chosen)
    return chosen


def states(model: nn.Module, name: str | None = None) -> dict[str, torch.Tensor]:
    """What forms remember beside their parameters, such as which entries are trained, by the names under which it is saved.

    Args: `name`: as in `parameters`. Raises: as `parameters`.
    """
    record = complete_installation(model)
    edits = {edit for part in record.selected(name) for edit in part.edits}
    forms = {n: cast(FormModule, model.get_submodule(where)) for n, where in record.form_modules.items()}
    return {
        f"{n}.{buffer}": form.get_buffer(buffer)
        for n, form in forms.items()
        if n.partition("/")[0] in edits
        for buffer in form.states()
    }


@dataclass(frozen=True)
class InstalledRegion:
    """A rewritten module: its dotted name, the graph of each variant of its forward, and the code they became."""

    module: str
    graphs: tuple[torch.fx.Graph, ...]
    code: str


def graphs(model: nn.Module) -> dict[str, InstalledRegion]:
    """The rewritten regions of a compiled model, by dotted name.

    Raises: P410 for a model that is not compiled.
    """
    return {
        name: InstalledRegion(name, tuple(v.graph for v in kind.variants), kind.source)
        for name, kind in installation_of(model).regions
    }
