from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def traced_when_called() -> Iterator[None]:
    """No variant is made ahead of time: the laws hold of those that a call makes, and only these cost time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peftc.rewriting.reinstall.warm", lambda model, sample=None: None)
        yield
