"""What was done to a model: the specs on it, and enough to undo each. Kept in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from peftc.concurrency.context import AttachedEdits, ChoiceVar
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.installation.cached_analysis import CachedAnalysis
from peftc.modules.base_values import ADAPTERS
from peftc.planning import ir
from peftc.planning.pass_edit import PassEdit
from peftc.planning.planner import PlanResult
from peftc.planning.report.deferred import Deferred
from peftc.planning.report.plan import Plan
from peftc.rewriting.edits import SHARED
from peftc.specialization.generated_class import GeneratedClass
from peftc.syntax import ast
from peftc.syntax.printer import print_spec
from peftc.task_modules.tasked_module import Chosen

RECORD = "_peftc"


@dataclass(frozen=True)
class InstalledSpec:
    """One expanded spec on a model, its own plan, and the seed of its initial values.

    `adapters` are those attached to the model with this spec, with their seeds: `spec` has each in
    its edits, and `alone` is the spec of one, as its file has it.
    """

    name: str
    spec: ast.Spec
    deferred_plan: Deferred[Plan] = field(compare=False)  # it follows from the spec and the model
    seed: int
    adapters: Mapping[str, int] = field(default_factory=dict[str, int])
    alone: InstalledSpec | None = None

    @property
    def plan(self) -> Plan:
        return self.deferred_plan.value

    @property
    def text(self) -> str:
        """The expanded spec, canonically printed."""
        return print_spec(self.spec)

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of its passes."""
        return tuple(s.name for s in self.spec.statements if isinstance(s, PassEdit))

    @property
    def edits(self) -> tuple[str, ...]:
        """The names of its edits and `train` statements."""
        return tuple(s.name for s in self.spec.statements if isinstance(s, ast.Edit | ast.Train))


@dataclass
class Installation:
    """All that was done to a model."""

    specs: tuple[InstalledSpec, ...]
    planned: PlanResult  # all specs, planned together
    regions: list[tuple[str, GeneratedClass]]
    requires_grad: dict[str, bool]
    originals: dict[str, torch.Tensor]  # the first values of trained base parameters
    form_modules: dict[str, str]  # from saved names, without the parameter, to dotted names of forms
    task: Chosen  # the tasks; its `variable`: which is at work, and which edits do not act
    adapter: Chosen  # the same of attached adapters
    attached_values: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])  # by `place_of_values`
    sample: Mapping[str, Any] | None = None  # the arguments of the forward that shows the sites
    analysis: CachedAnalysis | None = field(default=None, repr=False)
    # Of each spec, what its edits do to a batch as a whole, once a batch of several adapters asks.
    edits_of_batch: list[tuple[InstalledSpec, list[tuple[str, bool]]]] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "analysis": None, "edits_of_batch": None}  # copies and pickles stay small

    @property
    def choice(self) -> ChoiceVar:
        return self.task.variable

    @property
    def attached(self) -> AttachedEdits:
        """The edits of each attached adapter."""
        return AttachedEdits({name: frozenset(spec.edits) for spec in self.specs for name in spec.adapters})

    @property
    def site_edits(self) -> Sequence[ir.SiteEdit]:
        return self.planned.site_edits

    @property
    def trained(self) -> Mapping[str, str]:
        """From saved names to the dotted names of base parameters."""
        return self.planned.trained_parameters

    @property
    def adapter_parameters(self) -> Mapping[str, str]:
        """The same of attached adapters, each of which has a value of its own."""
        return self.planned.adapter_parameters

    @property
    def parameters_of_base(self) -> tuple[str, ...]:
        """The dotted names of what specs and attached adapters train in the base."""
        return (*self.trained.values(), *self.adapter_parameters.values())

    def trained_in(self, parts: Iterable[InstalledSpec]) -> frozenset[str]:
        """The dotted names of what any spec, and these attached adapters, train in the base."""
        edits = {edit for part in parts for edit in self.edits_of(part)}
        own = (name for saved, name in self.adapter_parameters.items() if saved.partition("/")[0] in edits)
        return frozenset((*self.trained.values(), *own))

    def selected(self, name: str | None) -> tuple[InstalledSpec, ...]:
        """The spec of that name; all of them where it is None. Raises: P413 for an unknown name."""
        if name is None:
            return self.specs
        specs = {spec.name: spec for spec in self.specs}
        if name not in tuple(specs):
            if name in self.adapter.names:
                help_ = "it is an attached adapter: `peftc.detach`, `peftc.activate`, `peftc.adapter`"
            else:
                help_ = did_you_mean(name, specs) or f"the model has {join_names(list(specs))}"
            raise PeftcError(Diagnostic("P413", f"the model has no spec `{name}`", help=help_))
        return (specs[name],)

    def group(self, adapter: str) -> InstalledSpec:
        """The spec that an attached adapter shares with others. Raises: P547 (no such adapter)."""
        names = self.adapter.names
        if not isinstance(adapter, str) or adapter not in names:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            attached = f"attached are {join_names(names)}" if names else "`peftc.attach` it first"
            help_ = did_you_mean(adapter, names) or attached
            raise PeftcError(Diagnostic("P547", f"the model has no adapter `{adapter}` attached", help=help_))
        return next(spec for spec in self.specs if adapter in spec.adapters)

    def adapter_alone(self, name: str) -> InstalledSpec:
        """An attached adapter under its own name, as its file has it. Raises: P547."""
        group = self.group(name)
        assert group.alone is not None
        return replace(group.alone, name=name, seed=group.adapters[name])

    def edits_of(self, part: InstalledSpec) -> tuple[str, ...]:
        """The edits on the model of a spec, or of an attached adapter alone."""
        return part.edits if part in self.specs else self.group(part.name).edits

    def owner(self, edit: str) -> InstalledSpec:
        """The spec that an edit belongs to."""
        return next(spec for spec in self.specs if edit in spec.edits)


