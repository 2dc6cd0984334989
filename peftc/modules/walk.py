"""`nn.Module.named_modules`, `get_submodule` and what is built on them, in a fifth of the time.

torch nests one generator for each level of a model, and yields each name through all of them. A
compilation walks the whole model several times; elsewhere torch's own are quick enough.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from peftc.modules.lazy_children import LazyChildren, lazy_children, prototype_of

Named = list[tuple[str, nn.Module]]
_METHODS = {(cls.eval, cls.train, nn.Module.__setattr__) for cls in (nn.Module, PreTrainedModel)}


def named_modules(model: nn.Module, prefix: str = "") -> Named:
    """`list(model.named_modules(prefix=prefix))`."""
    result, seen = [(prefix, model)], {id(model)}
    _collect(model, f"{prefix}." if prefix else "", result, seen)
    return result


def all_named_modules(model: nn.Module, without: str = "") -> Named:
    """`list(model.named_modules(remove_duplicate=False))`: every name of every module. `without`:
    children of this name are skipped.
    """
    result = [("", model)]
    _collect_all(model, "", result, without)
    return result


def outline_module(model: nn.Module, name: str) -> nn.Module:
    """`submodule`, for its class and shapes: of a layer with lazy children its prototype's."""
    module: Any = model
    for part in name.split(".") if name else ():
        child = vars(module)["_modules"].get(part)
        if child is None:
            return submodule(model, name)
        module = prototype_of(child)
    return module


def submodule(model: nn.Module, name: str) -> nn.Module:
    """`model.get_submodule(name)`."""
    module: Any = model
    for part in name.split(".") if name else ():
        child = vars(module)["_modules"].get(part)
        if child is None:
            return model.get_submodule(name)  # which raises, or finds a property
        module = child
    return module


def _collect(module: Any, start: str, result: Named, seen: set[int]) -> None:
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            result.append((start + name, child))
            if child._modules:
                _collect(child, f"{start}{name}.", result, seen)


def _collect_all(module: Any, start: str, result: Named, without: str) -> None:
    for name, child in module._modules.items():
        if child is not None and name != without:
            result.append((start + name, child))
            if child._modules:
                _collect_all(child, f"{start}{name}.", result, without)


def modules_in(model: nn.Module, leaves: Container[int] = ()) -> list[nn.Module]:
    """`list(model.modules())`. `leaves`: modules, by `id`, whose children are left out."""
    result, seen = [model], {id(model)}
    if not leaves:
        _collect_modules(model, result, seen)
        return result
    for module in result:
        for child in vars(module)["_modules"].values() if id(module) not in leaves else ():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                result.append(child)
    return result


def _collect_modules(module: Any, result: list[nn.Module], seen: set[int]) -> None:
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            result.append(child)
            if child._modules:
                _collect_modules(child, result, seen)


def outline(model: nn.Module, duplicates: bool = False) -> Named:
    """`named_modules`, or with `duplicates` `all_named_modules`, in which prototypes stand for lazy
    children: they have their names, classes and shapes.
    """
    result = [("", model)]
    _collect_outline(model, "", result, None if duplicates else {id(model)}, True)
    return result


def modules_outside(model: nn.Module, duplicates: bool = False) -> Named:
    """As `outline`, without lazy children and what is in them."""
    result = [("", model)]
    _collect_outline(model, "", result, None if duplicates else {id(model)}, False)
    return result


def has_aliases(model: nn.Module) -> bool:
    """Whether a module has several names. Lazy children have one each."""
    return _has_aliases(model, {id(model)})


def _has_aliases(module: Any, seen: set[int]) -> bool:
    children = module._modules
    for child in () if type(children) is LazyChildren else children.values():
        if child is not None:
            if id(child) in seen:
                return True
            seen.add(id(child))
            if type(child._modules) is not LazyChildren and child._modules and _has_aliases(child, seen):
                return True
    return False


def _collect_outline(module: Any, start: str, result: Named, seen: set[int] | None, prototypes: bool) -> None:
    if type(module._modules) is LazyChildren:
        if prototypes:
            result += module._modules.named_parts(start)
        return
    for name, child in module._modules.items():
        if child is None:
            continue
        if seen is not None:
            if (number := id(child)) in seen:
                continue
            seen.add(number)
        result.append((start + name, child))
        if type(child._modules) is LazyChildren or child._modules:
            _collect_outline(child, f"{start}{name}.", result, seen, prototypes)


def set_eval(model: nn.Module) -> nn.Module:
    """`model.eval()`."""
    modules = [module for _, module in modules_outside(model)]
    prototypes = {children.prototype for module in modules if (children := lazy_children(module)) is not None}
    modules += [module for prototype in prototypes for module in modules_in(prototype.layer)]
    methods = {(cls.eval, cls.train, cls.__setattr__) for cls in {*map(type, modules)}}
    # transformers' method puts kernels in place if the mode changes.
    if not methods <= _METHODS or any(vars(module).get("_use_kernels") for module in modules):
        return model.eval()
    for module in modules:
        vars(module)["training"] = False
    return model


def named_parameters(modules: Named) -> Collection[tuple[str, nn.Parameter]]:
    """`model.named_parameters()`, from `named_modules(model)`."""
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in modules:
        if own := module.__dict__["_parameters"]:
            start = f"{prefix}." if prefix else ""
            for name, parameter in own.items():
                if parameter is not None and id(parameter) not in parameters:
                    parameters[id(parameter)] = start + name, parameter
    return parameters.values()


def all_named_parameters(modules: Named) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters(remove_duplicate=False)`, from `all_named_modules(model)`."""
    for prefix, module in modules:
        if own := module.__dict__["_parameters"]:
            start = f"{prefix}." if prefix else ""
            for name, parameter in own.items():
                if parameter is not None:
                    yield start + name, parameter


def all_parameters(modules: Named) -> Iterator[nn.Parameter]:
    """Those of `all_named_parameters`."""
    return (p for _, module in modules for p in vars(module)["_parameters"].values() if p is not None)


def all_named_buffers(modules: Named) -> Iterator[tuple[str, Tensor]]:
    """`model.named_buffers(remove_duplicate=False)`, from `all_named_modules(model)`."""
    for prefix, module in modules:
        for name, buffer in vars(module)["_buffers"].items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer
