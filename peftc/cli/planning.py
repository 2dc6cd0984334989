"""Plans for commands: by the cached table of a model's sites where it serves, without torch."""

from collections.abc import Sequence
from importlib import import_module

from peftc.addressing.sites import SiteTable
from peftc.cache.lookup import cached_table
from peftc.planning.on_table import needs_graphs, plan_on_table
from peftc.planning.planner import PlanResult
from peftc.syntax import ast


def plan_of(
    flat: ast.Spec,
    model: str,
    tasks: Sequence[str] | None = None,
    *,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> PlanResult:
    """The plan of an expanded spec on a model. Raises: P2xx–P3xx, P5xx."""
    # Names of tasks are checked by torch's rules for names of modules.
    if tasks is None and (table := table_of(model, trust_remote_code, cache)) is not None:
        result = plan_on_table(table, flat)
        if not needs_graphs(result.site_edits):
            return result
    options = {"tasks": tasks, "trust_remote_code": trust_remote_code, "cache": cache}
    return import_module("peftc.compiler").plan_edits(flat, model, **options)


def table_of(model: str, trust_remote_code: bool, cache: bool) -> SiteTable | None:
    """The cached table of a model's sites, if there is one."""
    return cached_table(model, trust_remote_code) if cache else None
