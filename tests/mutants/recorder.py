"""A pytest plugin that records which test reaches which faults, its cost, and whether it passes.

Loaded by `-p tests.mutants.recorder`, also in each xdist worker. MUTANTS_RECORD names the output
folder.
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
    """Writes a line for each test: id, CPU seconds, whether it passed, and the numbers of the
    faults.
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
    if not distributes:  # the xdist controller runs no tests
        config.pluginmanager.register(Recorder(Path(os.environ["MUTANTS_RECORD"])))
