"""What others do to an edited module afterwards: a `forward` that they assign to it, a class that they derive from its own."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.model.instance_forward import GENERATED, instance_forward
from peftc.rewriting.container import CONTAINER
from peftc.tracing.calls import innermost


def followed(module: nn.Module, value: Any) -> Any:
    """A forward that is assigned to an edited module: a hook, or a method of before, in which the edits act.

    Raises: P425 for any other, which would run in the place of the edited code.
    """
    now: Any = type(module).forward
    found = instance_forward(module, value)
    if found is None or (found.function is not now and not hasattr(innermost(value), GENERATED)):
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


def refuse_loss(parent: nn.Module, name: str, value: nn.Module | None) -> None:
    """Called by torch before a module gets a child. A wrapper of an edited module has it inside.

    Raises: P436 where an edited module would go: its edits would act no more, and nobody would notice.
    """
    old = vars(parent)["_modules"].get(name)
    if old is None or old is value:
        return
    inside = set() if value is None else set(value.modules())
    for path, module in old.named_modules():
        if CONTAINER in vars(module)["_modules"] and module not in inside:
            there = f"{name}.{path}".rstrip(".")
            message = f"`{there}` of this {type(parent).__name__} is edited, and would be replaced"
            help_ = "take the edits out with `peftc.remove`, replace it, and compile again"
            raise PeftcError(Diagnostic("P436", message, help=help_))


register_module_module_registration_hook(refuse_loss)


def exchanged(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """The class of a module with `old`, its own one, replaced by `new`: others may have derived theirs from it since (FSDP,
    parametrizations).
    """
    if cls is old or old not in cls.__mro__:
        return new
    bases = tuple(exchanged(b, old, new) if old in b.__mro__ else b for b in cls.__bases__)
    meta: Any = type(cls)
    return meta(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
