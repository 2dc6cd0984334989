"""Modules around an edit whose code may run one kernel in the place of their children.

`nn.TransformerEncoderLayer`, `nn.MultiheadAttention` and `nn.TransformerEncoder` read the weights of their children in evaluation
and call none of them, so an edited child would not run. Such code asks torch whether its fast path is enabled; a module whose
code was traced has been told that it is not.

Source: torch.backends.mha; `why_not_fast_path` in torch/nn/modules/activation.py and transformer.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from itertools import chain

from torch import nn

from peftc.rewriting.edits import Region

QUESTION = "get_fastpath_enabled"
ENTERED = frozenset({""})


@cache
def has_fast_path(cls: type[nn.Module]) -> bool:
    """Whether a forward of the class, or one that it may call of a parent class, asks for torch's fast path."""
    forwards = (inspect.unwrap(vars(c)["forward"]) for c in cls.__mro__ if "forward" in vars(c))
    return any(QUESTION in getattr(getattr(f, "__code__", None), "co_names", ()) for f in forwards)


def callers(module: str) -> Iterator[str]:
    """The dotted names of all modules that contain a module, innermost first; the root is ""."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def innermost_called(module: str, calls: Collection[str], model: nn.Module) -> str:
    """The innermost module around one, itself included, that is called: one that nothing calls has its parameters read there.

    One that this call has left out, as a router leaves out experts, is called where another of its class is.
    """
    if module not in calls and called_elsewhere(module, calls, model):
        return module
    return next((n for n in (module, *callers(module)) if n in calls), module)


def called_elsewhere(module: str, calls: Collection[str], model: nn.Module) -> bool:
    """Whether the same part of another module of the same class, beside one of those around it, is called."""
    parts = module.split(".")
    for i in range(len(parts)):
        around, tail = ".".join(parts[: i + 1]), "".join(f".{part}" for part in parts[i + 1 :])
        parent = model.get_submodule(".".join(parts[:i]))
        alike = (n for n, m in parent.named_children() if type(m) is type(model.get_submodule(around)))
        prefix = "".join(f"{part}." for part in parts[:i])
        if any(f"{prefix}{name}{tail}" in calls for name in alike if name != parts[i]):
            return True
    return False


def with_fast_paths_closed(
    regions: list[Region], model: nn.Module, shared: Iterable[Collection[str]] = ()
) -> list[Region]:
    """The regions and, around them, one without edits for each module that has a fast path and whose code nothing enters yet.

    Args: `model`: its classes alone are looked at. `shared`: the names of each module that has several.
    """
    names = {name: group for group in shared for name in group}
    own = {region.module: region for region in regions}
    entered = {f"{r.module}.{name}".strip(".") for r in regions for name in r.inline}
    more: dict[str, Region] = {}
    for region in regions:
        for name in chain.from_iterable(map(callers, names.get(region.module, (region.module,)))):
            if name in entered or name in more or not has_fast_path(type(model.get_submodule(name))):
                continue
            if name in own:
                own[name].inline |= ENTERED
            else:
                more[name] = Region(name, ENTERED, [])
    return [*more.values(), *regions]
