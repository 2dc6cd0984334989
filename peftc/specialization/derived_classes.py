"""Other code's changes to an edited module: an assigned `forward`, a derived class."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.instance_forward import GENERATED, instance_forward


def with_generated_forward(module: nn.Module, value: Any) -> Any:
    """An assigned forward (a hook), made to call the generated one. Raises: P425 for any other."""
    forward: Any = type(module).forward
    wrapper = instance_forward(module, value)
    if wrapper is None or (wrapper.function is not forward and not hasattr(inspect.unwrap(value), GENERATED)):
        name = type(module).__name__
        message = f"a `forward` is assigned to an edited {name} which does not call the one that it has"
        help_ = "take the edits out with `peftc.remove`, assign it, and compile again"
        raise PeftcError(Diagnostic("P425", message, help=help_))
    if not wrapper.hooked:
        return MethodType(forward, module)
    for reference in wrapper.references:
        reference.set(module, forward)
    return value


def replace_base(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """A class with `old` replaced by `new` among its bases (FSDP derives classes)."""
    if old is new:
        return cls
    if cls is old or old not in cls.__mro__:
        return new
    bases = tuple(replace_base(b, old, new) if old in b.__mro__ else b for b in cls.__bases__)
    meta: Any = type(cls)
    return meta(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
