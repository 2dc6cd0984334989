"""Whether a region can be edited: a call runs its class's code, and its weights are loaded."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.instance_forward import instance_forward
from peftc.modules.offload import loads_submodules, offloaded_parameters, only_moves_arguments
from peftc.rewriting.edits import Region
from peftc.rewriting.legality.fast_paths import parents


def check_forwards(region: Region, model: nn.Module) -> None:
    """Checks a region's module, the modules whose code it enters, and those around it.

    Raises: P424 where the `forward` of an instance hides the code of its class, P426 where a hook
    would not run, or would take the edit's parameters for the model's, P427 for compiled code.
    """
    module = model.get_submodule(region.module)
    check_forward(region.module, module)
    for name in sorted(region.inline - {""}):
        check_entered(f"{region.module}.{name}".lstrip("."), module.get_submodule(name))
    for name in (region.module, *parents(region.module)):
        check_outer(name, model.get_submodule(name))


def check_forward(name: str, module: nn.Module) -> None:
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        message = f"`{name}` is a {type(module).__name__}, whose code is not that of its class"
        raise PeftcError(Diagnostic("P427", message, help="edit the model before it is scripted or exported"))
    forward = instance_forward(module)
    if forward is not None and forward.function is None:
        raise PeftcError(hidden_forward(name, module))


def check_entered(name: str, module: nn.Module) -> None:
    check_forward(name, module)
    forward = instance_forward(module)
    if forward is not None and forward.hooked and not only_moves_arguments(module):
        message = (
            f"`{name}` has a hook around its `forward`, which would not run: the edit changes code inside the module"
        )
        help_ = "edit a state at the boundary of this module, or remove the hook before compiling"
        raise PeftcError(Diagnostic("P426", message, help=help_))


def check_outer(name: str, module: nn.Module) -> None:
    forward = instance_forward(module)
    if forward is not None and forward.function is None and not forward.wraps:
        raise PeftcError(hidden_forward(name, module))
    if loads_submodules(module):
        message = (
            f"accelerate loads all parameters in `{name or 'the model'}` from a table of names, "
            f"which has none for the parameters of edits"
        )
        raise PeftcError(Diagnostic("P426", message, help="dispatch the model without `preload_module_classes`"))


def hidden_forward(name: str, module: nn.Module) -> Diagnostic:
    return Diagnostic(
        "P424",
        f"`{name or type(module).__name__}` has a `forward` in its instance whose code cannot be edited",
        notes=("an edit of the class's code might never run",),
        help="assign it as a method, `module.forward = types.MethodType(function, module)`, or in the class",
    )


def check_loaded(name: str, module: nn.Module) -> None:
    """Raises: P527 for a module without weights in a model that has some."""
    offloaded = offloaded_parameters(module)
    missing = [f"{name}.{n}".lstrip(".") for n, p in module.named_parameters() if p.is_meta and n not in offloaded]
    if missing:
        raise PeftcError(missing_values(missing, "the model is loaded in part: its other parameters have values"))


def missing_values(names: Collection[str], reason: str) -> Diagnostic:
    """P527: tensors of the base that have shapes only."""
    first = f"`{next(iter(names))}`"
    subject = f"{first} and {len(names) - 1} more have" if len(names) > 1 else f"{first} has"
    help_ = "load the weights of the model first; planning needs none"
    return Diagnostic("P527", f"{subject} no values, only a shape", notes=(reason,), help=help_)
