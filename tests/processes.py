"""Processes that are ended at a chosen operation on files."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import peftc

KILLED = -signal.SIGKILL
REFUSED = 40  # how a process ends after an error with a code that was expected
_EVENTS = (
    "open",
    "os.chmod",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "shutil.copyfile",
    "tempfile.mkdtemp",
)


def fork(action: Callable[[], object], code: str = "") -> int:
    """The id of a process that does something and ends: with `REFUSED` after an error of this code,
    with more after any other.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)
            action()
            os._exit(0)
        except peftc.PeftcError as error:
            os._exit(REFUSED if [d.code for d in error.diagnostics] == [code] else REFUSED + 1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(REFUSED + 2)
    return process


def end_of(process: int) -> int:
    """Waits for a process; its exit code, or less than zero for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_at(n: int, folder: Path, action: Callable[[], object]) -> int:
    """Does something in a process that kills itself before its n-th operation on files; how that
    ended.
    """
    count = 0

    def audit(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _EVENTS and (event != "open" or str(folder) in str(args)):
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        sys.addaudithook(audit)
        flush = os.fsync
        os.fsync = lambda descriptor: (audit("open", (folder,)), flush(descriptor))[1]
        action()

    return end_of(fork(act))
