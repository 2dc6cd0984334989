"""A pytest plugin: which test reaches which lines of peftc, and what it costs.

Loaded by `-p tests.mutants.recorder`, in each worker of xdist, too. MUTANTS_RECORD names the folder that it writes to.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Runs from when it is made, so that what importing peftc runs is in no test's context."""

    def __init__(self, folder: Path) -> None:
        self.seconds = folder / f"seconds.{os.getpid()}"
        file, lines = str(folder / "coverage"), [f"{ROOT}/peftc/*"]
        self.coverage = coverage.Coverage(
            data_file=file, data_suffix=f"{os.getpid()}", include=lines, config_file=False
        )
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        self.coverage.switch_context(item.nodeid)
        before = time.process_time()
        yield
        with self.seconds.open("a") as file:
            file.write(json.dumps([item.nodeid, time.process_time() - before]) + "\n")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not distributes:  # what only hands out tests runs none
        config.pluginmanager.register(Recorder(Path(os.environ["MUTANTS_RECORD"])))
