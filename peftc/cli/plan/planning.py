"""Plans for commands: by the cached table of a model's sites where it serves, without torch."""

from collections.abc import Sequence

from peftc.addressing.sites import SiteTable
from peftc.cache.lookup import cached_table
from peftc.checking.models import plan_target
from peftc.checking.targets import Target
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
    """The plan of an expanded spec on a model, as `check` makes it. Raises: P2xx–P3xx, P5xx."""
    return plan_target(flat, Target(model, None if tasks is None else tuple(tasks)), trust_remote_code, cache)


def table_of(model: str, trust_remote_code: bool, cache: bool) -> SiteTable | None:
    """The cached table of a model's sites, if there is one."""
    return cached_table(model, trust_remote_code) if cache else None
