"""A spec on the models that it is for: its sites, shapes, counts and expectations."""

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from peftc.cache.checks import Tasks, is_allowed, keep_allowed
from peftc.cache.lookup import cached_table
from peftc.checking.targets import Target
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.activity import activity
from peftc.models.names import local_request
from peftc.planning.on_table import needs_graphs, plan_on_table
from peftc.planning.planner import PlanResult
from peftc.syntax import ast


class Outcome(NamedTuple):
    """A spec on a model.

    Attributes:
        diagnostics: all that its plan reports.
        plan: None if there is an error.
    """

    diagnostics: tuple[Diagnostic, ...]
    plan: PlanResult | None = None


def check_on_model(flat: ast.Spec, target: Target, trust_remote_code: bool = False, cache: bool = True) -> Outcome:
    """What the plan of an expanded spec on a model reports."""
    try:
        result = plan_target(flat, target, trust_remote_code, cache)
    except PeftcError as error:
        return Outcome(tuple(_with_place(one, target) for one in error.diagnostics))
    return Outcome((*result.failed_expectations, *result.warnings), result)


def plan_target(flat: ast.Spec, target: Target, trust_remote_code: bool = False, cache: bool = True) -> PlanResult:
    """The plan of an expanded spec on a model. Raises: P2xx–P3xx, P5xx."""
    return ModelPlans(target.model, trust_remote_code, cache).plan(flat, target.tasks)


class ModelPlans:
    """Plans of specs on one model, by its cached table where that serves. It is traced at most
    once.
    """

    def __init__(self, model: str, trust_remote_code: bool = False, cache: bool = True) -> None:
        self._model, self._trust_remote_code, self._cache = model, trust_remote_code, cache
        self._table = cached_table(model, trust_remote_code) if cache else None
        self._request = None if self._table is None else local_request(model, trust_remote_code)
        self._analysis: Any = None
        self._error: PeftcError | None = None

    def plan(self, flat: ast.Spec, tasks: Tasks = None) -> PlanResult:
        """The plan of an expanded spec. Raises: P2xx–P3xx, P5xx."""
        if self._table is not None and self._request is not None:
            result = plan_on_table(self._table, flat, tasks or ())
            depends = tasks is not None or needs_graphs(result.site_edits)
            if not depends or is_allowed(self._request, flat, tasks):
                return result
        with activity("importing torch and transformers"):
            compiler = import_module("peftc.compiler")
        names = compiler.task_names(tasks)
        result = compiler.plan_on(self._analyse(compiler), flat, names)
        compiler.require_tasks(tasks, result)
        if self._cache and (request := local_request(self._model, self._trust_remote_code)) is not None:
            keep_allowed(request, flat, tasks)
        return result

    def _analyse(self, compiler: Any) -> Any:
        """Raises: P5xx, at the second time without another attempt."""
        if self._error is not None:
            raise self._error
        if self._analysis is None:
            keep = self._cache and self._table is None
            try:
                self._analysis = compiler.analyse_base(self._model, None, self._trust_remote_code, keep)
            except PeftcError as error:
                self._error = error
                raise
        return self._analysis


def _with_place(diagnostic: Diagnostic, target: Target) -> Diagnostic:
    """A diagnostic about a model itself points to the configuration that names it."""
    is_about_model = diagnostic.source is None or diagnostic.source.text == target.model
    if target.source is None or not is_about_model:
        return diagnostic
    return replace(diagnostic, source=target.source, span=target.span)
