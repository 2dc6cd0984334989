"""Gradient checkpointing: the recomputation in the backward pass has the choices of the forward.

torch preserves the function, random states and autocast for the recomputation, and has no hook for
more. So the two constructors that store the function are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch.utils import checkpoint

from peftc.concurrency.context import bind_context


@cache
def preserve_choices() -> None:
    """From now on, what `torch.utils.checkpoint` recomputes has the choices of its first run."""
    reentrant: Any = checkpoint.CheckpointFunction
    frame: Any = vars(checkpoint)["_CheckpointFrame"]
    reentrant.forward = staticmethod(_bind_second(reentrant.forward))
    frame.__init__ = _bind_second(frame.__init__)


def _bind_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with its second argument, the recomputed function, bound to the context."""

    @wraps(function)
    def wrapper(first: Any, recomputed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(first, bind_context(recomputed), *args, **kwargs)

    return wrapper
