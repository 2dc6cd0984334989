"""Errors that end a trace."""

from __future__ import annotations

from peftc.tracing.code_positions import Origin


class TraceError(Exception):
    """The code cannot become a graph."""


class NoneAccess(TraceError):
    """Code used part of a result as a tensor, and it is None; `origin` identifies the part."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(f"part of a result is None, and the code uses it: {origin.operation}")
        self.origin = origin


class UnknownLength(TraceError):
    """Code needs a number that only data tells; `caller` is the module that read the sizes."""

    def __init__(self, caller: str) -> None:
        super().__init__("the number of segments is known only at run time")
        self.caller = caller
