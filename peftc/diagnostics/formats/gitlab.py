"""Diagnostics as a Code Quality report, which GitLab shows in a merge request.

Source: docs.gitlab.com/ci/testing/code_quality, "Code Quality report format".
"""

import json
from typing import Any

from peftc.diagnostics.diagnostic import NOWHERE, Diagnostic
from peftc.diagnostics.formats.fingerprints import fingerprints
from peftc.diagnostics.formats.report import Report, full_text, relative_path

_SEVERITIES = {"error": "major", "warning": "minor"}


def render_gitlab(report: Report) -> str:
    """A JSON list of issues. Each has a line: 1 where a diagnostic is about a whole file."""
    issues = zip(report.diagnostics, fingerprints(report), strict=True)
    return json.dumps([_issue(report, one, print_) for one, print_ in issues], indent=2, ensure_ascii=False) + "\n"


def _issue(report: Report, diagnostic: Diagnostic, fingerprint: str) -> dict[str, Any]:
    span = diagnostic.span if diagnostic.source and diagnostic.span else NOWHERE
    return {
        "description": f"{diagnostic.code}: {full_text(diagnostic)}",
        "check_name": diagnostic.code,
        "fingerprint": fingerprint,
        "severity": _SEVERITIES[diagnostic.severity],
        "location": {
            "path": relative_path(report.path(diagnostic)),
            "lines": {"begin": span.line, "end": span.end_line},
        },
    }
