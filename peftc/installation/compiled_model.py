"""A model and its specs as one object. Whatever changes the specs goes through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from peftc.cache.entries import write_table
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.fakes.tensors import fake_copy
from peftc.installation.cached_analysis import CachedAnalysis, known_state, recent_analysis, shared_analysis
from peftc.installation.compilations import Compilation, compilation_of, plan_on
from peftc.installation.completeness import active_installation, complete_installation
from peftc.installation.edited_classes import strip
from peftc.installation.journal import Journal
from peftc.installation.model_state import ModelState
from peftc.installation.record import Installation, InstalledSpec, installation_of, is_installed, joint_spec
from peftc.installation.reinstall import Step, reinstall, uninstall
from peftc.installation.spec_names import check_spec_conflicts, has_tasks, with_note
from peftc.installation.stored_compilations import Storage
from peftc.models.samples import check_sample
from peftc.models.skeleton import check_runs, stop_notes
from peftc.models.sources import ModelSource, resolve
from peftc.modules.module_rows import ModuleRows
from peftc.planning.lowering_context import DEFAULT_TASK
from peftc.planning.planner import PlanResult
from peftc.recognition.analysis import Analysis, ModelLike
from peftc.syntax import ast


class CompiledModel:
    """A module and the specs on it: none, one or several. Every change is all or nothing.

    The installation keeps the analysis, which is made anew for copies and changed modules.
    """

    def __init__(
        self, module: nn.Module, sample: Mapping[str, Any] | None = None, analysis: Analysis | None = None
    ) -> None:
        self.module = module
        self.state: ModelState | None = None  # of the module without edits, if the analysis compared it
        self.rows: ModuleRows | None = None  # those of the state
        self.storage: Storage | None = None  # of the first compilation
        self.stored: Compilation | None = None
        if analysis is not None:
            self.analysis = analysis
        check_sample(sample)
        self.sample = (sample or installation_of(module).sample) if is_installed(module) else sample

    @classmethod
    def active(cls, module: nn.Module, sample: Mapping[str, Any] | None = None) -> CompiledModel:
        """Raises: P436 where an edited module was replaced, P529 where edits are switched off."""
        if is_installed(module):
            active_installation(module)
        return cls(module, sample)

    @property
    def installation(self) -> Installation:
        """Raises: P410 for a model without specs."""
        return installation_of(self.module)

    @property
    def specs(self) -> tuple[InstalledSpec, ...]:
        return self.installation.specs if is_installed(self.module) else ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the model has parameters for."""
        return self.installation.task.names if is_installed(self.module) else ()

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis of the module as it is without edits."""
        cached = self.installation.analysis if is_installed(self.module) else None
        if cached is not None and cached.is_valid(self.module, self.sample):
            return cached.analysis
        analysis, self.state = base_analysis(self.module, self.sample, known=(self.state, self.rows))
        return analysis

    def plan(self, spec: ast.Spec, tasks: tuple[str, ...] | None = None) -> PlanResult:
        """An expanded spec, planned on the base. `tasks`: those of the model without it."""
        return plan_on(self.analysis, spec, self.tasks if tasks is None else tasks)

    def first_plan(self, spec: ast.Spec, tasks: tuple[str, ...]) -> PlanResult:
        """As `plan`; of a module without specs, by what another process has stored, if it has."""
        if not self.specs and not vars(self).keys() & {"analysis"}:
            source = resolve(self.module)
            self.state, self.rows = known_state(source, self.sample)
            if self.state is not None and recent_analysis(source, self.state) is None:
                self.storage = Storage.of(source, self.state, spec, tasks)
                self.stored = None if self.storage is None else self.storage.read()
        return self.plan(spec, tasks) if self.stored is None else self.stored.planned

    def replan(self, specs: Iterable[InstalledSpec], tasks: tuple[str, ...] | None = None) -> tuple[InstalledSpec, ...]:
        """Specs whose text or tasks have changed, with the plan of each."""
        return tuple(replace(one, deferred_plan=self.plan(one.spec, tasks).deferred_plan) for one in specs)

    def set_tasks(self, tasks: tuple[str, ...], finish: Step | None = None) -> nn.Module:
        """Gives the model parameters for these tasks; those of tasks that it has already stay."""
        return self.set_specs(self.replan(self.specs, tasks), tasks=tasks, finish=finish)

    def add(
        self,
        spec: InstalledSpec,
        planned: PlanResult,
        *,
        tasks: tuple[str, ...] | None = None,
        finish: Step | None = None,
        draw: bool = True,
    ) -> nn.Module:
        """Installs one more spec, `planned` alone. Raises: P412, P414 for conflicts with others."""
        joint: PlanResult | None = planned
        if self.specs:
            check_spec_conflicts(active_installation(self.module), spec.spec, planned)
            with with_note(f"together with {join_names([other.name for other in self.specs])}, on the model already"):
                joint = self.plan(joint_spec(one.spec for one in (*self.specs, spec)), tasks)
        return self.set_specs((*self.specs, spec), joint, tasks=tasks, finish=finish, draw=draw)

    def remove(self, name: str | None = None) -> nn.Module:
        """Takes out the spec of that name, or all. Resets what is no longer trained."""
        record = self.installation
        removed = record.selected(name)
        rest = tuple(spec for spec in record.specs if spec not in removed)
        if not rest:
            return uninstall(self.module, values=record.originals)
        complete_installation(self.module)
        joint = self.plan(joint_spec(one.spec for one in rest))
        trained = joint.trained_parameters.values()
        originals = {name: value for name, value in record.originals.items() if name not in trained}
        return self.set_specs(rest, joint, values=originals)

    def set_specs(
        self,
        specs: tuple[InstalledSpec, ...],
        joint: PlanResult | None = None,
        *,
        tasks: tuple[str, ...] | None = None,
        requires_grad: Mapping[str, bool] | None = None,
        values: Mapping[str, Tensor] | None = None,
        finish: Step | None = None,
        draw: bool = True,
        journal: Journal | None = None,
    ) -> nn.Module:
        """Leaves the module with exactly these specs. What stays keeps its parameters.

        Args: `joint`: the plan of all specs together, if known. `tasks`: by default the model's.
        `requires_grad`: what taking out everything restores. `values`: of base parameters, to be
        written. `finish`: a step that may fail. `draw`: without it, `finish` must write all new
        parameters. `journal`: of a larger transaction.
        """
        if not specs:
            return uninstall(self.module, requires_grad, values, journal)
        tasks = self.tasks if tasks is None else tasks
        joint = joint or self.plan(joint_spec(one.spec for one in specs), tasks)
        stored = self.stored if self.stored is not None and self.stored.planned is joint else None
        compilation = stored or compilation_of(self.analysis, joint)
        if stored is None and self.storage is not None:
            self.storage.write(compilation, self.analysis.table)
            self.storage = None
        reinstall(
            self.module,
            specs,
            compilation,
            sample=self.sample,
            tasks=(tasks or (DEFAULT_TASK,)) if has_tasks(joint) else (),
            requires_grad=requires_grad,
            values=values,
            finish=finish,
            draw=draw,
            journal=journal,
        )
        if stored is None:
            tensors = None if self.rows is None else self.rows.tensors
            self.keep_analysis(tensors if finish is None else None)  # a step may have replaced some
        return self.module

    def keep_analysis(self, tensors: Sequence[Tensor] | None) -> None:
        """Keeps the analysis for later changes. `tensors`: as in `CachedAnalysis.after_edits`."""
        if self.analysis.structure.model is not self.module:
            known = (self.module, self.analysis, self.sample)
            self.installation.analysis = CachedAnalysis.after_edits(*known, self.state, tensors)
            self.state = self.rows = None  # from now on something may change the module


def analyse_base(
    model: ModelLike | ModelSource,
    sample: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    cache: bool = False,
) -> Analysis:
    """The analysis of a model as it is without edits. `cache`: keeps the table of a named model."""
    return base_analysis(model, sample, trust_remote_code, cache)[0]


def base_analysis(
    model: ModelLike | ModelSource,
    sample: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    cache: bool = False,
    known: tuple[ModelState | None, ModuleRows | None] = (None, None),
) -> tuple[Analysis, ModelState | None]:
    """As `analyse_base`, with the state of a model without edits, if it is known or can be.
    `known`: the state and the rows, if they are known.
    """
    check_sample(sample)
    edited = isinstance(model, nn.Module) and is_installed(model)
    if isinstance(model, nn.Module) and edited:
        sample = sample or installation_of(model).sample
        model = strip(fake_copy(model, whole=True))
    source = model if isinstance(model, ModelSource) else resolve(model, trust_remote_code)
    try:
        state, rows = known_state(source, sample) if known[0] is None else known
        analysis = shared_analysis(source, sample, state, rows)
    except PeftcError:
        raise
    except Exception as error:  # whatever the model's own code raises, or an analysis that fails on it
        check_runs(source, sample)
        message = f"{source.id} runs, and its analysis stopped"
        help_ = "give another `sample`; or report the model: this is a gap in peftc"
        raise PeftcError(Diagnostic("P512", message, notes=stop_notes(error), help=help_)) from error
    if cache and source.request is not None and sample is None:
        classes = {type(source.config), *map(type, analysis.structure.model.modules())}
        write_table(source.request, analysis.table, classes)
    return analysis, None if edited else state
