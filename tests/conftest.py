"""Fixtures, golden files, and the switch that keeps tests off the network: the hub is disabled
before any import can use it.
"""

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings

import peftc
from peftc.forms import PYTHON_FORMS
from tests.matrix import FULL

# Folders whose subject is editing, not analysis: their tests share analyses.
READ_ONCE = (
    "adapters",
    "compatibility",
    "folding",
    "laws",
    "pictures",
    "specs_on_models",
    "tasks",
    "training",
    "verification",
)

# In CI a failure must be the fault of the change: every run draws the same examples. Elsewhere each
# run looks for new ones.
settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI", "").lower() == "true":
    settings.load_profile("ci")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PEFTC_CACHE"] = ""  # no test reads the user's cached tables, or misses a trace that fails
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew; refused in CI")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and os.environ.get("CI", "").lower() == "true":
        raise pytest.UsageError(
            "--update-golden is refused where CI=true: golden files are read by people before they change"
        )


def pytest_collection_finish() -> None:
    """What has been imported stays until the end: no collection needs to look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Chooses when variants are traced: ahead of time, or by the call that needs them. The laws
    hold in both modes: an eighth of the tests run with variants traced ahead of time, the others
    without. In the full run, and for tests marked `ahead_of_time`, they are always traced ahead. A
    module-wide fixture is built in the mode of the first test that uses it.
    """
    ahead = FULL or item.get_closest_marker("ahead_of_time") or crc32(item.nodeid.encode()) % 8 == 0
    with pytest.MonkeyPatch.context() as patch:
        if not ahead:
            patch.setattr("peftc.installation.reinstall.warm", lambda model, sample=None: None)
        if FULL or item.path.relative_to(item.config.rootpath).parts[1] not in READ_ONCE:
            patch.setattr("peftc.installation.cached_analysis.MOST", 0)
        else:
            patch.setattr("peftc.installation.cached_analysis.MOST", 1000)
        return (yield)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def registered_forms() -> Iterator[None]:
    """A test leaves no form of its own registered."""
    before = set(PYTHON_FORMS)
    yield
    for name in set(PYTHON_FORMS) - before:
        peftc.forms.unregister(name)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the golden file of that name in the test's `golden` folder."""

    def compare(name: str, text: str) -> None:
        path = Path(str(request.path)).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run with --update-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8")

    return compare
