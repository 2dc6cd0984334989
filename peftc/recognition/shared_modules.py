"""Modules that a model has under several names: parts that layers have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from peftc.recognition.layers import ModelStructure


def shared_modules(structure: ModelStructure) -> tuple[tuple[str, ...], ...]:
    """Groups of dotted names under which one module is used, each in the order of the layers.

    A module in several layers is used in each of them; one that is called outside of the layers,
    too, is used there. A whole layer with several names is one layer, which runs several times.
    """
    groups: dict[int, list[str]] = {}
    layers = [name for stack in structure.stacks for name in stack.layers]
    for layer in layers:
        for name, module in structure.model.get_submodule(layer).named_modules(prefix=layer):
            groups.setdefault(id(module), []).append(name)
    for name, module in _outside_layers(
        structure.model, {id(structure.model.get_submodule(layer)) for layer in layers}
    ):
        names = groups.get(id(module), [])
        if not structure.seen.outside_layers.isdisjoint(names) and name not in names:
            names.append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _outside_layers(module: nn.Module, layers: Collection[int], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module that is not in a layer, under each of its names. `layers`: by `id`."""
    yield name, module
    for child_name, child in vars(module)["_modules"].items():
        if child is not None and id(child) not in layers:
            yield from _outside_layers(child, layers, f"{name}.{child_name}".lstrip("."))
