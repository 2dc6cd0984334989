"""Diagnostics as SARIF 2.1.0, which code scanning services and editors read.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from peftc.diagnostics.codes import CODES
from peftc.diagnostics.diagnostic import Diagnostic, Source, Span, printable
from peftc.diagnostics.formats.fingerprints import fingerprints
from peftc.diagnostics.formats.report import Report, full_text, relative_path

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render_sarif(report: Report, version: str) -> str:
    """A log of one run. Results that comments suppress are in it, with the reasons.

    Args: `version`: of peftc.
    """
    diagnostics = (*report.diagnostics, *(one.diagnostic for one in report.suppressed))
    reasons = [None] * len(report.diagnostics) + [one.reason for one in report.suppressed]
    everything = report._replace(diagnostics=diagnostics)
    rules = sorted({one.code for one in diagnostics})
    driver = {"name": "peftc", "version": version, "rules": [_rule(code) for code in rules]}
    triples = zip(diagnostics, fingerprints(everything), reasons, strict=True)
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(everything, rules, *triple) for triple in triples],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _rule(code: str) -> dict[str, Any]:
    info = CODES[code]
    return {
        "id": code,
        "shortDescription": {"text": info.title},
        "help": {"text": info.explanation, "markdown": info.explanation},
    }


def _result(
    report: Report, rules: list[str], diagnostic: Diagnostic, fingerprint: str, reason: str | None
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rules.index(diagnostic.code),
        "level": diagnostic.severity,
        "message": {"text": full_text(diagnostic)},
        "locations": [_location(report.path(diagnostic), diagnostic.source, diagnostic.span)],
        "partialFingerprints": {"peftc/v1": fingerprint},
    }
    if diagnostic.related:
        places = enumerate(diagnostic.related, start=1)
        result["relatedLocations"] = [
            {
                "id": number,
                **_location(place.source.path, place.source, place.span),
                "message": {"text": place.message or "here"},
            }
            for number, place in places
        ]
    if diagnostic.fix is not None:
        result["fixes"] = [_fix(report.path(diagnostic), diagnostic)]
    if reason is not None:
        result["suppressions"] = [{"kind": "inSource", "justification": reason}]
    return result


def _fix(path: str, diagnostic: Diagnostic) -> dict[str, Any]:
    replacements = diagnostic.fix.replacements if diagnostic.fix else ()
    changes = [{"deletedRegion": region_of(one.span), "insertedContent": {"text": one.text}} for one in replacements]
    description = {"description": {"text": printable(diagnostic.help)}} if diagnostic.help else {}
    return {**description, "artifactChanges": [{"artifactLocation": artifact(path), "replacements": changes}]}


def _location(path: str, source: Source | None, span: Span | None) -> dict[str, Any]:
    region = {} if source is None or span is None else {"region": region_of(span)}
    return {"physicalLocation": {"artifactLocation": artifact(path), **region}}


def region_of(span: Span) -> dict[str, int]:
    """A span as a region: lines and columns from 1, with an exclusive end."""
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def artifact(path: str) -> dict[str, str]:
    """A file: relative to the root of the sources, or a URI if it is elsewhere."""
    relative = relative_path(path)
    if os.path.isabs(relative):
        return {"uri": Path(relative).as_uri()}
    return {"uri": quote(relative), "uriBaseId": "%SRCROOT%"}
