"""Diagnostics as programs read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from peftc.diagnostics.diagnostic import Diagnostic


def record(found: Diagnostic) -> dict[str, Any]:
    """One diagnostic as plain data; positions count from 1, the end is just behind, and all are None without a place."""
    span = found.span if found.source else None
    return {
        "code": found.code,
        "severity": found.severity,
        "message": found.message,
        "path": found.source.path if found.source else None,
        "line": span.line if span else None,
        "column": span.column if span else None,
        "end_line": span.end_line if span else None,
        "end_column": span.end_column if span else None,
        "help": found.help,
    }


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """A JSON list of records."""
    return json.dumps([record(found) for found in diagnostics], indent=2, ensure_ascii=False) + "\n"


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Workflow commands, which GitHub shows beside the lines of a pull request."""
    return "".join(f"{_command(found)}\n" for found in diagnostics)


def _command(found: Diagnostic) -> str:
    at = record(found)
    places = {"file": "path", "line": "line", "col": "column", "endLine": "end_line", "endColumn": "end_column"}
    fields = [f"{name}={_property(str(at[key]))}" for name, key in places.items() if at[key] is not None]
    text = (
        found.message
        + "".join(f"\nnote: {note}" for note in found.notes)
        + (f"\nhelp: {found.help}" if found.help else "")
    )
    return f"::{found.severity} {','.join([*fields, f'title={found.code}'])}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
