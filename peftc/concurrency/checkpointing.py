"""Gradient checkpointing: the backward pass runs a forward again, maybe in another thread, and outside of its block.

torch keeps for this the function, random states and autocast. There is no way to add to what it keeps but at the two places
where it keeps the function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch.utils import checkpoint

from peftc.concurrency.context import bind_context


@cache
def preserve_choices() -> None:
    """From now on, what `torch.utils.checkpoint` runs again has the choices of the context that ran it first."""
    reentrant: Any = checkpoint.CheckpointFunction
    other: Any = vars(checkpoint)["_CheckpointFrame"]
    reentrant.forward = staticmethod(_with_bound(reentrant.forward))
    other.__init__ = _with_bound(other.__init__)


def _with_bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose second argument, the function to run again, keeps the present choices."""

    @wraps(function)
    def run(first: Any, again: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(first, bind_context(again), *args, **kwargs)

    return run
