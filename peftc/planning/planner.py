"""Plans an expanded spec on the sites of a model. No weight is read."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, ParamSpec, TypeVar

from peftc.addressing.sites import EntryChoice, RowRange, Site, SiteTable, UntracedModule, numel
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.diagnostics.suggestions import for_sites, plural
from peftc.forms import FORMS
from peftc.planning.assignments import conflicts, is_identity
from peftc.planning.expectations import evaluate
from peftc.planning.foldability.check import Foldability, check_foldability
from peftc.planning.ir import FrozenCall, SiteEdit
from peftc.planning.lowering import lower_edit, unused
from peftc.planning.lowering_context import DEFAULT_TASK, LoweringContext, count_parameters, groups_of, sharers_of
from peftc.planning.report.plan import (
    Plan,
    PlanEdit,
    PlanExpectation,
    PlanModel,
    PlanSite,
    PlanSpec,
    PlanTotals,
    PlanUnread,
)
from peftc.planning.selection.module_sites import SharedModules, edits_parameters, other_parameters, parameter_sites
from peftc.planning.selection.selector_errors import untraced_in_layers, untraced_warning
from peftc.planning.selection.selectors import coverage_warnings, resolve
from peftc.planning.selection.train import TrainTarget, resolve_train
from peftc.planning.selection.unplaced_warnings import unplaced_warnings
from peftc.semantics.checks.spec import with_origin
from peftc.syntax import ast

T = TypeVar("T")
P = ParamSpec("P")
Lowered = list[tuple[ast.Edit, list[SiteEdit]]]


class PlanResult(NamedTuple):
    """A plan and what the compiler needs beyond it."""

    plan: Plan
    site_edits: tuple[SiteEdit, ...]  # every edit at every site, in the order of the spec
    trained_parameters: Mapping[str, str]  # `<statement>/<dotted name>` -> dotted name of a base parameter
    failed_expectations: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]  # such as uneven coverage


def make_plan(
    spec: ast.Spec, table: SiteTable, *, source: Source | None = None, tasks: tuple[str, ...] = (DEFAULT_TASK,)
) -> PlanResult:
    """Resolves, types and counts every edit of an expanded spec. The plan has failed expectations.

    Args: `source`: the text that the plan names and hashes; by default that of the spec.
    Raises: P1xx, P201-P205, P214, P301-P309 and what forms refuse: all errors of the spec at once.
    """
    planner = _Planner(spec, table, source or spec.source, tasks)
    edits, trains = planner.edits(), planner.trains()
    planner.stop_at_errors()
    plan = planner.plan(edits, trains)
    plan = planner.with_expectations(plan)
    planner.stop_at_errors()
    site_edits = tuple(site_edit for _, site_edits in edits for site_edit in site_edits)
    first = {name: target.name for target in reversed(trains.values()) for name in target.parameters}
    names = {f"{statement}/{name}": name for name, statement in first.items()}
    return PlanResult(plan, site_edits, names, tuple(planner.failed_expectations), tuple(planner.warnings))


@dataclass
class _Planner:
    spec: ast.Spec
    table: SiteTable
    source: Source
    tasks: tuple[str, ...]
    errors: list[Diagnostic] = field(default_factory=list[Diagnostic])
    failed_expectations: list[Diagnostic] = field(default_factory=list[Diagnostic])
    warnings: list[Diagnostic] = field(default_factory=list[Diagnostic])
    untraced: dict[UntracedModule, None] = field(default_factory=dict[UntracedModule, None])  # in edited layers

    @cached_property
    def shared_modules(self) -> SharedModules:
        return SharedModules(self.table)

    # Resolution and lowering

    def edits(self) -> Lowered:
        """Every edit at its sites, lowered twice if parameters are shared."""
        sites = [(edit, self.edit_sites(edit)) for edit in self.spec.statements if isinstance(edit, ast.Edit)]
        for edit, _ in sites:
            self.warn(edit, unused(edit))
        groups = {edit.name: groups_of(edit_sites) for edit, edit_sites in sites}
        context = LoweringContext(self.table, self.tasks, self.shared_forms(), groups=groups)
        edits = [(edit, self.lower(edit, edit_sites, context)) for edit, edit_sites in sites]
        sharers = sharers_of((site_edit for _, site_edits in edits for site_edit in site_edits), context.shared)
        if sharers and not self.errors:
            context = LoweringContext(self.table, self.tasks, context.shared, sharers, groups)
            edits = [(edit, self.lower(edit, edit_sites, context)) for edit, edit_sites in sites]
        for edit, diagnostic in conflicts(edits):
            self.report(edit, (diagnostic,))
        return edits

    def edit_sites(self, edit: ast.Edit) -> list[Site]:
        """The sites of an edit; those of `wb` are weights and biases."""
        sites = self.sites(edit)
        if not sites or not edits_parameters(edit):
            return sites
        parameters = self.attempt(edit, parameter_sites, edit, sites, self.table)
        self.warn(edit, other_parameters(edit, sites, self.table) if parameters else ())
        return parameters or []

    def lower(self, edit: ast.Edit, sites: Sequence[Site], context: LoweringContext) -> list[SiteEdit]:
        site_edits: list[SiteEdit] = []
        errors: dict[object, list[Diagnostic]] = defaultdict(list)
        known: dict[object, SiteEdit] = {}  # by what the equations depend on: once for each kind of layer
        for site in sites:
            key = lowering_key(site)
            if (same := known.get(key)) is not None:
                site_edits.append(replace(same, site=site))
                continue
            try:
                site_edits.append(lower_edit(edit, site, context))
                if is_independent(site_edits[-1]):
                    known[key] = site_edits[-1]
            except PeftcError as error:
                for diagnostic in error.diagnostics:
                    errors[diagnostic.code, diagnostic.span].append(diagnostic)
        self.report(edit, (for_sites(diagnostics, " of this edit") for diagnostics in errors.values()))
        return site_edits

    def trains(self) -> dict[str, TrainTarget]:
        targets: dict[str, TrainTarget] = {}
        for statement in self.spec.statements:
            if not isinstance(statement, ast.Train) or not (sites := self.sites(statement)):
                continue
            if target := self.attempt(statement, resolve_train, statement, sites, self.table):
                targets[statement.name] = target
                present = {name for site in target.sites for name in site.states}
                for name in (name for name in statement.states if name not in present):
                    message = f"no site of `{statement.name}` has `{name}`"
                    self.warn(statement, (Diagnostic("P204", message, statement.span, severity="warning"),))
        return targets

    def sites(self, statement: ast.Edit | ast.Train) -> list[Site]:
        selector = statement.selector
        sites = self.attempt(statement, resolve, selector, self.table)
        sites = sites and self.attempt(statement, self.shared_modules.merge, sites, selector)
        if not sites:
            return []
        self.warn(statement, coverage_warnings(selector, self.table))
        self.warn(statement, unplaced_warnings(selector, self.table))
        untraced = [module for module in untraced_in_layers(sites, self.table) if module not in self.untraced]
        if untraced:
            self.untraced |= dict.fromkeys(untraced)
            self.warn(statement, (untraced_warning(selector, untraced),))
        return sites

    def shared_forms(self) -> dict[str, ast.Call]:
        forms: dict[str, ast.Call] = {}
        for let in self.spec.statements:
            match let:
                case ast.Let(name, ast.Call("shared", (ast.Call(function) as call,), ())) if function in FORMS:
                    forms[name] = call
                case ast.Let(_, ast.Call("shared") as call):
                    help_ = "write `shared(adapter(r=64))`"
                    self.report(let, (Diagnostic("P303", "`shared` takes one form", call.span, help=help_),))
                case _:
                    pass
        return forms

    # The plan

    def plan(self, edits: Lowered, trains: dict[str, TrainTarget]) -> Plan:
        foldability = check_foldability([site_edits for _, site_edits in edits], self.table)
        entries = {
            edit.name: _edit_entry(edit, site_edits, fold)
            for (edit, site_edits), fold in zip(edits, foldability, strict=True)
        }
        entries |= {name: _train_entry(target) for name, target in trains.items()}
        names = [s.name for s in self.spec.statements if isinstance(s, ast.Edit | ast.Train)]
        table = self.table
        return Plan(
            spec=PlanSpec(path=self.source.path, sha256=hashlib.sha256(self.source.text.encode()).hexdigest()),
            model=PlanModel(
                id=table.model_id,
                type=table.model_type,
                parameters=table.parameters,
                fingerprint=table.fingerprint,
                fingerprint_version=table.fingerprint_version,
            ),
            edits=tuple(entries[name] for name in names),
            totals=_totals(edits, foldability, trains.values(), table.parameters),
            expectations=(),
            unread=tuple(PlanUnread(module=m.module, type=m.type, reason=m.reason) for m in self.untraced),
        )

    def with_expectations(self, plan: Plan) -> Plan:
        outcomes: list[PlanExpectation] = []
        for statement in self.spec.statements:
            if isinstance(statement, ast.Expect) and (outcome := self.attempt(statement, evaluate, statement, plan)):
                text, failure = outcome
                outcomes.append(PlanExpectation(text=text, holds=failure is None))
                self.failed_expectations.extend(self.locate(statement, filter(None, (failure,))))
        return plan.model_copy(update={"expectations": tuple(outcomes)})

    # Diagnostics

    def attempt(self, statement: ast.Statement, stage: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of a stage, or None after its errors are reported."""
        try:
            return stage(*args, **kwargs)
        except PeftcError as error:
            self.report(statement, error.diagnostics)
            return None

    def report(self, statement: ast.Statement, diagnostics: Iterable[Diagnostic]) -> None:
        self.errors.extend(self.locate(statement, diagnostics))

    def warn(self, statement: ast.Statement, diagnostics: Iterable[Diagnostic]) -> None:
        self.warnings.extend(self.locate(statement, diagnostics))

    def locate(self, statement: ast.Statement, diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
        """Diagnostics in the text of the statement, with how expansion produced it."""
        return (with_origin(d, statement, self.spec).with_source(self.source) for d in diagnostics)

    def stop_at_errors(self) -> None:
        """Raises all errors in the order of the text; equal ones in several lines as one."""
        if self.errors:
            groups: dict[Diagnostic, list[Diagnostic]] = defaultdict(list)
            by_place = sorted(self.errors, key=lambda e: e.span.start if e.span else 0)
            for error in sorted(by_place, key=lambda e: e.source.path if e.source else ""):
                groups[replace(error, span=None)].append(error)
            raise PeftcError(map(_in_lines, groups.values()))


def lowering_key(site: Site) -> object:
    """Equal for sites at which an edit has the same equations, but for names of modules."""
    shapes = tuple((name, state.shape) for name, state in site.states.items())
    return site.kind, tuple(name for name, _ in site.steps), site.group, site.runs, bool(site.layer_input), shapes


def is_independent(site_edit: SiteEdit) -> bool:
    """Whether an edit names no module of its site, and shares no parameters with other sites."""
    alone = not site_edit.site.shared_with and all(instance.owner is None for instance in site_edit.instances)
    return alone and not any(isinstance(term, FrozenCall) for term in site_edit.terms())


def _in_lines(errors: Sequence[Diagnostic]) -> Diagnostic:
    first, lines = errors[0], dict.fromkeys(f"{error.span.line}" for error in errors[1:] if error.span)
    if len(errors) == 1:
        return first
    times = f"the same {plural(len(errors) - 1, 'more time')}"
    note = f"{times}, in line{'s' * (len(lines) > 1)} {', '.join(lines)}"
    return replace(first, notes=(*first.notes, note))


def _edit_entry(edit: ast.Edit, site_edits: Sequence[SiteEdit], fold: Foldability) -> PlanEdit:
    count = count_parameters(site_edits)
    return PlanEdit(
        name=edit.name,
        sites=_plan_sites(site_edit.site for site_edit in site_edits),
        trained=count.trained,
        stored=count.stored,
        changed=numel(fold.changed),
        served=0 if fold.foldable else count.stored,
        foldable=fold.foldable,
        reason=fold.reason,
        identity=all(map(is_identity, site_edits)),
    )


def _plan_sites(sites: Iterable[Site]) -> tuple[PlanSite, ...]:
    return tuple(PlanSite(path=use.path, module=use.module) for site in sites for use in site.uses)


def _train_entry(target: TrainTarget) -> PlanEdit:
    total = numel(target.ranges)
    return PlanEdit(
        name=target.name,
        sites=_plan_sites(target.sites),
        trained=total,
        stored=total,
        changed=total,
        served=0,
        foldable=True,
        reason="trains parameters of the base in place",
        identity=True,
    )


def _totals(edits: Lowered, foldability: Sequence[Foldability], trains: Iterable[TrainTarget], base: int) -> PlanTotals:
    """Counts over the whole plan: shared parameters and entries of the base count once."""
    base_ranges = frozenset[RowRange]().union(*(target.ranges for target in trains))
    changed = frozenset[RowRange | EntryChoice](base_ranges).union(*(fold.changed for fold in foldability))
    folds = list(zip(edits, foldability, strict=True))
    count = count_parameters(site_edit for _, site_edits in edits for site_edit in site_edits)
    served = count_parameters(e for (_, site_edits), fold in folds if not fold.foldable for e in site_edits)
    return PlanTotals(
        base=base,
        trained=count.trained + numel(base_ranges),
        stored=count.stored + numel(base_ranges),
        changed=numel(changed),
        served=served.stored,
    )
