"""Weights that accelerate keeps elsewhere between the calls of a module.

Such a parameter is on the device "meta"; the module's hook has a map with its values, and the device that the module runs on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError

HOOK = "_hf_hook"  # accelerate's name


def hooks(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks of a module, one by one."""
    hook = vars(module).get(HOOK)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate runs modules of a model, which may be on several devices."""
    return any(HOOK in vars(module) for module in model.modules())


def execution_device(module: nn.Module) -> torch.device | None:
    """The device that the first hook in a module runs it on."""
    devices = (getattr(hook, "execution_device", None) for m in module.modules() for hook in hooks(m))
    found = next((d for d in devices if d is not None), None)
    return None if found is None else torch.device(found)


def offloaded(module: nn.Module, name: str) -> torch.Tensor | None:
    """The value of a module's own parameter that is kept elsewhere, read now; None where no hook has it."""
    maps = (hook.weights_map for hook in hooks(module) if getattr(hook, "offload", False))
    for values in maps:
        try:
            return values[name]
        except KeyError:
            continue
    return None


def offloaded_parameters(model: nn.Module) -> frozenset[str]:
    """The dotted names of parameters on "meta" whose values a hook has."""
    return frozenset(
        f"{name}.{parameter}".lstrip(".")
        for name, module in model.named_modules()
        for parameter, value in module.named_parameters(recurse=False)
        if value.is_meta and has_offloaded(module, parameter)
    )


def has_offloaded(module: nn.Module, name: str) -> bool:
    """Whether a hook of a module has the value of its parameter; nothing is read."""
    for hook in hooks(module):
        values = getattr(hook, "weights_map", None) if getattr(hook, "offload", False) else None
        if values is not None and f"{getattr(values, 'prefix', '')}{name}" in set(getattr(values, "dataset", values)):
            return True
    return False


def only_moves_arguments(module: nn.Module) -> bool:
    """Whether all that the hooks of a module do is to move arguments to the device where they are: its code may run elsewhere."""
    own = (
        next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    )
    every = list(hooks(module))
    return bool(every) and all(type(h).__name__ == "AlignDevicesHook" and not (own and h.offload) for h in every)


def loads_submodules(module: nn.Module) -> bool:
    """Whether a hook loads the parameters of all that is in a module, by their names."""
    return any(getattr(h, "offload", False) and h.place_submodules for h in hooks(module))


def offloaded_error(names: Collection[str], why: str) -> Diagnostic:
    """P566: tensors that are needed in their places, and which accelerate keeps elsewhere."""
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    help_ = "`accelerate.hooks.remove_hook_from_submodules(model)` brings them back"
    return Diagnostic("P566", f"`{min(names)}`{more} offloaded by accelerate", notes=(why,), help=help_)


def refuse_offloaded(model: nn.Module, chosen: Mapping[str, nn.Parameter]) -> None:
    """Raises: P566 if a parameter of an edit is offloaded. Args: `chosen`: by the names under which they are saved."""
    if meta := {id(p): saved for saved, p in chosen.items() if p.is_meta}:
        elsewhere = offloaded_parameters(model)
        if any(id(p) in meta and n in elsewhere for n, p in model.named_parameters()):
            raise PeftcError(offloaded_error(meta.values(), "dispatch the model first, and compile the edits then"))
