"""The command `merge`."""

import sys
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from peftc.diagnostics.render import is_terminal
from peftc.merging import merge


def run_merge(args: Namespace) -> int:
    """Merges adapters into a checkpoint. Raises: as `peftc.merge`."""
    with progress_bar(args) as progress:
        report = merge(
            args.base,
            args.adapters,
            args.output,
            partial=args.partial,
            widen=args.widen,
            untie=args.untie,
            dequantize=args.dequantize,
            device=args.device,
            other_weights=args.other_weights,
            trust_remote_code=args.trust_remote_code,
            dry_run=args.dry_run,
            verify=args.verify,
            jobs=args.jobs,
            progress=progress,
        )
    print(report.model_dump_json(indent=2) if args.json else report)
    return 0


@contextmanager
def progress_bar(args: Namespace) -> Generator[Callable[[int, int], object] | None]:
    """Bytes and the time left, where a reader sees them."""
    if args.quiet or not is_terminal(sys.stderr):
        yield None
        return
    console = Console(file=sys.stderr)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("merge")
        yield lambda done, total: bar.update(task, completed=done, total=total)