def place_of_values(saved: str) -> str:
    """The dotted name of the module with the values that the adapters of a group have of a
    parameter of the base: a parameter for each adapter. `saved`: as in `adapter_parameters`.
    """
    statement, _, name = saved.partition("/")
    return f"{SHARED}.{ADAPTERS}.{statement.partition('.')[0]}.{name}"


def find_installation(model: nn.Module) -> Installation | None:
    """The record of a compiled model; None for any other."""
    return getattr(model, "__dict__", {}).get(RECORD)


def installation_of(model: nn.Module) -> Installation:
    """The record of a compiled model. Raises P410 for any other."""
    record = find_installation(model)
    if record is None:
        message = f"this {type(model).__name__} has not been compiled by peftc"
        raise PeftcError(Diagnostic("P410", message, help="peftc.compile(spec, model) first"))
    return record


def refuse_passes(record: Installation, action: str) -> None:
    """Raises: P446 for a model with a pass. `action`: what equations alone allow."""
    names = [name for spec in record.specs for name in spec.passes]
    if names:
        message = f"{action}, and `{names[0]}` is a pass: a function of the program, without equations"
        raise PeftcError(Diagnostic("P446", message, help=f"`peftc.remove(model, {names[0]!r})` first"))


def is_installed(model: object) -> bool:
    return RECORD in getattr(model, "__dict__", {})


def joint_spec(specs: Iterable[ast.Spec]) -> ast.Spec:
    """The spec of all edits. Of several specs, expectations are left out: each is about one."""
    first, *others = specs
    if not others:
        return first
    own = [(s, spec.source) for spec in (first, *others) for s in spec.statements]
    statements = [replace(s, origin=s.origin or source) for s, source in own if not isinstance(s, ast.Expect)]
    forms = {s.name: s for s in statements if isinstance(s, ast.Form)}  # of one name: `check_spec_conflicts`
    statements = [*forms.values(), *(s for s in statements if not isinstance(s, ast.Form))]
    version = max(spec.version for spec in (first, *others))
    header: dict[str, Any] = {"header": (), "header_trailing": None, "closing": ()}
    return replace(others[-1], version=version, statements=tuple(statements), **header)
