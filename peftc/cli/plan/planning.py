"""Plans for commands: by the cached table of a model's sites where it serves, without torch."""

from collections.abc import Sequence

from peftc.addressing.sites import SiteTable
from peftc.cache.lookup import cached_table
from peftc.checking.models import plan_target
from peftc.checking.targets import Target
from peftc.cli.spec_files import Unusable
from peftc.diagnostics.diagnostic import printable
from peftc.planning.planner import PlanResult
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


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


def selector_of(text: str) -> ast.Selector:
    """A selector of the command line. Raises: P0xx; Unusable for a text with other statements."""
    statements = parse_text(f"peft 2\nedit sites at {text} {{ h = h }}\n", "SELECTOR").statements
    edit = statements[0] if len(statements) == 1 and "{" not in text else None
    if not isinstance(edit, ast.Edit):
        raise Unusable(f"`{printable(text)}` is not one selector")
    return edit.selector
