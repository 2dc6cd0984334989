"""Hooks of modules whose code stands in the code of an edited module: no call would run them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.model_line import definition_line

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = ("peftc.", "torch.")


def check_hooks(module: nn.Module, names: Iterable[str]) -> None:
    """Checks the children that an edited module does not call, at each of its calls.

    Raises: P426 for one that has got a hook since.
    """
    for name in names:
        child: nn.Module | None = module
        for part in name.split("."):
            child = None if child is None else vars(child)["_modules"].get(part)
        if child is None:  # modules of one class may lack some of their children
            continue
        hooked = any(getattr(child, table, None) for table in _HOOKS)  # in the terms of `torch.compile`
        if hooked and (hook := bypassed_hook(child)) is not None:
            raise PeftcError(bypass_error(name, hook))


def bypassed_hook(module: nn.Module) -> Any:
    """A hook that calls of a module run, but for those of torch and peftc; None without."""
    # Seen in: `torch.nn.utils.weight_norm`, whose hook assigns the weight of frozen numbers
    hooks = (hook for name in _HOOKS for hook in vars(module).get(name, {}).values())
    return next((hook for hook in hooks if not _defining_module(hook).startswith(_OWN)), None)


def _defining_module(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = cast("partial[Any]", hook).func
    return getattr(hook, "__module__", None) or ""


def bypass_error(name: str, hook: Any) -> Diagnostic:
    """P426: a hook that would not run."""
    line = definition_line(hook)
    message = f"`{name}` has a hook, which would not run: the edit changes code inside the module"
    notes = () if line is None else (f"the hook is at {line}",)
    help_ = "edit a state at the boundary of this module, or remove the hook before compiling"
    return Diagnostic("P426", message, notes=notes, help=help_)
