"""A pytest plugin: which test reaches which faults, what it costs, and whether it passes.

Loaded by `-p tests.mutants.recorder`, in each worker of xdist, too. MUTANTS_RECORD names the folder
that it writes to.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import probes


class Recorder:
    """Writes a line for each test: its id, the seconds of CPU, whether it passed, the numbers of
    the faults.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"reached.{os.getpid()}"
        self.reached = set[int]()
        self.failed = set[str]()
        probes.install(self.reached)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        self.reached.clear()
        before = time.process_time()
        yield
        seconds = time.process_time() - before
        with self.path.open("a") as file:
            file.write(json.dumps([item.nodeid, seconds, item.nodeid not in self.failed, sorted(self.reached)]) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    probes.install(set())
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not distributes:  # what only hands out tests runs none
        config.pluginmanager.register(Recorder(Path(os.environ["MUTANTS_RECORD"])))
