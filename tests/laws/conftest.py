from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def variants_of_both_kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws hold of variants that are made ahead of time, and of those that a call makes: a fifth of the cases have the first ones alone
    to begin with, the others the second ones. In the full run all have the first.
    """
    if not FULL and crc32(request.node.nodeid.encode()) % 5:
        monkeypatch.setattr("peftc.rewriting.reinstall.warm", lambda model, sample=None: None)
