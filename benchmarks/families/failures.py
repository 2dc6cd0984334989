"""An exception in one line: its message and where it was raised."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

LONGEST = 240


def reason_of(error: BaseException) -> str:
    """`Type: message (file:line)`; for a diagnostic, its code and message, which name the place."""
    from peftc import PeftcError

    if isinstance(error, PeftcError):
        return "; ".join(f"{d.code} {d.message}" + "".join(f" [{n}]" for n in d.notes) for d in error.diagnostics)[:400]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    message = re.sub(r"\s+", " ", str(error)).strip()
    message = message if len(message) <= LONGEST else message[:LONGEST] + "…"
    return f"{type(error).__name__}: {message}{where}"
