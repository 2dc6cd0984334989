"""Checks specs, alone and on the models that they are for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from peftc.checking.policy import Policy
from peftc.checking.targets import Target
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.diagnostics.activity import note
from peftc.diagnostics.formats.report import Case, Report
from peftc.diagnostics.suggestions import join_names
from peftc.semantics.expand import check_file, expand
from peftc.semantics.files import Include
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.walk import changes_model


@dataclass
class Checker:
    """Checks one spec after the other.

    Attributes:
        targets: the models that the spec of a path is for.
        include: further folders from which `use` may read.
        policy: what to report.
        cases: what was checked.
        locked: whether plans must be those of the locks.
        observe: what to do with an expanded spec and its plan on a model.
    """

    targets: Callable[[str], Sequence[Target]] = lambda path: ()
    include: Include = ()
    policy: Policy = field(default_factory=Policy)
    trust_remote_code: bool = False
    cache: bool = True
    locked: bool = False
    observe: Callable[[ast.Spec, str, Any], None] | None = None
    cases: list[Case] = field(default_factory=list[Case])
    _clean: dict[str, Any] = field(default_factory=dict[str, Any])  # by model
    _sources: dict[Source, bool] = field(default_factory=dict[Source, bool])  # whether models were checked

    def add(self, path: str, diagnostics: Iterable[Diagnostic]) -> None:
        """Adds a file that cannot be read."""
        self.cases.append(Case(path, None, tuple(diagnostics)))

    def check(self, text: str, path: str) -> None:
        """Checks a spec; on models only if it has no errors alone."""
        spec, diagnostics = self._alone(text, path)
        self.add(path, diagnostics)
        is_valid = spec is not None and not any(one.severity == "error" for one in diagnostics)
        targets = self.targets(path) if is_valid and spec is not None and has_plan(spec) else ()
        self._sources[Source(path, text)] = bool(targets)
        if targets and spec is not None:
            self._check_on(targets, spec, path)
        if self.locked and is_valid and spec is not None and has_plan(spec):
            locks = import_module("peftc.checking.locks")
            options = locks.Options(self.trust_remote_code, self.cache)
            self.add(path, locks.check_lock(expand(spec, {}, self.include), path, targets, options))

    def alone(self, text: str, path: str) -> tuple[Diagnostic, ...]:
        """What is wrong with a spec without a model; nothing is added."""
        return self._alone(text, path)[1]

    def _alone(self, text: str, path: str) -> tuple[ast.Spec | None, tuple[Diagnostic, ...]]:
        spec = None
        try:
            spec = parse_text(text, path)
            return spec, tuple(check_file(spec, self.include))
        except PeftcError as error:
            return spec, error.diagnostics

    def _check_on(self, targets: Sequence[Target], spec: ast.Spec, path: str) -> None:
        flat = expand(spec, {}, self.include)
        for target in targets:
            target = target if flat.per_task else replace(target, tasks=None)
            if self.cache and self.observe is None and self._clean_on(target.model).has(flat, target.tasks):
                note(f"{path} has no diagnostic on {target.model}, from the cache")
                self.cases.append(Case(path, target.model, ()))
                continue
            check_on_model = import_module("peftc.checking.models").check_on_model
            diagnostics, plan = check_on_model(flat, target, self.trust_remote_code, self.cache)
            if self.cache and not diagnostics:
                self._clean_on(target.model).add(flat, target.tasks)
            self.cases.append(Case(path, target.model, diagnostics))
            if self.observe is not None and plan is not None:
                self.observe(flat, target.model, plan)

    def _clean_on(self, model: str) -> Any:
        """The specs that are known to have no diagnostic on a model."""
        known = self._clean.get(model)
        if known is None or not known.is_kept:  # a check makes the table
            known = import_module("peftc.cache.checks").CleanSpecs(model, self.trust_remote_code)
            self._clean[model] = known
        return known

    def report(self, strict: bool = False) -> Report:
        """What is to be reported of all."""
        cases = [self._filtered(case) for case in self.cases]
        comments = [
            self._filtered(Case(source.path, None, tuple(self.policy.suppressions.diagnostics(source, on_models))))
            for source, on_models in self._sources.items()
        ]
        for number, case in enumerate(cases):
            own = (c for c in comments if c.path == case.path and case.model is None)
            cases[number] = case._replace(diagnostics=(*case.diagnostics, *(d for c in own for d in c.diagnostics)))
        diagnostics = merge_models(cases)
        return Report(tuple(diagnostics), tuple(cases), tuple(self.policy.suppressed), strict)

    def _filtered(self, case: Case) -> Case:
        diagnostics = (self.policy.apply(one) for one in case.diagnostics)
        return case._replace(diagnostics=tuple(one for one in diagnostics if one is not None))


def has_plan(spec: ast.Spec) -> bool:
    """Whether a spec can be planned: it changes a model, or is one method."""
    methods = sum(isinstance(statement, ast.Method) for statement in spec.statements)
    return changes_model(spec.statements) or methods == 1


def merge_models(cases: Iterable[Case]) -> list[Diagnostic]:
    """Each diagnostic once; one of models has a note that names them."""
    models: dict[Diagnostic, list[str]] = {}
    alone: set[Diagnostic] = set()
    for case in cases:
        for one in case.diagnostics:
            names = models.setdefault(one, [])
            if case.model is None:
                alone.add(one)
            elif case.model not in names:
                names.append(case.model)
    return [one if one in alone else _with_models(one, names) for one, names in models.items()]


def _with_models(diagnostic: Diagnostic, models: list[str]) -> Diagnostic:
    if all(name in diagnostic.message for name in models):
        return diagnostic
    return replace(diagnostic, notes=(*diagnostic.notes, f"on {join_names(models)}"))
