"""Whether a region can be edited: its code is what runs when its module is called, and its weights are there."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.instance_forward import instance_forward
from peftc.modules.offload import loads_submodules, offloaded_parameters, only_moves_arguments
from peftc.rewriting.edits import Region
from peftc.rewriting.legality.fast_paths import callers


def check_forwards(region: Region, model: nn.Module) -> None:
    """Raises: P424 where a `forward` of an instance hides the region's code or that around it, P426 where a hook would not run, or
    would take the edit's parameters for the model's, P427 for compiled code.
    """
    module = model.get_submodule(region.module)
    check_forward(region.module, module)
    for name in sorted(region.inline - {""}):
        check_entered(f"{region.module}.{name}".lstrip("."), module.get_submodule(name))
    for name in (region.module, *callers(region.module)):
        check_around(name, model.get_submodule(name))


def check_forward(name: str, module: nn.Module) -> None:
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        message = f"`{name}` is a {type(module).__name__}, whose code is not that of its class"
        raise PeftcError(Diagnostic("P427", message, help="edit the model before it is scripted or exported"))
    found = instance_forward(module)
    if found is not None and found.function is None:
        raise PeftcError(hidden(name, module))


def check_entered(name: str, module: nn.Module) -> None:
    check_forward(name, module)
    found = instance_forward(module)
    if found is not None and found.hooked and not only_moves_arguments(module):
        message = (
            f"`{name}` has a hook in the place of its `forward`, and the edit enters its code, around which it runs"
        )
        help_ = "edit a state at the boundary of this module, or remove the hook before compiling"
        raise PeftcError(Diagnostic("P426", message, help=help_))


def check_around(name: str, module: nn.Module) -> None:
    found = instance_forward(module)
    if found is not None and found.function is None and not found.wraps:
        raise PeftcError(hidden(name, module))
    if loads_submodules(module):
        message = (
            f"accelerate loads all parameters in `{name or 'the model'}` by their names, and those of edits have none"
        )
        raise PeftcError(Diagnostic("P426", message, help="dispatch the model without `preload_module_classes`"))


def hidden(name: str, module: nn.Module) -> Diagnostic:
    """P424: nobody can tell which code a module runs."""
    return Diagnostic(
        "P424",
        f"`{name or type(module).__name__}` has a `forward` in its instance that is neither a method nor calls the one of its class",
        notes=("an edit of the class's code might never run",),
        help="assign it as a method, `module.forward = types.MethodType(function, module)`, or in the class",
    )


def refuse_half(name: str, module: nn.Module) -> None:
    """Raises: P527 for a module without weights; the model has some."""
    elsewhere = offloaded_parameters(module)
    meta = [f"{name}.{n}".lstrip(".") for n, p in module.named_parameters() if p.is_meta and n not in elsewhere]
    if meta:
        raise PeftcError(no_values(meta, "other parameters of the model have values: it is loaded in part"))


def no_values(names: Collection[str], why: str) -> Diagnostic:
    """P527: tensors of the base that are needed and only have shapes."""
    said = f"`{next(iter(names))}` and {len(names) - 1} more have" if len(names) > 1 else f"`{next(iter(names))}` has"
    help_ = "load the weights of the model first; planning needs none"
    return Diagnostic("P527", f"{said} no values, only a shape", notes=(why,), help=help_)
