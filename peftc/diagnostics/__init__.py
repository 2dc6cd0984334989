from peftc.diagnostics.diagnostic import Diagnostic, PeftcError, Severity, Source
from peftc.diagnostics.span import NOWHERE, Span

__all__ = ["NOWHERE", "Diagnostic", "PeftcError", "Severity", "Source", "Span"]
