"""What others do to an edited module afterwards: a `forward` that they assign to it, a class that they derive from its own."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.instance_forward import GENERATED, instance_forward


def followed(module: nn.Module, value: Any) -> Any:
    """A forward that is assigned to an edited module: a hook, or a method of before, in which the edits act.

    Raises: P425 for any other, which would run in the place of the edited code.
    """
    now: Any = type(module).forward
    found = instance_forward(module, value)
    if found is None or (found.function is not now and not hasattr(inspect.unwrap(value), GENERATED)):
        message = (
            f"a `forward` is assigned to an edited {type(module).__name__} which does not call the one that it has"
        )
        help_ = "take the edits out with `peftc.remove`, assign it, and compile again"
        raise PeftcError(Diagnostic("P425", message, help=help_))
    if not found.hooked:
        return MethodType(now, module)
    for link in found.links:
        link.set(module, now)
    return value


def rebased(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """A class that others have derived from `old`, derived from `new` in its place: the class itself where these are one."""
    return cls if old is new else exchanged(cls, old, new)


def exchanged(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """The class of a module with `old`, its own one, replaced by `new`: others may have derived theirs from it since (FSDP,
    parametrizations).
    """
    if cls is old or old not in cls.__mro__:
        return new
    bases = tuple(exchanged(b, old, new) if old in b.__mro__ else b for b in cls.__bases__)
    meta: Any = type(cls)
    return meta(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
