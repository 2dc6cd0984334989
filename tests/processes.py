"""Child processes that kill themselves at a given file operation."""

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
REFUSED = 40  # the exit code after an expected PeftcError
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
    """Runs an action in a forked process, and returns its id. Exit code: `REFUSED` after an error
    with this diagnostic code, higher after any other error.
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
    """Waits for a process. Its exit code; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_at(n: int, folder: Path, action: Callable[[], object]) -> int:
    """Runs an action in a process that kills itself before its n-th file operation. Returns its
    exit code.
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
