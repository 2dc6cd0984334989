"""The pipeline, in order. Read this first.

text → `parse` → Spec → `expand` → a flat Spec → `analyse` a model → `make_plan` → `regions_of` →
`reinstall` → the same model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

from peftc.addressing.sites import SiteTable
from peftc.cache.lookup import cached_table
from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError, warn
from peftc.forms.module import checked_seed
from peftc.installation.compiled_model import CompiledModel, analyse_base, plan_on
from peftc.installation.completeness import active_installation
from peftc.installation.record import InstalledSpec
from peftc.installation.spec_names import free_name, prefixed, require_tasks, task_names
from peftc.models.samples import joint_sample
from peftc.models.sources import load_model, resolve
from peftc.planning.on_table import needs_graphs, plan_on_table
from peftc.planning.planner import Plan, PlanResult
from peftc.planning.report.design import Design, design_of
from peftc.planning.report.plan import attach_figure
from peftc.planning.representatives import SiteEdits
from peftc.recognition.analysis import ModelLike
from peftc.semantics.files import Include
from peftc.semantics.spec_argument import Settings, SpecLike, default_name, flat_spec
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


def parse(text: str, path: str = "<text>") -> ast.Spec:
    """The spec that a text states, as a tree.

    Args:
        text: a spec, which begins with `peft 2`.
        path: the name of the text in messages.

    Returns:
        Frozen nodes, each with its span in the text. Names are not checked: `plan` does that.

    Raises:
        PeftcError: P0xx, every syntax error of the text.
    """
    return parse_text(text, path)


def sites(
    model: ModelLike,
    *,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> SiteTable:
    """Every place of a model that an edit can name, with its hidden states, shapes and weights.

    No weight is read.

    Args:
        model: a module, a configuration, or a name: a hub id, a folder, a config.json.
        sample: the keyword arguments of one forward, for a model whose inputs cannot be made from
            its configuration.
        samples: the arguments of several forwards, for modules that one sample does not reach.
        trust_remote_code: runs the Python files that the configuration names. Without it they
            never run.
        cache: reads the table of a named model from the user's cache folder, or keeps it there.

    Raises:
        PeftcError: P501-P511, for the model.
    """
    joint = joint_sample(sample, samples)
    table = cached_table(model, trust_remote_code) if cache and joint is None else None
    return table or analyse_base(model, joint, trust_remote_code, cache).table


def plan(
    spec: SpecLike,
    model: ModelLike,
    *,
    settings: Settings | None = None,
    include: Include = (),
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> Plan:
    """What compiling `spec` onto `model` would do: sites, exact parameter counts, foldability.

    No weight is read, and nothing is changed.

    Args:
        spec: the text of a spec, or the path of a file.
        model: as in `sites`.
        settings: parameters of the spec's method to override, as `--set` does.
        include: folders from which `use` may read, besides that of the spec (of a text: the
            working directory), as `--include` does.
        sample: as in `sites`.
        samples: as in `sites`.
        tasks: the tasks for which edits `per task` have parameters; a single task by default.
        trust_remote_code: as in `sites`.
        cache: as in `sites`.

    Returns:
        The plan, with all counts in parameters. An expectation that does not hold is an entry of
        `expectations`, not an error.

    Raises:
        PeftcError: P0xx (syntax), P1xx (names and arguments), P2xx (sites), P3xx (shapes), P5xx
            (the model), P537 (tasks). All errors of a stage are raised together.

    Warns:
        PeftcWarning: P217, for a selector that leaves out weights whose role is not known; P220,
            for a form of Linears, such as `lora`, at another module; P320, for `h = lora(x)`; P325,
            for a mean over tokens in a decoder; P326, for a form that no training changes.
    """
    with paused_gc():
        flat = flat_spec(spec, settings, include)
        planned = plan_edits(flat, model, joint_sample(sample, samples), tasks, trust_remote_code, cache)
        warn_of_places(planned)
        # A notebook may show the plan: pictures, a part of most other programs' time, can wait.
        edits, warnings = planned.site_edits, planned.warnings
        attach_figure(planned.plan, partial(_figure, edits, flat, warnings))
        return planned.plan


def _figure(
    edits: SiteEdits, flat: ast.Spec, warnings: Sequence[Diagnostic], plan: Plan, kind: Literal["html", "svg"]
) -> str | None:
    """The picture of a plan; None without pygraphviz."""
    with paused_gc():
        diagram = import_module("peftc.pictures.panels").diagram_of(edits.table, plan, edits, flat, warnings)
        pictures = import_module("peftc.pictures.picture")
        make = import_module("peftc.pictures.page").figure_html if kind == "html" else pictures.to_svg
        return pictures.drawn_or_none(diagram, make)


def warn_of_places(planned: PlanResult) -> None:
    """A `PeftcWarning` for each selector that leaves out weights of unknown role (P217), for forms
    of Linears elsewhere (P220), for states that are thrown away (P320), for means over tokens in a
    decoder (P325), and for forms that never train (P326).
    """
    for diagnostic in planned.warnings:
        if diagnostic.code in ("P217", "P220", "P320", "P325", "P326"):
            warn(diagnostic)


def plan_edits(
    flat: ast.Spec,
    model: ModelLike,
    sample: Mapping[str, Any] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> PlanResult:
    """The plan of an expanded spec, and each edit at each site. Args and Raises: as `plan`."""
    names = task_names(tasks)
    table = cached_table(model, trust_remote_code) if cache and sample is None else None
    planned = None if table is None else plan_on_table(table, flat, names)
    if planned is None or needs_graphs(planned.site_edits):
        planned = plan_on(analyse_base(model, sample, trust_remote_code, cache and table is None), flat, names)
    require_tasks(tasks, planned)
    return planned


def design(
    spec: SpecLike,
    model: ModelLike,
    *,
    settings: Settings | None = None,
    include: Include = (),
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Design, ...]:
    """Each edit along the design dimensions of He et al. 2022, read off its equations.

    The dimensions are the functional form, the insertion form, the modified representation and the
    composition function.

    Args:
        spec: as in `plan`.
        model: as in `plan`.
        settings: as in `plan`.
        include: as in `plan`.
        sample: as in `plan`.
        samples: as in `plan`.
        trust_remote_code: as in `plan`.

    Raises:
        PeftcError: as `plan`.

    Source: He et al. 2022, arXiv:2110.04366, Table 1.
    """
    flat, sample = flat_spec(spec, settings, include), joint_sample(sample, samples)
    site_edits = plan_edits(flat, model, sample, trust_remote_code=trust_remote_code).site_edits.representatives
    edits = dict.fromkeys(one.edit for one in site_edits)
    return tuple(design_of([one for one in site_edits if one.edit == edit]) for edit in edits)


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
    samples: Sequence[Mapping[str, Any]] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    verify: bool = False,
    cache: bool = True,
) -> nn.Module:
    """Changes `model` in place as `spec` says, and returns it.

    The base is frozen. The parameters of the edits, and those that `train` names, require
    gradients. The forward of each edited region becomes a generated subclass of its own class;
    everything else of the model stays as it is. `remove(model)` undoes it bit for bit.

    A model may have several specs. The function is that of one spec with the texts of all, in the
    order of compilation, and what the earlier ones have trained is kept.

    Args:
        spec: as in `plan`.
        model: a module; or a name, which is loaded with its weights, or a configuration, which
            gets random ones.
        seed: of the initial values. They depend on it, the edit, the site and the parameter alone.
            By default torch's initial seed.
        name: of this spec among those on the model. By default that of its file, else "default",
            with a number if that is taken.
        prefix: put before the names of its edits, as `apply … as` does. Also the default of `name`.
        settings: as in `plan`.
        include: as in `plan`.
        sample: as in `plan`.
        samples: as in `plan`.
        tasks: the tasks for which edits `per task` have parameters; `peftc.task` chooses one.
        trust_remote_code: as in `plan`.
        verify: runs `peftc.verify` on the result, and undoes the compilation if it fails.
        cache: keeps what needs a trace in the user's cache folder, or reads it from there, for
            edits at the boundaries of modules in models of transformers' own classes.

    Returns:
        The model, the same object if it was a module.

    Raises:
        PeftcError: as `plan`; P304 (an expectation does not hold), P4xx (the rewrite), P412 (names
            of another spec), P414 (parameters that another spec trains), P537 (tasks), P560 (the
            seed); with `verify`, P601-P611. After an error the model is as it was.

    Warns:
        PeftcWarning: P217, P220, P320, P325 and P326, as `plan`, before anything is changed.
    """
    if not isinstance(model, nn.Module):
        model = load_model(resolve(model, trust_remote_code))
    with paused_gc(promote=not verify):  # the copies of a verification die soon
        flat = prefixed(flat_spec(spec, settings, include), prefix)
        compiled = CompiledModel.active(model, joint_sample(sample, samples))
        names = task_names(tasks, compiled.tasks)
        planned = compiled.first_plan(flat, names) if cache else compiled.plan(flat, names)
        require_tasks(tasks, planned)
        if planned.failed_expectations:
            raise PeftcError(planned.failed_expectations)
        warn_of_places(planned)
        own_name = free_name(compiled.specs, name or prefix, default_name(spec))
        seed = torch.initial_seed() if seed is None else checked_seed(seed)
        # Verification is a later stage, which calls this one.
        check = import_module("peftc.verification").compilation_check(model) if verify else None
        return compiled.add(
            InstalledSpec(own_name, flat, planned.deferred_plan, seed), planned, tasks=names, finish=check
        )


def remove(
    model: nn.Module,
    name: str | None = None,
    *,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> nn.Module:
    """The base model again, bit for bit: its classes, parameters and `requires_grad`.

    What `fold` has written into the weights is part of the base from then on, and stays. An edited
    module that was replaced is gone with its edits; if all specs are taken out, the rest of the
    model is restored.

    Args:
        model: a compiled model.
        name: of one spec to take out. The others stay, with what they have trained.
        sample: as in `compile`.
        samples: as in `compile`.

    Returns:
        The model, the same object.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P436 (an edited module was
            replaced, and other specs stay), P529 (switched off), P546 (no room for the
            values that `train` has changed). After an error or an interrupt the model is as it was.
    """
    active_installation(model, complete=False)
    return CompiledModel(model, joint_sample(sample, samples)).remove(name)
