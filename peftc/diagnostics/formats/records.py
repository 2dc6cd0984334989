"""Diagnostics as records, for programs: a JSON list, or one JSON object a line."""

import json
from collections.abc import Iterable
from typing import Any

from peftc.diagnostics.diagnostic import Diagnostic, Fix, Related, Span

_POSITIONS = ("line", "column", "end_line", "end_column")


def record(diagnostic: Diagnostic) -> dict[str, Any]:
    """A diagnostic as JSON data. Positions count from 1, with an exclusive end."""
    return {
        **{name: getattr(diagnostic, name) for name in ("code", "severity", "message")},
        "path": diagnostic.source.path if diagnostic.source else None,
        **positions(diagnostic.span if diagnostic.source else None),
        "help": diagnostic.help,
        **({"notes": list(diagnostic.notes)} if diagnostic.notes else {}),
        **({"related": [_place(place) for place in diagnostic.related]} if diagnostic.related else {}),
        **({"fix": _fix(fix)} if (fix := diagnostic.fix) else {}),
    }


def _fix(fix: Fix) -> dict[str, Any]:
    replacements = [{**positions(one.span), "text": one.text} for one in fix.replacements]
    return {"applicability": fix.applicability, "replacements": replacements}


def positions(span: Span | None) -> dict[str, int | None]:
    """Where a span begins and ends."""
    return {name: getattr(span, name, None) for name in _POSITIONS}


def _place(place: Related) -> dict[str, Any]:
    return {"message": place.message, "path": place.source.path, **positions(place.span)}


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """A JSON list of records."""
    return json.dumps([record(diagnostic) for diagnostic in diagnostics], indent=2, ensure_ascii=False) + "\n"


def render_jsonl(diagnostics: Iterable[Diagnostic]) -> str:
    """A record on each line."""
    return "".join(json.dumps(record(diagnostic), ensure_ascii=False) + "\n" for diagnostic in diagnostics)
