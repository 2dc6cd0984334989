from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from tests.matrix import FULL


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """The laws hold of variants that are made ahead of time, and of those that a call makes: a fifth of the cases have the first ones
    to begin with, the others the second ones alone. In the full run all have the first. Fixtures of a whole module are
    in the case that asks for them first.
    """
    with pytest.MonkeyPatch.context() as patch:
        own = item.path.is_relative_to(Path(__file__).parent)  # pytest asks this file about all tests
        if own and not FULL and crc32(item.nodeid.encode()) % 5:
            patch.setattr("peftc.rewriting.reinstall.warm", lambda model, sample=None: None)
        return (yield)
