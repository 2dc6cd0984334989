"""Fingerprints, by which CI services recognize a diagnostic of an earlier run.

They do not depend on the number of the line: a line that is added above changes nothing.
"""

import hashlib
from collections import Counter

from peftc.diagnostics.formats.report import Report, line_text, relative_path


def fingerprints(report: Report) -> list[str]:
    """One for each diagnostic: of the code, the file, the message and the text of the line.

    Equal ones are counted, so that all are different.
    """
    seen: Counter[str] = Counter()
    result: list[str] = []
    for one in report.diagnostics:
        parts = (one.code, relative_path(report.path(one)), one.message, line_text(one.source, one.span))
        text = "\0".join(parts)
        result.append(hashlib.sha256(f"{text}\0{seen[text]}".encode(errors="replace")).hexdigest()[:32])
        seen[text] += 1
    return result
