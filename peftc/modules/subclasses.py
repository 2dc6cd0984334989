"""Subclasses of the classes of a model's modules, which look like them.

The `__init_subclass__` of a model's classes may wrap the forward of a subclass, as transformers'
layers do for checkpoints. It may also take arguments, which a class statement of the user gives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from torch import nn

from peftc.modules.new_modules import set_class

_NAMES = ("__module__", "__qualname__", "__doc__")


def subclass(base: type[nn.Module], members: Mapping[str, Any], meta: type[type] = type) -> type[nn.Module]:
    """A subclass under the same name. `meta`: the class of the subclass.

    Raises: TypeError where `__init_subclass__` takes arguments, and the forward may be its work.
    """
    try:
        return cast("type[nn.Module]", meta(base.__name__, (base,), _named(base, members)))
    except TypeError:
        if has_written_forward(base):
            return plain_subclass(base, members, meta)
        raise


def plain_subclass(base: type[nn.Module], members: Mapping[str, Any], meta: type[type] = type) -> type[nn.Module]:
    """`subclass`, without a call of `__init_subclass__` if Python allows it."""
    own = _named(base, members)
    if type(base) is type:
        with suppress(TypeError):  # a base with slots
            cls: Any = meta(base.__name__, (nn.Module,), own)
            cls.__bases__ = (base,)
            return cls
    return cast("type[nn.Module]", meta(base.__name__, (base,), own))


def constructor(base: type[nn.Module]) -> Callable[..., None]:
    """The `__init__` of a class of edited modules: what a program constructs has no edits, and is
    of the class `base`.
    """

    @functools.wraps(base.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if vars(type(self)).get("__init__") is __init__:  # others may have derived from it
            set_class(self, base)
        base.__init__(self, *args, **kwargs)

    return __init__


def _named(base: type, members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(base, name) for name in _NAMES} | dict(members)


def has_written_forward(cls: type[nn.Module]) -> bool:
    """Whether the forward is a function in the body of its class, not one around that."""
    owner = next(c for c in cls.__mro__ if "forward" in vars(c))
    forward = vars(owner)["forward"]
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return False
    return forward.__qualname__ == f"{owner.__qualname__}.forward"
