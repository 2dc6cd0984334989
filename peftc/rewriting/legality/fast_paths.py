"""Modules around an edit whose code may run one kernel instead of their children.

In evaluation, `nn.TransformerEncoderLayer`, `nn.MultiheadAttention` and `nn.TransformerEncoder`
read the weights of their children and call none of them, so an edited child would not run. Their
code asks torch whether its fast path is enabled; while a module is traced, the answer is no, so its
generated forward has no fast path.

Source: torch.backends.mha; `why_not_fast_path` in torch/nn/modules/activation.py and
transformer.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import cache

from torch import nn

from peftc.rewriting.edits import Region

QUERY = "get_fastpath_enabled"
ENTERED = frozenset({""})


@cache
def has_fast_path(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class or of a parent class uses torch's fast path."""
    forwards = (inspect.unwrap(vars(c)["forward"]) for c in cls.__mro__ if "forward" in vars(c))
    return any(QUERY in getattr(getattr(f, "__code__", None), "co_names", ()) for f in forwards)


def parents(module: str) -> Iterator[str]:
    """The dotted names of all modules that contain a module, innermost first; the root is ""."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def innermost_called(module: str, calls: Collection[str], model: nn.Module) -> str:
    """The module itself if called, or the innermost called module around it."""
    if module not in calls and is_called_in_siblings(module, calls, model):
        return module
    return next((n for n in (module, *parents(module)) if n in calls), module)


def is_called_in_siblings(module: str, calls: Collection[str], model: nn.Module) -> bool:
    """Whether a sibling of the module, or of one around it, has this part called."""
    names = module.split(".")
    for i, name in enumerate(names):
        parent = model.get_submodule(".".join(names[:i]))
        cls = type(parent.get_submodule(name))
        siblings = [n for n, m in parent.named_children() if type(m) is cls and n != name]
        if any(".".join([*names[:i], sibling, *names[i + 1 :]]) in calls for sibling in siblings):
            return True
    return False


def disable_fast_paths(regions: list[Region], model: nn.Module, shared: Iterable[Collection[str]] = ()) -> list[Region]:
    """Adds a region without edits for each module around a region that has a fast path and is not
    entered yet.

    Args: `shared`: the names of each module that has several.
    """
    names = {name: group for group in shared for name in group}
    by_module = {region.module: region for region in regions}
    entered = {f"{r.module}.{name}".strip(".") for r in regions for name in r.inline}
    outer: dict[str, Region] = {}
    for name in (p for r in regions for module in names.get(r.module, (r.module,)) for p in parents(module)):
        if name in entered or name in outer or not has_fast_path(type(model.get_submodule(name))):
            continue
        if name in by_module:
            by_module[name].inline |= ENTERED
        else:
            outer[name] = Region(name, ENTERED, [])
    return [*outer.values(), *regions]
