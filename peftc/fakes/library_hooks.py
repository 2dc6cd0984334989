"""Hooks that belong to a model's code: those that its own library has registered.

A library registers hooks on demand, and a flag on the model says that it has. A copy with the flag
and without the hooks is another model: it returns no hidden states. Hooks of users are left out:
they count, log and print, and would do so on fake tensors.
"""

import copy
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any, cast

from torch import nn

HOOKS = tuple(name for name in vars(nn.Module()) if re.match("_(forward|backward)_(pre_)?hooks", name))
_FORWARD_HOOKS = tuple(name for name in HOOKS if name.startswith("_forward"))
_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks")  # the others hold options by the same keys


def copy_library_hooks(model: nn.Module, modules: Iterable[nn.Module], memo: dict[int, Any]) -> None:
    """Copies the forward hooks of a model's libraries. `modules`: those that may have hooks.
    `memo`: the copies of the model's modules, by id.

    Seen in: transformers, which records hidden states and attentions by hooks (LLaVA).
    """
    modules = [m for m in modules if any(map(vars(m).get, _REGISTRIES))]
    libraries = _libraries(model) if modules else frozenset[str]()
    for module in modules:
        registries = [vars(module)[name] for name in _REGISTRIES]
        own = {key for hooks in registries for key, hook in hooks.items() if _package(hook) in libraries}
        for name in _FORWARD_HOOKS if own else ():
            hooks: Mapping[int, Any] = vars(module)[name]
            copies = OrderedDict((key, _copy_hook(hook, memo)) for key, hook in hooks.items() if key in own)
            vars(memo[id(module)])[name] = copies


def _libraries(model: nn.Module) -> frozenset[str]:
    """The installed packages that define classes of a model's modules, without PyTorch."""
    classes = {cls for kind in {type(m) for m in model.modules()} for cls in kind.__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - {"torch", "builtins"}
    return frozenset(package for package in packages if _is_installed(package))


@cache
def _is_installed(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return path.startswith(tuple(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _package(hook: Any) -> str:
    """The package in which the code of a hook is."""
    while isinstance(hook, partial):
        hook = cast("partial[Any]", hook).func
    hook = getattr(hook, "__func__", hook)
    code = hook if isinstance(hook, FunctionType) else type(hook)
    return code.__module__.partition(".")[0]


def _copy_hook(hook: Any, memo: dict[int, Any]) -> Any:
    """A copy that acts on the copies of what a hook acts on: its object, arguments and closure."""
    if not isinstance(hook, FunctionType) or not hook.__closure__:
        return copy.deepcopy(hook, memo)
    cells = tuple(_copy_cell(cell, memo) for cell in hook.__closure__)
    new = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    new.__kwdefaults__ = hook.__kwdefaults__
    return new


def _copy_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        return CellType(_copy_hook(cell.cell_contents, memo))
    except ValueError:  # not assigned yet
        return CellType()
