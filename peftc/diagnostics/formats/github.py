"""Diagnostics as workflow commands, which GitHub shows next to the lines of a pull request."""

from collections.abc import Iterable

from peftc.diagnostics.diagnostic import Diagnostic, printable
from peftc.diagnostics.formats.records import record
from peftc.diagnostics.formats.report import full_text

_PROPERTIES = {"file": "path", "line": "line", "col": "column", "endLine": "end_line", "endColumn": "end_column"}


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """A workflow command for each diagnostic, on one line."""
    return "".join(f"{_command(diagnostic)}\n" for diagnostic in diagnostics)


def _command(diagnostic: Diagnostic) -> str:
    values = record(diagnostic)
    properties = [
        f"{name}={_data(printable(str(values[key]))).replace(':', '%3A').replace(',', '%2C')}"
        for name, key in _PROPERTIES.items()
        if values[key] is not None
    ]
    return (
        f"::{diagnostic.severity} {','.join([*properties, f'title={diagnostic.code}'])}::{_data(full_text(diagnostic))}"
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
