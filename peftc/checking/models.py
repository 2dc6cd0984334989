"""A spec on the models that it is for: its sites, shapes, counts and expectations."""

from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from peftc.cache.checks import is_allowed, keep_allowed
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
    table = cached_table(target.model, trust_remote_code) if cache else None
    request = None if table is None else local_request(target.model, trust_remote_code)
    if table is not None and request is not None:
        result = plan_on_table(table, flat, target.tasks or ())
        depends = target.tasks is not None or needs_graphs(result.site_edits)
        if not depends or is_allowed(request, flat, target.tasks):
            return result
    with activity("importing torch and transformers"):
        plan_edits = import_module("peftc.compiler").plan_edits
    options = {"tasks": target.tasks, "trust_remote_code": trust_remote_code}
    result = plan_edits(flat, target.model, cache=cache, **options)
    if cache and (request := local_request(target.model, trust_remote_code)) is not None:
        keep_allowed(request, flat, target.tasks)
    return result


def _with_place(diagnostic: Diagnostic, target: Target) -> Diagnostic:
    """A diagnostic about a model itself points to the configuration that names it."""
    is_about_model = diagnostic.source is None or diagnostic.source.text == target.model
    if target.source is None or not is_about_model:
        return diagnostic
    return replace(diagnostic, source=target.source, span=target.span)
