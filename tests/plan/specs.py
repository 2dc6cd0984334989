"""Plans a text on a site table."""

import pytest

from peftc.addressing.sites import SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.planner import PlanResult, make_plan
from peftc.planning.report.plan import PlanEdit
from peftc.semantics.expand import expand
from peftc.syntax import parse_text


def planned(text: str, table: SiteTable) -> PlanResult:
    """The plan of a text (without its first line) on a site table."""
    return make_plan(expand(parse_text(f"peft 1\n{text}", "test.peft")), table)


def only_edit(text: str, table: SiteTable) -> PlanEdit:
    (edit,) = planned(text, table).plan.edits
    return edit


def refused(text: str, table: SiteTable) -> tuple[Diagnostic, ...]:
    """The diagnostics of a text; each has a span."""
    with pytest.raises(PeftcError) as excinfo:
        planned(text, table)
    diagnostics = excinfo.value.diagnostics
    assert all(one.span and one.source and one.source.path == "test.peft" for one in diagnostics)
    return diagnostics


def underlined(diagnostic: Diagnostic) -> str:
    assert diagnostic.source
    assert diagnostic.span
    return diagnostic.source.text[diagnostic.span.start : diagnostic.span.end]
