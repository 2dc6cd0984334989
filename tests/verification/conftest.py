"""As for the laws: one thread, and variants made when a call first comes up."""

from tests.laws.conftest import one_thread, traced_when_called

__all__ = ["one_thread", "traced_when_called"]
