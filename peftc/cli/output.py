"""What all commands print: diagnostics, for people or for a program."""

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import TextIO

from peftc import __version__
from peftc.cli.spec_files import display_path
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.formats.report import Report, report_on
from peftc.diagnostics.render import FOR_PEOPLE, render


def tell(args: Namespace, text: str, stream: TextIO | None = None) -> None:
    """A sentence on what a command has done, by default on stderr; nothing with --quiet."""
    if not getattr(args, "quiet", False):
        print(text, file=sys.stderr if stream is None else stream)


def write_report(report: Report, output_format: str, stream: TextIO) -> None:
    stream.write(render(report, output_format, stream, __version__))


def report_of(diagnostics: Iterable[Diagnostic], args: Namespace) -> Report:
    """The report of a command on one spec, or on something else that it names."""
    path = next((value for name in _SUBJECTS if isinstance(value := getattr(args, name, None), str)), "peftc")
    model, strict = getattr(args, "model", None), getattr(args, "strict", False)
    return report_on(display_path(path), model if isinstance(model, str) else None, tuple(diagnostics), strict)


_SUBJECTS = ("spec", "adapter", "source", "base", "model")  # arguments that name what a command is about


def report_error(error: PeftcError, args: Namespace) -> int:
    """Writes records to stdout if a program reads them, else text to stderr."""
    output_format = getattr(args, "output_format", "text")
    stream = sys.stderr if output_format in FOR_PEOPLE else sys.stdout
    write_report(report_of(error.diagnostics, args), output_format, stream)
    return 1
