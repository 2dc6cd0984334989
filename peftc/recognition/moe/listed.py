"""Experts that are modules in a list, one of which is called for the tokens that were sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from peftc.observation.layer_keys import structure_key
from peftc.recognition import ffn
from peftc.recognition.graph import features, nodes
from peftc.tracing.tracer import RegionTrace


@dataclass(frozen=True)
class Listed:
    """The experts of a layer by their names in it; `roles`: the Linears of each by their names in that expert."""

    module: str
    members: tuple[str, ...]
    roles: Mapping[str, str]

    @property
    def count(self) -> int:
        return len(self.members)


def listed(module: str, traced: RegionTrace) -> Listed | None:
    """The experts in a module that calls one of several like it.

    Args: `module`: its name in the layer; `traced`: the gist of its code.
    """
    root = traced.root
    assert root is not None
    output = next(n for n in traced.graph.nodes if n.op == "output")
    downs = features.source_linears(output, root)
    hidden = nodes.first_input(downs[0][0]) if len(downs) == 1 else None
    if hidden is None:
        return None
    found = {"down": ffn.Projection(*downs[0])} | ffn.before(hidden, root)
    names = {role: str(made.node.target) for role, made in found.items() if made.rows is None}
    one = member(list(names.values()), root)
    if one is None:
        return None
    container, _, _ = one.rpartition(".")
    others = alike(root.get_submodule(one), root.get_submodule(container))
    inside = tuple(f"{module}.{container}.{name}".replace("..", ".").strip(".") for name in others)
    return Listed(module, inside, {role: name[len(one) + 1 :] for role, name in names.items()})


def member(names: list[str], root: nn.Module) -> str | None:
    """The one of several like it that contains all the named modules."""
    parts = names[0].split(".")
    for end in range(1, len(parts)):
        one, container = ".".join(parts[:end]), ".".join(parts[: end - 1])
        if not all(name.startswith(f"{one}.") for name in names):
            return None
        if len(alike(root.get_submodule(one), root.get_submodule(container))) > 1:
            return one
    return None


def alike(one: nn.Module, container: nn.Module) -> list[str]:
    """The children of a module that have the structure of one of them."""
    wanted = structure_key(one)
    return [name for name, child in container.named_children() if structure_key(child) == wanted]
