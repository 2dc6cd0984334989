"""What all commands print: errors, as text or as records."""

import sys

from peftc.diagnostics import PeftcError
from peftc.diagnostics.render import render


def report_error(error: PeftcError, output_format: str) -> int:
    """Writes records to stdout if a program reads them, else text to stderr."""
    stream = sys.stderr if output_format == "text" else sys.stdout
    stream.write(render(error.diagnostics, output_format, stream))
    return 1
