"""Weights that accelerate offloads between the calls of a module.

Such a parameter is on the device "meta". The module's hook has a map with its value, and the
device on which the module runs.
"""

import contextlib
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.walk import modules_in

HOOK = "_hf_hook"  # accelerate's name
HOOK_REGISTRY = "_diffusers_hook"  # diffusers' name


def hooks(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks of a module."""
    if (hook := vars(module).get(HOOK)) is not None:
        yield from getattr(hook, "hooks", (hook,))


def is_dispatched(model: nn.Module, leaves: Container[int] = ()) -> bool:
    """Whether accelerate has dispatched a model, maybe to several devices. `leaves`: modules, by
    `id`, whose children have the attributes of others.
    """
    return any(HOOK in vars(module) for module in modules_in(model, leaves))


def execution_device(module: nn.Module) -> torch.device | None:
    """The device on which the first hook in a module runs it."""
    devices = (getattr(hook, "execution_device", None) for m in module.modules() for hook in hooks(m))
    device = next((d for d in devices if d is not None), None)
    return None if device is None else torch.device(device)


def onload_device(modules: Iterable[nn.Module]) -> torch.device | None:
    """The device to which diffusers brings the weights of a model that it offloads in groups, by
    all modules of the model.
    """
    return next((hook.group.onload_device for hook in _registered_hooks(modules) if hasattr(hook, "group")), None)


def casts_weights(model: nn.Module) -> bool:
    """Whether diffusers casts weights that it stores in few bits, for each call of a module."""
    return any(hasattr(hook, "storage_dtype") for hook in _registered_hooks(modules_in(model)))


def _registered_hooks(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """diffusers' hooks of some modules."""
    for module in modules:
        if HOOK_REGISTRY in module.__dict__:
            yield from vars(module)[HOOK_REGISTRY].hooks.values()


def offloaded_value(module: nn.Module, name: str) -> torch.Tensor | None:
    """The value that a hook keeps for a module's own parameter; None if no hook does."""
    for hook in hooks(module):
        with contextlib.suppress(KeyError):
            if getattr(hook, "offload", False):
                return hook.weights_map[name]
    return None


def offloaded_parameters(model: nn.Module) -> frozenset[str]:
    """The dotted names of parameters on "meta" whose values a hook keeps."""
    return frozenset(
        f"{name}.{parameter}".lstrip(".")
        for name, module in model.named_modules()
        for parameter, value in module.named_parameters(recurse=False)
        if value.is_meta and _is_offloaded(module, parameter)
    )


def offloaded_ties(model: nn.Module) -> dict[str, str]:
    """The first name of each offloaded parameter that is one with others, by all of its names.

    Hooks keep its value once for each name: in memory, where it is one tensor, or on a disk, where
    what transformers says of the model is left.
    """
    parameters = [
        (f"{name}.{parameter}".lstrip("."), module, parameter)
        for name, module in (model.named_modules(remove_duplicate=False) if is_dispatched(model) else ())
        for parameter, value in module.named_parameters(recurse=False)
        if value.is_meta and _is_offloaded(module, parameter)
    ]
    declared = _declared_ties(model) if parameters else {}
    groups: dict[object, list[str]] = {}
    for name, module, parameter in parameters:
        groups.setdefault(_address(module, parameter) or declared.get(name, name), []).append(name)
    return {name: names[0] for names in groups.values() if len(names) > 1 for name in names}


def _declared_ties(model: nn.Module) -> dict[str, str]:
    """The first name of a tied parameter, by its other names, as transformers says."""
    ties: dict[str, str] = {}
    for name, module in model.named_modules():
        own: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
        ties |= {f"{name}.{one}".lstrip("."): f"{name}.{first}".lstrip(".") for one, first in own.items()}
    return ties


def _address(module: nn.Module, name: str) -> int:
    """Where the value of an offloaded parameter is in memory; 0 for one on a disk."""
    for hook in hooks(module):
        map_: Any = getattr(hook, "weights_map", None)
        stored = getattr(map_, "dataset", map_)
        stored = getattr(stored, "state_dict", stored)
        value = stored.get(f"{getattr(map_, 'prefix', '')}{name}") if isinstance(stored, dict) else None
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
    return 0


@shielded
def offloaded_values(modules: Iterable[nn.Module]) -> Generator[None]:
    """Inside of the block, own parameters of these modules have the values that hooks keep."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for module in modules:
            table: dict[str, Any] = vars(module)["_parameters"]
            for name, parameter in list(table.items()):
                if parameter is not None and parameter.is_meta and (value := offloaded_value(module, name)) is not None:
                    replaced.append((table, name, parameter))
                    table[name] = nn.Parameter(value, parameter.requires_grad)
        yield
    finally:
        for table, name, parameter in reversed(replaced):
            table[name] = parameter


def _is_offloaded(module: nn.Module, name: str) -> bool:
    maps: list[Any] = [getattr(hook, "weights_map", None) for hook in hooks(module) if getattr(hook, "offload", False)]
    keys = ((set(getattr(m, "dataset", m)), f"{getattr(m, 'prefix', '')}{name}") for m in maps if m is not None)
    return any(key in names for names, key in keys)


def only_moves_arguments(module: nn.Module) -> bool:
    """Whether the hooks only move arguments to the module's device: its code may be inlined."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    every = list(hooks(module))
    return bool(every) and all(type(h).__name__ == "AlignDevicesHook" and not (tensors and h.offload) for h in every)


def loads_submodules(module: nn.Module) -> bool:
    """Whether a hook of a module loads the parameters of its submodules, by their names."""
    return any(getattr(h, "offload", False) and h.place_submodules for h in hooks(module))


def offloaded_error(names: Collection[str], reason: str) -> Diagnostic:
    """P566: tensors that an operation needs are offloaded."""
    others = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    help_ = "`accelerate.hooks.remove_hook_from_submodules(model)` brings them back"
    return Diagnostic("P566", f"`{min(names)}`{others} offloaded by accelerate", notes=(reason,), help=help_)


def refuse_offloaded(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises: P566 if a parameter of `parameters`, given by saved names, is offloaded."""
    if meta := {id(p): saved for saved, p in parameters.items() if p.is_meta}:
        offloaded = offloaded_parameters(model)
        if any(id(p) in meta and n in offloaded for n, p in model.named_parameters()):
            raise PeftcError(offloaded_error(meta.values(), "dispatch the model first, and compile the edits then"))
