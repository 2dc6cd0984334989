from peftc.diagnostics.diagnostic import (
    NOWHERE,
    Diagnostic,
    Fix,
    PeftcError,
    PeftcWarning,
    Related,
    Replacement,
    Severity,
    Source,
    Span,
    Suggestion,
    warn,
)

__all__ = [
    "NOWHERE",
    "Diagnostic",
    "Fix",
    "PeftcError",
    "PeftcWarning",
    "Related",
    "Replacement",
    "Severity",
    "Source",
    "Span",
    "Suggestion",
    "warn",
]
