"""Diagnostics for programs: JSON and GitHub workflow commands."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from peftc.diagnostics.diagnostic import Diagnostic

_PROPERTIES = {"file": "path", "line": "line", "col": "column", "endLine": "end_line", "endColumn": "end_column"}


def record(diagnostic: Diagnostic) -> dict[str, Any]:
    """A diagnostic as JSON data. Positions count from 1, with an exclusive end."""
    span = diagnostic.span if diagnostic.source else None
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "path": diagnostic.source.path if diagnostic.source else None,
        "line": span.line if span else None,
        "column": span.column if span else None,
        "end_line": span.end_line if span else None,
        "end_column": span.end_column if span else None,
        "help": diagnostic.help,
    }


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """A JSON list of records."""
    return json.dumps([record(diagnostic) for diagnostic in diagnostics], indent=2, ensure_ascii=False) + "\n"


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Workflow commands, which GitHub shows next to the lines of a pull request."""
    return "".join(f"{_command(diagnostic)}\n" for diagnostic in diagnostics)


def _command(diagnostic: Diagnostic) -> str:
    values = record(diagnostic)
    properties = [
        f"{name}={_property(str(values[key]))}" for name, key in _PROPERTIES.items() if values[key] is not None
    ]
    notes = "".join(f"\nnote: {note}" for note in diagnostic.notes)
    text = diagnostic.message + notes + (f"\nhelp: {diagnostic.help}" if diagnostic.help else "")
    return f"::{diagnostic.severity} {','.join([*properties, f'title={diagnostic.code}'])}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
