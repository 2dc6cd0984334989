"""Functions that modules hold and that are a model's code: hooks of its own library and of the
classes of its modules, and functions in attributes.

A library registers hooks on demand, and a flag on the model says that it has. A copy with the flag
and without the hooks is another model: it returns no hidden states. So does a class whose hooks are
methods of it, or stand in them. Other hooks of users are left out: they count, log and print, and
would do so on fake tensors.
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

from peftc.modules.function_parts import held_part

HOOKS = tuple(name for name in vars(nn.Module()) if re.match("_(forward|backward)_(pre_)?hooks", name))
_FORWARD_HOOKS = tuple(name for name in HOOKS if name.startswith("_forward"))
_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks")  # the others hold options by the same keys


def copy_library_hooks(model: nn.Module, modules: Iterable[nn.Module], memo: dict[int, Any]) -> None:
    """Copies the forward hooks of a model's libraries and classes. `modules`: those that may have
    hooks. `memo`: the copies of the model's modules, by id.

    Seen in: transformers, which records hidden states and attentions by hooks (LLaVA); models that
    collect features by hooks (MiDaS, DPT).
    """
    modules = [m for m in modules if any(map(vars(m).get, _REGISTRIES))]
    libraries = _libraries(model) if modules else frozenset[str]()
    classes = _class_names(model) if modules else frozenset[tuple[str, str]]()

    def belongs(hook: Any) -> bool:
        return _package(hook) in libraries or _class_name(hook) in classes

    for module in modules:
        registries = [vars(module)[name] for name in _REGISTRIES]
        own = {key for hooks in registries for key, hook in hooks.items() if belongs(hook)}
        for name in _FORWARD_HOOKS if own else ():
            hooks: Mapping[int, Any] = vars(module)[name]
            copies = ((key, _copy_if_possible(hook, memo)) for key, hook in hooks.items() if key in own)
            vars(memo[id(module)])[name] = OrderedDict((key, hook) for key, hook in copies if hook is not None)


def copy_functions(modules: Iterable[nn.Module], memo: dict[int, Any]) -> None:
    """Copies functions in attributes that hold modules: a copy would call those of the model.

    Seen in: minGPT (`self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))`)
    """
    for module in modules:
        new = vars(memo[id(module)])
        for name, value in vars(module).items():
            if type(value) is not FunctionType or not value.__closure__ or new.get(name) is not value:
                continue  # a copy has no instance's `forward`
            if isinstance(held_part(value), nn.Module):
                new[name] = _copy_if_possible(value, memo) or value


def _libraries(model: nn.Module) -> frozenset[str]:
    """The installed packages that define classes of a model's modules, without PyTorch."""
    classes = {cls for kind in {type(m) for m in model.modules()} for cls in kind.__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - {"torch", "builtins"}
    return frozenset(package for package in packages if _is_installed(package))


@cache
def _is_installed(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return path.startswith(tuple(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _class_names(model: nn.Module) -> frozenset[tuple[str, str]]:
    """The classes of a model's modules, without PyTorch's: the file and the name in it."""
    classes = {cls for kind in {type(m) for m in model.modules()} for cls in kind.__mro__}
    names = ((cls.__module__, cls.__qualname__) for cls in classes)
    return frozenset((file, name) for file, name in names if not f"{file}.".startswith(("torch.", "builtins.")))


def _code(hook: Any) -> Any:
    """The function that a hook calls, or its class."""
    while isinstance(hook, partial):
        hook = cast("partial[Any]", hook).func
    hook = getattr(hook, "__func__", hook)
    return hook if isinstance(hook, FunctionType) else type(hook)


def _package(hook: Any) -> str:
    """The package in which the code of a hook is."""
    return _code(hook).__module__.partition(".")[0]


def _class_name(hook: Any) -> tuple[str, str]:
    """The class of which a hook is a method, or in a method of which it stands, as `_class_names`
    has it.
    """
    code = _code(hook)
    name = code.__qualname__.removesuffix(f".{code.__name__}").removesuffix(".<locals>")
    is_method = not code.__qualname__.endswith(f".<locals>.{code.__name__}")
    return code.__module__, name if is_method else name.rpartition(".")[0]


def _copy_if_possible(hook: Any, memo: dict[int, Any]) -> Any:
    """None for a hook that holds what cannot be copied, such as a file that it writes to."""
    try:
        return _copy_hook(hook, memo)
    except Exception:  # whatever a copy of an object raises
        return None


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
