"""Runs the steps of a merge in several processes of this machine, or in the ranks of `torchrun`.

Processes of this machine share all files, and take turns with the steps. A rank may be on another
machine: it writes whole files, alone, and computes again what lies in files of two ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from peftc.diagnostics import Diagnostic, PeftcError

T = TypeVar("T")
POLL = 0.2  # seconds
DEVICES = ("auto", "cpu", "cuda")
_work: list[Callable[[int], Any]] = []  # of the forked processes, which inherit it


class Counter:
    """Counts the bytes that all processes of a merge have written."""

    def __init__(self, total: int, tell: Callable[[int, int], object]) -> None:
        self.total, self.listener, self.owner = total, tell, os.getpid()
        self.done = multiprocessing.Value("Q", 0)

    def add(self, size: int) -> None:
        with self.done.get_lock():
            self.done.value += size
        if os.getpid() == self.owner:
            self.tell()

    def tell(self) -> None:
        self.listener(self.done.value, self.total)


def in_processes(count: int, work: Callable[[int], T], poll: Callable[[], object]) -> list[T]:
    """`work(i)` for each i below `count`, each in a forked process. Raises: P705 if one ended.

    Args: `poll`: is called now and then.
    """
    if count == 1:
        return [work(0)]
    _work.append(work)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which here only wait
            with ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin) as pool:
                running = [pool.submit(_run, i) for i in range(count)]
                while wait(running, POLL, FIRST_EXCEPTION).not_done and not any(map(_has_failed, running)):
                    poll()
                return cast(list[T], [one.result() for one in running])
    except BrokenProcessPool as error:
        message = "a process of the merge has ended"
        help_ = "it may have been killed for its memory: use fewer `jobs`"
        raise PeftcError(Diagnostic("P705", message, notes=(f"{error}",), help=help_)) from error
    finally:
        _work.pop()


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _begin() -> None:
    torch.set_num_threads(1)  # threads of the parent do not exist here
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without it a process would wait for work for ever, and keep the lock of the new folder."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _run(index: int) -> Any:
    return _work[-1](index)


def check_jobs(jobs: int) -> int:
    """Raises: P545."""
    if type(jobs) is not int or jobs < 1:
        raise PeftcError(Diagnostic("P545", f"`jobs` is a number of processes from 1 on, not {jobs!r}"))
    if jobs > 1 and "fork" not in multiprocessing.get_all_start_methods():
        raise PeftcError(Diagnostic("P545", "this system cannot fork processes", help="leave out `jobs`"))
    return jobs


def device_of(name: str, jobs: int) -> torch.device:
    """Where sums are computed: "auto" is a GPU if there is one, of `torchrun` that of the rank.

    Raises: P545 for a device that is not there, or that forked processes cannot use.
    """
    if name == "auto":
        name = "cuda" if jobs == 1 and torch.cuda.is_available() else "cpu"
    if name not in DEVICES[1:]:
        raise PeftcError(Diagnostic("P545", f"`device` is {', '.join(DEVICES)}, not {name!r}"))
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise PeftcError(
            Diagnostic("P545", "this machine has no CUDA device", help='leave out `device`, or name "cpu"')
        )
    if jobs > 1:
        message = "forked processes cannot use a GPU"
        raise PeftcError(
            Diagnostic("P545", message, help="leave out `jobs`; `torchrun` starts one process for each GPU")
        )
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@dataclass(frozen=True)
class Ranks:
    """The processes of `torchrun`, or this one alone."""

    rank: int = 0
    count: int = 1

    def own(self, files: Sequence[str]) -> Collection[str]:
        """The files that this rank writes."""
        return files[self.rank :: self.count]

    def first(self, value: T | None) -> T:
        """The value of rank 0."""
        values = [value]
        if self.count > 1:
            dist.broadcast_object_list(values, src=0)
        return cast(T, values[0])

    def all(self, make: Callable[[], T]) -> list[T]:
        """What all ranks have made. Raises: the error of the first rank that has one."""
        result: T | BaseException
        try:
            result = make()
        except Exception as error:
            result = error
        results: list[Any] = [result]
        if self.count > 1:
            results = [None] * self.count
            dist.all_gather_object(results, result)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return results


@contextmanager
def ranks() -> Generator[Ranks]:
    """Those of `torchrun`, connected by gloo, if it has started this process."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "MASTER_ADDR" not in os.environ:
        yield Ranks()
        return
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        if started:
            dist.destroy_process_group()


def work_folder(rank: Ranks, path: Path | None) -> Path:
    """The folder that rank 0 has made, which all ranks see."""
    folder = rank.first(path)
    if not folder.is_dir():
        message = f"{folder}, which rank 0 has made, is not there for rank {rank.rank}"
        raise PeftcError(Diagnostic("P704", message, help="all ranks write to one file system"))
    return folder
