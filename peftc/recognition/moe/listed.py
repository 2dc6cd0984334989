"""Experts that are modules in a list, each of which is called for the tokens routed to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from peftc.dataflow.feature_rows import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import first_input, output_of
from peftc.observation.repeated_layers import structure_key
from peftc.recognition.ffn import Projection, input_projections


@dataclass(frozen=True)
class ExpertModules:
    """The experts of a layer; `roles`: the Linears of each by their names in that expert."""

    module: str
    members: tuple[str, ...]
    roles: Mapping[str, str]

    @property
    def count(self) -> int:
        return len(self.members)


def expert_modules(module: str, code: LayerGraph) -> ExpertModules | None:
    """The experts in a module that calls one of several of the same structure.

    Args:
        module: its name in the layer.
        code: the approximate trace of its code.
    """
    downs = source_linears(code, output_of(code.graph))
    hidden = first_input(downs[0][0]) if len(downs) == 1 else None
    if hidden is None:
        return None
    projections = {"down": Projection(*downs[0])} | input_projections(hidden, code)
    names = {role: str(p.node.target) for role, p in projections.items() if p.rows is None}
    one = _member(list(names.values()), code.root)
    if one is None:
        return None
    container, _, _ = one.rpartition(".")
    members = _same_structure(code.root.get_submodule(one), code.root.get_submodule(container))
    members = tuple(f"{module}.{container}.{name}".replace("..", ".").strip(".") for name in members)
    return ExpertModules(module, members, {role: name[len(one) + 1 :] for role, name in names.items()})


def _member(names: list[str], root: nn.Module) -> str | None:
    """The list element that contains all the named modules."""
    parts = names[0].split(".")
    for end in range(1, len(parts)):
        one, container = ".".join(parts[:end]), ".".join(parts[: end - 1])
        if not all(name.startswith(f"{one}.") for name in names):
            return None
        if len(_same_structure(root.get_submodule(one), root.get_submodule(container))) > 1:
            return one
    return None


def _same_structure(one: nn.Module, container: nn.Module) -> list[str]:
    """The children of `container` that have the structure of one of them."""
    key = structure_key(one)
    return [name for name, child in container.named_children() if structure_key(child) == key]
