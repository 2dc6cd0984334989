"""No test needs the network: the hub is switched off before anything can ask for it. And golden files."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# In CI a failure must be the fault of the change: every run draws the same examples. Elsewhere each run looks for new ones.
settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI", "").lower() == "true":
    settings.load_profile("ci")

os.environ["HF_HUB_OFFLINE"] = "1"
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


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name in the `golden` folder beside the test."""

    def compare(name: str, text: str) -> None:
        path = Path(str(request.path)).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run with --update-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8")

    return compare
