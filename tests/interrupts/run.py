"""`python -m tests.interrupts.run`: forks an operation at the first hit of each line, and
interrupts the fork there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pickle
import pkgutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import peftc
from benchmarks.common import machine, save, table
from peftc.installation.record import is_installed
from tests.interrupts.operations import OPERATIONS, Case
from tests.interrupts.snapshot import between, snapshot

PACKAGE = str(Path(peftc.__file__).parent) + os.sep
PATIENCE = 120  # seconds for one fork


@dataclass
class Outcome:
    """The lines that were interrupted in an operation, the state after each, and the interrupts
    that were swallowed.
    """

    lines: int = 0
    before: int = 0
    after: int = 0
    swallowed: list[str] = field(default_factory=list[str])
    between: list[str] = field(default_factory=list[str])


def import_all() -> None:
    """Imports everything: lines that run only on import are no part of an operation."""
    for module in pkgutil.walk_packages(peftc.__path__, "peftc."):
        if not module.name.endswith(("__main__", "triton_kernels")):  # the latter needs a GPU
            importlib.import_module(module.name)


def in_fork(action: Callable[[], Any], patience: int = 0) -> Any:
    """The result of a function in a fork of this process, or the text of its error."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(patience)
            result = action()
        except BaseException:
            result = f"error: {traceback.format_exc()}"
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    return pickle.loads(data) if data else "error: the process ended"


class Files:
    """Restores the files of a folder, and the offsets of open files: forks share both. Unchanged
    files are not touched.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.offsets = dict(offsets())
        self.content = {p: p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}

    def restore(self) -> None:
        for descriptor, offset in self.offsets.items():
            os.lseek(descriptor, offset, os.SEEK_SET)
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path not in self.content:
                path.rmdir() if path.is_dir() else path.unlink()
        for path, content in self.content.items():
            if content is None:
                path.mkdir(exist_ok=True)
            elif not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


def offsets() -> Iterator[tuple[int, int]]:
    """The open regular files with their offsets."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                yield descriptor, os.lseek(descriptor, 0, os.SEEK_CUR)


class Interrupter:
    """Runs an operation under a tracer that forks. `after_write`: only after the first change of
    the model. `paths`: only in files whose paths in the package start so.
    """

    def __init__(self, case: Case, after_write: bool, paths: tuple[str, ...] = ("",)) -> None:
        self.case, self.after_write, self.outcome = case, after_write, Outcome()
        self.paths = tuple(PACKAGE + path for path in paths)
        self.seen = set[tuple[str, int]]()
        self.before = snapshot(case.model, case.folder)
        self.start = self.marks()
        files = Files(case.folder.parent)
        self.after = in_fork(lambda: (case.action(), snapshot(case.model, case.folder))[1])
        files.restore()
        assert isinstance(self.after, dict), self.after
        self.forked = False  # whether this process is an interrupted fork

    def marks(self) -> tuple[Any, ...]:
        """A cheap fingerprint that changes when something is written."""
        model, folder = self.case.model, self.case.folder.parent
        files = sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*"))
        variable = getattr(model, "__dict__", {}).get("_peftc")
        blocks = (variable.choice.blocks(), id(variable.choice.default)) if variable is not None else ()
        versions = tuple(t._version for t in (*model.parameters(), *model.buffers()))
        kinds = tuple(map(type, model.modules()))
        flags = tuple(p.requires_grad for p in model.parameters())
        return (is_installed(model), blocks, versions, kinds, flags, files)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if self.forked or not path.startswith(PACKAGE):
            return None
        if event == "line" and (path, frame.f_lineno) not in self.seen:
            self.seen.add((path, frame.f_lineno))
            if path.startswith(self.paths) and (not self.after_write or self.marks() != self.start):
                self.after_write = False
                self.interrupt(f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}")
        return self.trace

    def interrupt(self, line: str) -> None:
        files = Files(self.case.folder.parent)
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            self.forked, self.pipe = True, write
            signal.alarm(PATIENCE)
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
            return
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        os.waitpid(process, 0)
        files.restore()
        came, verdict = pickle.loads(data) if data else (True, "the process hung or died")
        self.outcome.lines += 1
        if not came:
            self.outcome.swallowed.append(line)
        if isinstance(verdict, str) and verdict not in ("before", "after"):
            self.outcome.between.append(f"{line}: {verdict}")
        else:
            setattr(self.outcome, verdict, getattr(self.outcome, verdict) + 1)

    def verdict(self) -> str:
        try:
            now = snapshot(self.case.model, self.case.folder)
        except BaseException as error:
            return f"it does not run: {type(error).__name__}: {error}"
        if now == self.before:
            return "before"
        return "after" if now == self.after else between(now, self.before, self.after)

    def run(self) -> Outcome:
        came, error = False, ""
        try:
            sys.settrace(self.trace)
            try:
                self.case.action()
            finally:
                sys.settrace(None)
        except KeyboardInterrupt:
            came = True
        except BaseException:
            error = traceback.format_exc()
        if self.forked:
            verdict = f"another error: {error[-300:]}" if error else self.verdict()
            with os.fdopen(self.pipe, "wb") as pipe:
                pickle.dump((came, verdict), pipe)
            os._exit(0)
        assert not error, error
        now = snapshot(self.case.model, self.case.folder)
        assert now == self.after, between(now, self.before, self.after)
        return self.outcome


def interrupted(name: str, after_write: bool = False, paths: tuple[str, ...] = ("",)) -> Outcome:
    import_all()
    return Interrupter(OPERATIONS[name](), after_write, paths).run()


def report(outcomes: dict[str, Outcome], seconds: float) -> None:
    head = ["operation", "lines", "as before", "as after", "in between", "swallowed"]
    rows = [
        [name, *map(str, (one.lines, one.before, one.after, len(one.between), len(one.swallowed)))]
        for name, one in outcomes.items()
    ]
    total = sum(one.lines for one in outcomes.values())
    wrong = sum(len(one.between) for one in outcomes.values())
    text = f"SIGINT at {total:,} lines of {len(outcomes)} operations: {wrong} in between.\n\n{table(head, rows)}"
    results = {
        "lines": total,
        "between": wrong,
        "seconds": round(seconds),
        "operations": {n: vars(o) for n, o in outcomes.items()},
    }
    save("interrupts", results, text, machine())
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="interrupts", description=__doc__)
    parser.add_argument("--written", action="store_true", help="only from the first change on")
    parser.add_argument(
        "--paths", default="", help="only lines of files that begin so, with commas between: `adapters/,rewriting/`"
    )
    parser.add_argument("--json", action="store_true", help="print the outcomes, and keep no results")
    parser.add_argument("operations", nargs="*", help="(all)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it runs in the background without
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    paths = tuple(options.paths.split(","))
    start, outcomes = time.monotonic(), dict[str, Outcome]()
    for name in options.operations or OPERATIONS:
        result = in_fork(
            lambda name=name: interrupted(name, options.written, paths)
        )  # a fresh process: nothing is cached
        if not isinstance(result, Outcome):
            raise SystemExit(f"{name}: {result}")
        outcomes[name] = result
        if not options.json:
            wrong = [*result.between, *(f"{line}: no interrupt came" for line in result.swallowed)]
            print(f"{name}: {result.lines} lines, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    if options.json:
        print(json.dumps({name: vars(one) for name, one in outcomes.items()}))
    elif not (options.operations or options.written or options.paths):
        report(outcomes, time.monotonic() - start)
    return int(any(one.between or one.swallowed for one in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
