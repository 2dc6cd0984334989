"""`check --watch`: the check again, whenever a spec or the configuration changes."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from peftc.diagnostics.render import is_terminal

INTERVAL = 0.5  # seconds between two looks at the files
_CLEAR = "\033[2J\033[H"

State = dict[str, tuple[int, int]]


def watch(args: Namespace, run: Callable[[Namespace], int]) -> int:
    """Runs until an interrupt, which is no error."""
    try:
        while True:
            before = state_of(args)
            if is_terminal(sys.stdout):
                sys.stdout.write(_CLEAR)
            run(args)
            print(f"\nwatching {', '.join(args.paths)}; Ctrl-C ends", flush=True)
            while state_of(args) == before:
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        return 0


def state_of(args: Namespace) -> State:
    """The time and the size of each file that the result may depend on."""
    state: State = {}
    for path in _files(args):
        try:
            status = os.stat(path)
        except OSError:
            continue
        state[str(path)] = (status.st_mtime_ns, status.st_size)
    return state


def _files(args: Namespace) -> Iterator[Path]:
    """All specs of the folders that are named, that have a file that is, or that `use` may read."""
    named = [Path(path) for path in args.paths]
    folders = {path if path.is_dir() else path.parent for path in (*named, *map(Path, args.include))}
    for folder in sorted(folders):
        yield from sorted(folder.rglob("*.peft") if folder in named else folder.glob("*.peft"))
    yield from named
    yield from (Path(model) for model in args.model)
    here = Path.cwd()
    names = ["peftc.toml", "pyproject.toml"]
    yield from ([Path(args.config)] if args.config else (f / name for f in (here, *here.parents) for name in names))
