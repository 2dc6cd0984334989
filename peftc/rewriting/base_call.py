"""The call of a region's own forward, as a function that graphs name and that is only ever printed."""

from __future__ import annotations

from typing import Any


def base_call(base: type, *arguments: Any, own: Any = None) -> Any:
    """Stands in a graph for the forward of the region's own class; printed as `Base.forward(self, …)`. `own`: in the place of
    the region itself.
    """
    raise AssertionError("only printed")
