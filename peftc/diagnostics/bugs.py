"""What is said of an exception that no mistake of a user explains."""

from traceback import extract_tb

from peftc.diagnostics.diagnostic import Diagnostic


def bug_of(error: Exception) -> Diagnostic:
    """P900, with the line that raised the exception."""
    last = extract_tb(error.__traceback__)[-1]
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    note = f"in {last.name}, line {last.lineno} of {last.filename}"
    help_ = "please report it, with the command, the spec, what PEFTC_TRACEBACK=1 shows and `peftc doctor`"
    return Diagnostic("P900", f"this is a bug in peftc: {summary}", notes=(note,), help=help_)
