from peftc.diagnostics.diagnostic import (
    NOWHERE,
    Diagnostic,
    PeftcError,
    PeftcWarning,
    Related,
    Severity,
    Source,
    Span,
    warn,
)

__all__ = ["NOWHERE", "Diagnostic", "PeftcError", "PeftcWarning", "Related", "Severity", "Source", "Span", "warn"]
