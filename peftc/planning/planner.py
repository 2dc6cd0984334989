"""From an expanded spec and the sites of a model to the Plan. No weight is read."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from peftc.addressing.parameter_ranges import EntryChoice, RowRange, numel
from peftc.addressing.sites import Site, SiteTable, UntracedModule
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.forms import FORMS
from peftc.planning import counts, expectations
from peftc.planning.assignments import clashes
from peftc.planning.foldability.check import Foldability, check_foldability
from peftc.planning.identity import is_identity
from peftc.planning.ir import SiteEdit
from peftc.planning.lowering import lower_edit, unused
from peftc.planning.lowering_context import DEFAULT_TASK, LoweringContext, Shared, groups_of, shared_members
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
from peftc.planning.selection.parameter_sites import left_out, of_parameters, parameter_sites
from peftc.planning.selection.selectors import coverage_warnings, resolve
from peftc.planning.selection.shared_modules import Sharing, uses
from peftc.planning.selection.train import Trained, missing, trained
from peftc.planning.selection.untraced import in_layers_of, warning
from peftc.semantics.checks.spec import with_origin
from peftc.syntax import ast

T = TypeVar("T")


class PlanResult(NamedTuple):
    """A plan and what the compiler needs beyond it.

    `placed`: every edit at every site, in the order of the spec. `trained`: base parameters that get a gradient, from
    `<statement>/<dotted name>` to the dotted name, each once. `findings`: expectations that do not hold. `warnings`: what
    is probably not meant, such as uneven coverage.
    """

    plan: Plan
    site_edits: tuple[SiteEdit, ...]
    trained_parameters: Mapping[str, str]
    failed_expectations: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]


def make_plan(
    spec: ast.Spec, table: SiteTable, *, source: Source | None = None, tasks: tuple[str, ...] = (DEFAULT_TASK,)
) -> PlanResult:
    """Resolves, types and counts every edit of an expanded spec.

    An expectation that does not hold is a finding, not an exception: there is a plan, and it says so.

    Args:
        spec: after `peftc.semantics` has expanded it: only edits, `train`, `expect` and shared `let` are left.
        source: the text that is named and hashed in the plan; that of the spec without it.
        tasks: those that `per task` makes parameters for.

    Raises: everything wrong in the whole spec at once: P1xx, P201-P205, P214, P301-P309 and what forms refuse.
    """
    planner = _Planner(spec, table, source or spec.source, tasks)
    edits, trains = planner.edits(), planner.trains()
    planner.stop_at_errors()
    plan = planner.plan(edits, trains)
    plan = planner.with_expectations(plan)
    planner.stop_at_errors()
    placed = tuple(placed for _, places in edits for placed in places)
    first = {name: made.name for made in reversed(list(trains.values())) for name in made.parameters}
    names = {f"{statement}/{name}": name for name, statement in first.items()}
    return PlanResult(plan, placed, names, tuple(planner.findings), tuple(planner.warnings))


@dataclass
class _Planner:
    spec: ast.Spec
    table: SiteTable
    source: Source
    tasks: tuple[str, ...]
    errors: list[Diagnostic] = field(default_factory=list[Diagnostic])
    findings: list[Diagnostic] = field(default_factory=list[Diagnostic])
    warnings: list[Diagnostic] = field(default_factory=list[Diagnostic])
    unread: dict[UntracedModule, None] = field(
        default_factory=dict[UntracedModule, None]
    )  # in the layers of any statement

    @cached_property
    def sharing(self) -> Sharing:
        return Sharing(self.table)

    # Statements to places --------------------------------------------------------------------------------------------

    def edits(self) -> list[tuple[ast.Edit, list[SiteEdit]]]:
        """Every edit with its places; twice where parameters are shared, since their number is known after one pass."""
        found = [(edit, self.places_of(edit)) for edit in self.spec.statements if isinstance(edit, ast.Edit)]
        for edit, _ in found:
            self.warn(edit, unused(edit))
        groups = {edit.name: groups_of(sites) for edit, sites in found}
        scope = LoweringContext(self.table, self.tasks, self.shared(), groups=groups)
        placed = self.placed(found, scope)
        members = shared_members((p for _, places in placed for p in places), scope.shared)
        if members and not self.errors:
            placed = self.placed(found, LoweringContext(self.table, self.tasks, scope.shared, members, groups))
        for clash in clashes(placed):
            self.report(clash.statement, (clash.diagnostic,))
        return placed

    def places_of(self, edit: ast.Edit) -> list[Site]:
        """The sites of an edit; those of `wb` are weights and biases."""
        sites = self.sites(edit)
        if not sites or not of_parameters(edit):
            return sites
        parts = self.attempt(edit, lambda: parameter_sites(edit, sites, self.table))
        self.warn(edit, left_out(edit, sites, self.table) if parts else ())
        return parts or []

    def placed(
        self, found: Sequence[tuple[ast.Edit, Sequence[Site]]], scope: LoweringContext
    ) -> list[tuple[ast.Edit, list[SiteEdit]]]:
        return [(edit, self.places(edit, sites, scope)) for edit, sites in found]

    def places(self, edit: ast.Edit, sites: Sequence[Site], scope: LoweringContext) -> list[SiteEdit]:
        placed: list[SiteEdit] = []
        wrong: dict[object, list[Diagnostic]] = defaultdict(list)
        for site in sites:
            try:
                placed.append(lower_edit(edit, site, scope))
            except PeftcError as error:
                for diagnostic in error.diagnostics:
                    wrong[diagnostic.code, diagnostic.span].append(diagnostic)
        self.report(edit, (_at_all(same) for same in wrong.values()))
        return placed

    def trains(self) -> dict[str, Trained]:
        found: dict[str, Trained] = {}
        for statement in self.spec.statements:
            if isinstance(statement, ast.Train) and (sites := self.sites(statement)):
                with_sites = lambda statement=statement, sites=sites: trained(statement, sites, self.table)  # noqa: E731
                if made := self.attempt(statement, with_sites):
                    found[statement.name] = made
                    self.warn(statement, missing(statement, made))
        return found

    def sites(self, statement: ast.Edit | ast.Train) -> list[Site]:
        sharing = self.sharing
        found = self.attempt(
            statement, lambda: sharing.united(resolve(statement.selector, self.table), statement.selector)
        )
        if found:
            self.warn(statement, coverage_warnings(statement.selector, self.table))
            self.warn_unread(statement, found)
        return found or []

    def warn_unread(self, statement: ast.Edit | ast.Train, sites: Sequence[Site]) -> None:
        """P215 for modules that no earlier statement has met."""
        if fresh := [module for module in in_layers_of(sites, self.table) if module not in self.unread]:
            self.unread |= dict.fromkeys(fresh)
            self.warn(statement, (warning(statement.selector, fresh),))

    def shared(self) -> dict[str, Shared]:
        found: dict[str, Shared] = {}
        for let in self.spec.statements:
            match let:
                case ast.Let(name, ast.Call("shared", (ast.Call(function) as call,), ())) if function in FORMS:
                    found[name] = Shared(let, call)
                case ast.Let(_, ast.Call("shared") as call):
                    wrong = Diagnostic(
                        "P303", "`shared` takes one form", call.span, help="write `shared(adapter(r=64))`"
                    )
                    self.report(let, (wrong,))
                case _:
                    pass
        return found

    # Places to a plan ------------------------------------------------------------------------------------------------

    def plan(self, edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]], trains: dict[str, Trained]) -> Plan:
        judged = check_foldability([places for _, places in edits], self.table)
        entries = {edit.name: _entry(edit, places, v) for (edit, places), v in zip(edits, judged, strict=True)}
        entries |= {name: _train_entry(made) for name, made in trains.items()}
        names = [s.name for s in self.spec.statements if isinstance(s, ast.Edit | ast.Train)]
        model = self.table
        return Plan(
            spec=PlanSpec(path=self.source.path, sha256=hashlib.sha256(self.source.text.encode()).hexdigest()),
            model=PlanModel(
                id=model.model_id,
                type=model.model_type,
                parameters=model.parameters,
                fingerprint=model.fingerprint,
                fingerprint_version=model.fingerprint_version,
            ),
            edits=tuple(entries[name] for name in names),
            totals=_totals(edits, judged, trains.values(), model.parameters),
            expectations=(),
            unread=tuple(PlanUnread(module=m.module, type=m.type, reason=m.reason) for m in self.unread),
        )

    def with_expectations(self, plan: Plan) -> Plan:
        outcomes: list[PlanExpectation] = []
        for statement in self.spec.statements:
            if not isinstance(statement, ast.Expect):
                continue
            evaluated = self.attempt(statement, lambda statement=statement: expectations.evaluate(statement, plan))
            if evaluated is None:
                continue
            outcomes.append(PlanExpectation(text=evaluated.text, holds=evaluated.holds))
            if evaluated.failure:
                self.findings.extend(self.located(statement, (evaluated.failure,)))
        return plan.model_copy(update={"expectations": tuple(outcomes)})

    # What is wrong ---------------------------------------------------------------------------------------------------

    def attempt(self, statement: ast.Statement, made: Callable[[], T]) -> T | None:
        try:
            return made()
        except PeftcError as error:
            self.report(statement, error.diagnostics)
            return None

    def report(self, statement: ast.Statement, diagnostics: Iterable[Diagnostic]) -> None:
        self.errors.extend(self.located(statement, diagnostics))

    def warn(self, statement: ast.Statement, diagnostics: Iterable[Diagnostic]) -> None:
        self.warnings.extend(self.located(statement, diagnostics))

    def located(self, statement: ast.Statement, diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
        """In the text the statement came from, and how expansion brought it here."""
        return (with_origin(found, statement, self.spec).with_source(self.source) for found in diagnostics)

    def stop_at_errors(self) -> None:
        """Raises everything that is wrong so far, in the order of the text."""
        if self.errors:
            alike: dict[Diagnostic, list[Diagnostic]] = defaultdict(list)
            for found in sorted(self.errors, key=_position):
                alike[replace(found, span=None)].append(found)
            raise PeftcError(map(_in_lines, alike.values()))


def _position(found: Diagnostic) -> tuple[str, int]:
    return (found.source.path if found.source else "", found.span.start if found.span else 0)


def _at_all(same: Sequence[Diagnostic]) -> Diagnostic:
    """One message for what is wrong at many sites of an edit."""
    first, more = same[0], len(same) - 1
    if not more:
        return first
    return replace(first, notes=(*first.notes, f"the same at {more} more site{'s' * (more > 1)} of this edit"))


def _in_lines(same: Sequence[Diagnostic]) -> Diagnostic:
    """One message for what is wrong at several places of the text in the same way."""
    first, lines = same[0], dict.fromkeys(f"{found.span.line}" for found in same[1:] if found.span)
    if len(same) == 1:
        return first
    times = f"the same {len(same) - 1} more time{'s' * (len(same) > 2)}"
    return replace(first, notes=(*first.notes, f"{times}, in line{'s' * (len(lines) > 1)} {', '.join(lines)}"))


def _entry(edit: ast.Edit, places: Sequence[SiteEdit], verdict: Foldability) -> PlanEdit:
    count = counts.count(places)
    return PlanEdit(
        name=edit.name,
        sites=_plan_sites(p.site for p in places),
        trained=count.trained,
        stored=count.stored,
        changed=numel(verdict.changed),
        served=0 if verdict.foldable else count.stored,
        foldable=verdict.foldable,
        reason=verdict.reason,
        identity=all(is_identity(p) for p in places),
    )


def _plan_sites(sites: Iterable[Site]) -> tuple[PlanSite, ...]:
    return tuple(PlanSite(path=one.path, module=one.module) for site in sites for one in uses(site))


def _train_entry(made: Trained) -> PlanEdit:
    """Parameters of the base itself: trained, stored, changed in place, and nothing is left over."""
    total = numel(made.regions)
    return PlanEdit(
        name=made.name,
        sites=_plan_sites(made.sites),
        trained=total,
        stored=total,
        changed=total,
        served=0,
        foldable=True,
        reason="trains parameters of the base in place",
        identity=True,
    )


def _totals(
    edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]],
    judged: Sequence[Foldability],
    trains: Iterable[Trained],
    base: int,
) -> PlanTotals:
    """Over the whole plan: shared sets of parameters and entries of the base once, however many edits name them."""
    own = frozenset[RowRange]().union(*(made.regions for made in trains))
    changed = frozenset[RowRange | EntryChoice](own).union(*(verdict.changed for verdict in judged))
    all_of_them = counts.count(p for _, places in edits for p in places)
    stays = [p for (_, places), verdict in zip(edits, judged, strict=True) if not verdict.foldable for p in places]
    return PlanTotals(
        base=base,
        trained=all_of_them.trained + numel(own),
        stored=all_of_them.stored + numel(own),
        changed=numel(changed),
        served=counts.count(stays).stored,
    )
