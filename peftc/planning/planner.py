"""Plans an expanded spec on the sites of a model. No weight is read."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, ParamSpec, TypeVar

from peftc.addressing.selection import Selection
from peftc.addressing.sites import Site, SiteTable, UntracedModule
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.diagnostics.suggestions import for_sites, plural
from peftc.equations.table import forms_of
from peftc.forms import Form
from peftc.planning.assignments import change_at_first, changed_modules, changed_weights, conflicts
from peftc.planning.expectations import evaluate
from peftc.planning.foldability.check import check_foldability
from peftc.planning.form_warnings import linear_form_warnings, token_mean_warnings, untrained_warnings
from peftc.planning.ir import FrozenCall, SiteEdit
from peftc.planning.layer_numbers import LayerNumbers, with_text
from peftc.planning.lowering import lower_edit, unused
from peftc.planning.lowering_context import DEFAULT_TASK, LoweringContext, groups_of, sharers_of
from peftc.planning.pass_edit import PassEdit, form_of_pass, lower_pass
from peftc.planning.plan_entries import Lowered, edit_entry, plan_totals, train_entry
from peftc.planning.report.deferred import Deferred
from peftc.planning.report.layer_values import PlanExcluded
from peftc.planning.report.plan import (
    Plan,
    PlanExpectation,
    PlanModel,
    PlanSpec,
    PlanUnread,
)
from peftc.planning.report.plan_sites import PlanSites
from peftc.planning.report.site_ranges import ranges_of
from peftc.planning.representatives import Representatives, SiteEdits
from peftc.planning.selection.conditions import Conditions
from peftc.planning.selection.module_sites import SharedModules, edits_parameters, other_parameters, parameter_sites
from peftc.planning.selection.selector_errors import untraced_in_layers, untraced_warning
from peftc.planning.selection.selectors import coverage_warnings, select
from peftc.planning.selection.train import TrainTarget, resolve_train
from peftc.planning.selection.unplaced_warnings import unplaced_warnings
from peftc.semantics.checks.equations import replacement_warnings
from peftc.semantics.checks.spec import with_origin
from peftc.semantics.layer_values import differs
from peftc.syntax import ast
from peftc.syntax.printer import print_where

T = TypeVar("T")
P = ParamSpec("P")


class PlanResult(NamedTuple):
    """A plan and what the compiler needs beyond it."""

    deferred_plan: Deferred[Plan]
    site_edits: SiteEdits  # every edit at every site, in the order of the spec
    trained_parameters: Mapping[str, str]  # `<statement>/<dotted name>` -> dotted name of a base parameter
    adapter_parameters: Mapping[str, str]  # the same of attached adapters, each with a value of its own
    failed_expectations: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]  # such as uneven coverage

    @property
    def plan(self) -> Plan:
        return self.deferred_plan.value


def make_plan(
    spec: ast.Spec,
    table: SiteTable,
    *,
    source: Source | None = None,
    tasks: tuple[str, ...] = (DEFAULT_TASK,),
    is_valid: bool = False,
) -> PlanResult:
    """Resolves, types and counts every edit of an expanded spec. The plan has failed expectations.

    Args: `source`: the text that the plan names and hashes; by default that of the spec.
    `is_valid`: of a spec that has been planned on this table, and whose expectations hold. Such a
    plan, and one without expectations, is counted when something asks for it.
    Raises: P1xx, P201-P205, P214, P301-P309 and what forms refuse: all errors of the spec at once.
    """
    with suppress(EverySiteNeeded):
        return Planner(spec, table, source or spec.source, tasks).result(is_valid)
    return Planner(spec, table, source or spec.source, tasks, single=True).result(is_valid)


class EverySiteNeeded(Exception):
    """A plan depends on sites one by one: they share parameters, or there are errors to count."""


@dataclass
class Planner:
    """Plans with one site for all that are alike. `single`: with every site."""

    spec: ast.Spec
    table: SiteTable
    source: Source
    tasks: tuple[str, ...]
    single: bool = False
    errors: list[Diagnostic] = field(default_factory=list[Diagnostic])
    failed_expectations: list[Diagnostic] = field(default_factory=list[Diagnostic])
    warnings: list[Diagnostic] = field(default_factory=list[Diagnostic])
    excluded: dict[str, Selection] = field(default_factory=dict[str, Selection])  # by conditions, of each statement
    untraced: dict[UntracedModule, None] = field(default_factory=dict[UntracedModule, None])  # in edited layers

    def result(self, is_valid: bool) -> PlanResult:
        edits, trains = self.edits(), self.trains()
        self.stop_at_errors()
        plan = Deferred(lambda: self.with_expectations(self.plan(edits, trains), edits))
        if not is_valid and any(isinstance(statement, ast.Expect) for statement in self.spec.statements):
            plan.value  # noqa: B018  # has failed expectations, or raises
            self.stop_at_errors()
        selections = [(site_edits, self.selections[edit.name]) for edit, site_edits in edits if site_edits]
        trained = trained_names(trains.values())
        of_adapters: dict[str, str] = {}
        for adapters in dict.fromkeys(target.adapters for target in trains.values() if target.adapters):
            of_adapters |= trained_names(trains.values(), adapters)
        site_edits = SiteEdits(selections, self.representatives)
        return PlanResult(plan, site_edits, trained, of_adapters, tuple(self.failed_expectations), tuple(self.warnings))

    @cached_property
    def shared_modules(self) -> SharedModules:
        return SharedModules(self.table)

    @cached_property
    def selections(self) -> Mapping[str, Selection]:
        """What each edit or `train` statement selects, by its name."""
        statements = [s for s in self.spec.statements if isinstance(s, ast.Edit | ast.Train)]
        selections = ((s.name, self.attempt(s, self.select, s)) for s in statements)
        return {name: selection for name, selection in selections if selection}

    def select(self, statement: ast.Edit | ast.Train) -> Selection:
        """The sites of a statement at which its conditions hold."""
        selection, excluded = select(statement.selector, self.table), None
        if statement.where:
            selection, excluded = Conditions(statement, self.layers).split(selection)
            self.excluded[statement.name] = excluded
        return selection

    @cached_property
    def representatives(self) -> Representatives:
        single = self.single or any(isinstance(s, ast.Train | PassEdit) for s in self.spec.statements)
        edits = [s for s in self.spec.statements if isinstance(s, ast.Edit) and differs(s.body)]
        variants = partial(self.layers.variants, edits) if edits else None
        return Representatives(self.table, list(self.selections.values()), single, variants)

    @cached_property
    def layers(self) -> LayerNumbers:
        return LayerNumbers(self.table)

    # Resolution and lowering

    def edits(self) -> Lowered:
        """Every edit at its sites, lowered twice if parameters are shared."""
        sites = [(edit, self.edit_sites(edit)) for edit in self.spec.statements if isinstance(edit, ast.Edit)]
        for edit, _ in sites:
            self.warn(edit, (*unused(edit), *replacement_warnings(edit, forms_of(self.spec))))
        groups = {edit.name: groups_of(edit_sites) for edit, edit_sites in sites}
        forms = forms_of(self.spec)
        context = LoweringContext(self.table, self.tasks, forms, self.shared_forms(forms), groups=groups)
        edits = [(edit, self.lower(edit, edit_sites, context)) for edit, edit_sites in sites]
        if not self.single and not all(is_independent(one) for _, site_edits in edits for one in site_edits):
            raise EverySiteNeeded
        sharers = sharers_of((site_edit for _, site_edits in edits for site_edit in site_edits), context.shared)
        if sharers and not self.errors:
            context = LoweringContext(self.table, self.tasks, forms, context.shared, sharers, groups)
            edits = [(edit, self.lower(edit, edit_sites, context)) for edit, edit_sites in sites]
        for edit, site_edits in edits:
            self.warn(edit, linear_form_warnings(edit, site_edits))
            self.warn(edit, token_mean_warnings(edit, site_edits))
        for edit, diagnostic in untrained_warnings(edits):
            self.warn(edit, (diagnostic,))
        for edit, diagnostic in (*conflicts(edits), *changed_weights(edits), *changed_modules(edits)):
            self.report(edit, (diagnostic,))
        return edits

    def edit_sites(self, edit: ast.Edit) -> list[Site]:
        """The sites of an edit; those of `wb` are weights and biases."""
        sites = self.sites(edit)
        if not sites or not edits_parameters(edit):
            return sites
        parameters = self.attempt(edit, parameter_sites, edit, sites, self.table)
        others = other_parameters(edit, sites, self.table) if parameters else ()
        if others and not self.single:
            raise EverySiteNeeded
        self.warn(edit, others)
        return parameters or []

    def lower(self, edit: ast.Edit, sites: Sequence[Site], context: LoweringContext) -> list[SiteEdit]:
        site_edits: list[SiteEdit] = []
        errors: dict[object, list[Diagnostic]] = defaultdict(list)
        known: dict[object, SiteEdit] = {}  # by what the equations depend on: once for each kind of layer
        by_layer = differs(edit.body)
        for site in sites:
            try:
                here = replace(edit, body=self.layers.body(edit, site)) if by_layer else edit
                key = lowering_key(site), here.body if here is not edit else ()
                if (same := known.get(key)) is not None:
                    site_edits.append(replace(same, site=site, count=self.representatives.count(site)))
                    continue
                site_edit = self.lower_at(here, site, context)
                site_edit = site_edit if here is edit else with_text(site_edit, edit)
                site_edits.append(replace(site_edit, count=self.representatives.count(site)))
                if is_independent(site_edit) and not names_modules(site_edit):
                    known[key] = site_edits[-1]
            except PeftcError as error:
                where = (f"with the values of its layer, at `{site.path}`",) if by_layer else ()
                for diagnostic in error.diagnostics:
                    own = replace(diagnostic, notes=(*diagnostic.notes, *where))
                    errors[diagnostic.code, diagnostic.span].append(own)
        self.report(edit, (for_sites(diagnostics, " of this edit") for diagnostics in errors.values()))
        return site_edits

    def lower_at(self, edit: ast.Edit, site: Site, context: LoweringContext) -> SiteEdit:
        if isinstance(edit, PassEdit):
            return lower_pass(edit, site, self.table.d_model)
        return lower_edit(edit, site, context)

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
        """The representatives of the sites that a statement selects."""
        selector, selection = statement.selector, self.selections.get(statement.name)
        if selection is None:
            return []
        sites = self.attempt(statement, self.shared_modules.merge, self.representatives.of(selection), selector)
        if not sites:
            return []
        self.warn(statement, coverage_warnings(selector, self.table))
        self.warn(statement, unplaced_warnings(selector, self.table))
        untraced = [module for module in untraced_in_layers(selection, self.table) if module not in self.untraced]
        if untraced:
            self.untraced |= dict.fromkeys(untraced)
            self.warn(statement, (untraced_warning(selector, untraced),))
        return sites

    def shared_forms(self, forms: Mapping[str, Form]) -> dict[str, ast.Call]:
        calls: dict[str, ast.Call] = {}
        for let in self.spec.statements:
            match let:
                case ast.Let(name, ast.Call("shared", (ast.Call(function) as call,), ())) if function in forms:
                    calls[name] = call
                case ast.Let(_, ast.Call("shared") as call):
                    help_ = "write `shared(adapter(r=64))`"
                    self.report(let, (Diagnostic("P303", "`shared` takes one form", call.span, help=help_),))
                case _:
                    pass
        return calls

    # The plan

    def plan(self, edits: Lowered, trains: dict[str, TrainTarget]) -> Plan:
        foldability = check_foldability([site_edits for _, site_edits in edits], self.table)
        entries = {
            edit.name: edit_entry(
                edit,
                site_edits,
                fold,
                self.plan_sites(one.site for one in site_edits),
                self.layers.plan_values(edit, site_edits, self.representatives),
                self.plan_excluded(edit),
            )
            for (edit, site_edits), fold in zip(edits, foldability, strict=True)
        }
        of_name = {s.name: s for s in self.spec.statements if isinstance(s, ast.Train)}
        entries |= {
            name: train_entry(target, self.plan_sites(target.sites), self.plan_excluded(of_name[name]))
            for name, target in trains.items()
        }
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
            totals=plan_totals(edits, foldability, trains.values(), table.parameters),
            expectations=(),
            unread=tuple(PlanUnread(module=m.module, type=m.type, reason=m.reason) for m in self.untraced),
        )

    def with_expectations(self, plan: Plan, edits: Lowered) -> Plan:
        outcomes: list[PlanExpectation] = []
        of_edit = {edit.name: site_edits for edit, site_edits in edits}

        def changes(name: str) -> str | None:
            return change_at_first(of_edit.get(name, ()))

        for statement in self.spec.statements:
            if isinstance(statement, ast.Expect) and (
                outcome := self.attempt(statement, evaluate, statement, plan, changes)
            ):
                text, failure = outcome
                outcomes.append(PlanExpectation(text=text, holds=failure is None))
                self.failed_expectations.extend(self.locate(statement, filter(None, (failure,))))
        return plan.model_copy(update={"expectations": tuple(outcomes)})

    def plan_sites(self, sites: Iterable[Site]) -> PlanSites:
        """The sites, and what else they are of, that these represent."""
        return PlanSites(ranges_of(self.representatives, sites))

    def plan_excluded(self, statement: ast.Edit | ast.Train) -> PlanExcluded | None:
        """The sites at which the conditions of a statement do not hold."""
        if not (selection := self.excluded.get(statement.name)):
            return None
        representatives = Representatives(self.table, [selection])
        sites = PlanSites(ranges_of(representatives, representatives.of(selection)))
        return PlanExcluded(where=print_where(statement).strip(), sites=sites)

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
        if self.errors and not self.single:
            raise EverySiteNeeded  # they say how many sites they are at
        if self.errors:
            groups: dict[Diagnostic, list[Diagnostic]] = defaultdict(list)
            by_place = sorted(dict.fromkeys(self.errors), key=lambda e: e.span.start if e.span else 0)
            for error in sorted(by_place, key=lambda e: e.source.path if e.source else ""):
                groups[replace(error, span=None)].append(error)
            raise PeftcError(map(_in_lines, groups.values()))


def trained_names(targets: Iterable[TrainTarget], adapters: tuple[str, ...] = ()) -> dict[str, str]:
    """`<statement>/<dotted name>` and the dotted name of what these statements train. A parameter
    has the name of the first one. `adapters`: those of the statements.
    """
    own = [target for target in targets if target.adapters == adapters]
    first = {name: target.name for target in reversed(own) for name in target.parameters}
    return {f"{statement}/{name}": name for name, statement in first.items()}


def lowering_key(site: Site) -> object:
    """Equal for sites at which an edit has the same equations, but for names of modules."""
    shapes = tuple((name, state.shape) for name, state in site.states.items())
    return site.kind, tuple(name for name, _ in site.steps), site.group, site.runs, bool(site.layer_input), shapes


def is_independent(site_edit: SiteEdit) -> bool:
    """Whether an edit shares no parameters with other sites."""
    alone = site_edit.count == 1 or not site_edit.site.shared_with
    return alone and all(instance.owner is None for instance in site_edit.instances)


def names_modules(site_edit: SiteEdit) -> bool:
    """Whether an edit depends on its site, or on modules of others that are one with it."""
    is_own = bool(site_edit.site.shared_with or site_edit.weights) or form_of_pass(site_edit) is not None
    return is_own or any(isinstance(term, FrozenCall) for term in site_edit.terms())


def _in_lines(errors: Sequence[Diagnostic]) -> Diagnostic:
    first, lines = errors[0], dict.fromkeys(f"{error.span.line}" for error in errors[1:] if error.span)
    if len(errors) == 1:
        return first
    times = f"the same {plural(len(errors) - 1, 'more time')}"
    note = f"{times}, in line{'s' * (len(lines) > 1)} {', '.join(lines)}"
    return replace(first, notes=(*first.notes, note))
