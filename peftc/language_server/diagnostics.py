"""Diagnostics of peftc as diagnostics of the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from lsprotocol import types

from peftc.diagnostics import Diagnostic, Related
from peftc.diagnostics.formats.report import full_text
from peftc.language_server.analysis import Analysis
from peftc.language_server.documents import Documents
from peftc.language_server.positions import Positions

SOURCE = "peftc"
_SEVERITY = {"error": types.DiagnosticSeverity.Error, "warning": types.DiagnosticSeverity.Warning}
_UNUSED = frozenset({"P114"})


def by_file(analysis: Analysis, documents: Documents) -> dict[str, list[Diagnostic]]:
    """The diagnostics of an analysis, by the URI of the file that they point into.

    What points into no file, such as the name of a model in the settings, is of the text itself.
    """
    files: dict[str, list[Diagnostic]] = {analysis.document.uri: []}
    for one in analysis.report.diagnostics:
        uri = documents.uri(one.source) if one.source is not None else None
        files.setdefault(uri or analysis.document.uri, []).append(one)
    return files


def to_protocol(diagnostics: Iterable[Diagnostic], uri: str, documents: Documents, encoding: str) -> Diagnostics:
    """The diagnostics of a file as the protocol has them, without those of an older text of it."""
    document = documents.get(uri)
    text = None if document is None else document.text
    records: Diagnostics = []
    for one in diagnostics:
        is_here = one.source is not None and documents.uri(one.source) == uri
        if not (is_here and text is not None and one.source and one.source.text != text):
            records.append(_record(one, is_here, documents, encoding))
    return records


Diagnostics = list[types.Diagnostic]


def _record(diagnostic: Diagnostic, is_here: bool, documents: Documents, encoding: str) -> types.Diagnostic:
    source = diagnostic.source if is_here else None
    span = diagnostic.span if is_here else None
    related = [record for place in diagnostic.related if (record := _related(place, documents, encoding)) is not None]
    return types.Diagnostic(
        range=positions_of("" if source is None else source.text, encoding).range(span),
        severity=_SEVERITY[diagnostic.severity],
        code=diagnostic.code,
        source=SOURCE,
        message=full_text(diagnostic),
        related_information=related or None,
        tags=[types.DiagnosticTag.Unnecessary] if diagnostic.code in _UNUSED else None,
    )


def _related(place: Related, documents: Documents, encoding: str) -> types.DiagnosticRelatedInformation | None:
    uri = documents.uri(place.source)
    if uri is None:
        return None
    at = positions_of(place.source.text, encoding).range(place.span)
    return types.DiagnosticRelatedInformation(types.Location(uri, at), place.message or "here")


@lru_cache(maxsize=16)
def positions_of(text: str, encoding: str) -> Positions:
    """The positions of a text, of which several diagnostics ask."""
    return Positions(text, encoding)
