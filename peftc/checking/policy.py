"""Which diagnostics a run reports, and how severe they are.

Select, ignore and comments are about warnings. Errors are always reported: an exit code of 0 means
that the spec compiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from peftc.checking.suppressions import Suppressions
from peftc.diagnostics import Diagnostic
from peftc.diagnostics.formats.report import Suppressed


@dataclass
class Policy:
    """Codes may be beginnings of codes.

    Attributes:
        select: the warnings to report; None: all.
        ignore: warnings not to report.
        errors: warnings that are errors.
    """

    select: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    errors: Sequence[str] = ()
    suppressions: Suppressions = field(default_factory=Suppressions)
    suppressed: dict[Suppressed, None] = field(default_factory=dict[Suppressed, None])

    def apply(self, diagnostic: Diagnostic) -> Diagnostic | None:
        """The diagnostic to report; None for a warning that is not."""
        reason = self.suppressions.reason(diagnostic)
        if diagnostic.severity == "error":
            return diagnostic
        if reason is not None:
            self.suppressed[Suppressed(diagnostic, reason)] = None
            return None
        code = diagnostic.code
        if (self.select is not None and not code.startswith(tuple(self.select))) or code.startswith(tuple(self.ignore)):
            return None
        return replace(diagnostic, severity="error") if code.startswith(tuple(self.errors)) else diagnostic
