"""What commands print of a model, by rich; and diagnostics behind it."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.render import render, wants_color
from peftc.planning.report.plan import plain_text


def report(diagnostics: Sequence[Diagnostic], args: Namespace, *, to_stdout: bool = False) -> None:
    """Writes diagnostics to stderr; to stdout if they are all there is to print."""
    if not diagnostics:
        return
    stream = sys.stdout if to_stdout else sys.stderr
    separator = "" if to_stdout or args.output_format == "json" else "\n"
    stream.write(separator + render(diagnostics, args.output_format, stream))


def show(make: Callable[[int], RenderableType]) -> None:
    """Prints the rendering for the width of the terminal; plain text in a pipe or with NO_COLOR."""
    console = Console(file=sys.stdout, highlight=False)
    if wants_color(sys.stdout):
        console.print(make(console.width))
    else:
        sys.stdout.write(plain_text(make(console.width), console.width))
