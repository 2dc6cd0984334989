"""What commands print of a model, by rich; and diagnostics behind it."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, RenderableType

from peftc.cli.output import report_of, write_report
from peftc.diagnostics import Diagnostic
from peftc.diagnostics.render import FOR_PEOPLE, wants_color
from peftc.planning.report.plan import plain_text

_BESIDE_TEXT = (*FOR_PEOPLE, "json")  # formats that stand beside the text of a command


def is_report(args: Namespace) -> bool:
    """Whether stdout is a report of diagnostics and nothing else."""
    return args.output_format not in _BESIDE_TEXT and not getattr(args, "json", False)


def prose(args: Namespace) -> TextIO:
    """Where sentences for people go: to stderr if stdout is a report."""
    return sys.stderr if is_report(args) else sys.stdout


def report(diagnostics: Sequence[Diagnostic], args: Namespace, *, to_stdout: bool = False) -> None:
    """Writes diagnostics to stderr; to stdout if they are all there is to print."""
    to_stdout = to_stdout or is_report(args)
    if not diagnostics and not is_report(args):
        return
    stream = sys.stdout if to_stdout else sys.stderr
    separator = "" if to_stdout or args.output_format not in FOR_PEOPLE else "\n"
    stream.write(separator)
    write_report(report_of(diagnostics, args), args.output_format, stream)


def show(make: Callable[[int], RenderableType], args: Namespace | None = None) -> None:
    """Prints the rendering for the width of the terminal; plain text in a pipe or with NO_COLOR.

    Prints nothing if stdout is a report of diagnostics.
    """
    if args is not None and is_report(args):
        return
    console = Console(file=sys.stdout, highlight=False)
    if wants_color(sys.stdout):
        console.print(make(console.width))
    else:
        sys.stdout.write(plain_text(make(console.width), console.width))
