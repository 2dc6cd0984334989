from peftc.diagnostics.diagnostic import Diagnostic, PeftcError, PeftcWarning, Severity, Source, warn
from peftc.diagnostics.span import NOWHERE, Span

__all__ = ["NOWHERE", "Diagnostic", "PeftcError", "PeftcWarning", "Severity", "Source", "Span", "warn"]
