"""Parameters that code of other modules computes with, seen in a forward: a head that multiplies by the weight of an embedding which it
holds in a list, or a model that does so itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from peftc.forms.module import has_values

ASKING = frozenset({"type_as", "view_as", "expand_as", "reshape_as"})  # of what is not their first argument


class ParameterUses(TorchFunctionMode):
    """Notes which module computes with which parameter. `running`: the names of the modules that are being called, the inner ones last.

    `captured`: the modules whose code computes with a parameter that is not one of the model's, by its storage: those of a skeleton
    stand for those of the model itself, which a closure goes on holding.
    """

    def __init__(self, model: nn.Module, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.owners: dict[int, dict[str, None]] = defaultdict(dict)  # dotted names of parameters, by storage
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.owners[storage(parameter)][name] = None
        self.captured: dict[int, str] = {}
        self.readers: dict[int, dict[str, None]] = defaultdict(dict)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if gives_values(func, result):
            reader = self.running[-1] if self.running else ""
            given = args[:1] if func.__name__ in (*ASKING, "to") else (args, kwargs)
            for value in pytree.tree_leaves(given):
                key = storage(value) if isinstance(value, torch.Tensor) else 0
                if key in self.owners:
                    self.readers[key][reader] = None
                elif isinstance(value, nn.Parameter):
                    self.captured[key] = reader
        return result

    def elsewhere(self, blocks: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The modules that compute with a parameter beside its own, by its name.

        Args: `blocks`: the layers. In a layer, modules may compute with what is in their children.
        """
        found: dict[str, tuple[str, ...]] = {}
        for key, readers in self.readers.items():
            for name in self.owners[key]:
                module = name.rpartition(".")[0]
                block = next((b for b in blocks if f"{module}.".startswith(f"{b}.")), None)
                tied = {other.rpartition(".")[0] for other in self.owners[key]}
                others = [r for r in readers if r not in tied and not is_part(module, r, block)]
                if others and tied.intersection(readers):
                    found[name] = tuple(others)
        return found


def is_part(module: str, reader: str, block: str | None) -> bool:
    """Whether a module is in another one, which is in the layer."""
    return block is not None and f"{module}.".startswith(f"{reader}.") and f"{reader}.".startswith(f"{block}.")


def gives_values(func: Callable[..., Any], result: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("new_") or name.endswith("_like"):
        return False
    return any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(result))


def storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        try:
            return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        except (RuntimeError, NotImplementedError):  # of quantised tensors and other subclasses
            return id(tensor)


def views_held(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules that hold a view of a parameter as a plain attribute, by its name."""
    owners: dict[int, list[str]] = defaultdict(list)
    registered = ("_parameters", "_buffers", "_modules")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if has_values(parameter):
            owners[storage(parameter)].append(name)
    found: dict[str, tuple[str, ...]] = {}
    for holder, module in model.named_modules():
        for value in pytree.tree_leaves([value for name, value in vars(module).items() if name not in registered]):
            for name in owners.get(storage(value), ()) if isinstance(value, torch.Tensor) else ():
                if not isinstance(value, nn.Parameter) and name.rpartition(".")[0] != holder:
                    found[name] = (*found.get(name, ()), holder)
    return found


def merged(first: Mapping[str, tuple[str, ...]], second: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """What two forwards showed."""
    return {name: tuple(dict.fromkeys((*first.get(name, ()), *second.get(name, ())))) for name in {**first, **second}}
