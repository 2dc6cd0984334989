"""Modules that may be layers: those that the model repeats."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

LISTS = (nn.ModuleList, nn.Sequential)


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that a transformer repeats: its layers.

    transformers marks them as `GradientCheckpointingLayer`. Other layers are the elements of lists
    whose elements have one class.
    """
    marked = [n for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    marked = [n for n in marked if not _holds_list(model, n, marked)]
    marked = [n for n in marked if not any(n.startswith(f"{other}.") for other in marked)]
    return [*marked, *_unmarked_blocks(model, marked)]


def _unmarked_blocks(model: nn.Module, marked: list[str]) -> list[str]:
    """The elements of lists that neither hold marked layers nor are part of one."""
    owners = {".".join(n.split(".")[:i]) for n in marked for i in range(len(n.split(".")))}
    blocks: list[str] = []
    for name, children in model.named_modules():
        if not isinstance(children, LISTS) or name in owners or len({type(c) for c in children}) != 1:
            continue
        nested = any(name.startswith(f"{other}.") for other in (*marked, *blocks))
        if not nested and all(sum(p.ndim == 2 for p in c.parameters()) >= 2 for c in children):
            blocks += [f"{name}.{i}".lstrip(".") for i in range(len(children))]
    return blocks


def _holds_list(model: nn.Module, name: str, blocks: list[str]) -> bool:
    """Whether a block holds a list of other blocks: then it is a stage, and they are the layers."""
    paths = [b.removeprefix(f"{name}.").split(".") for b in blocks if b.startswith(f"{name}.")]
    owners = {".".join([name, *path[:i]]) for path in paths for i in range(1, len(path))}
    return any(isinstance(model.get_submodule(n), LISTS) for n in owners)


def containing_list(model: nn.Module, layer: str) -> str:
    """The list that holds a layer, directly or inside a wrapper; else the layer's parent."""
    parts = layer.split(".")
    owners = [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
    lists = (name for name in owners if isinstance(model.get_submodule(name), LISTS))
    return next(lists, layer.rpartition(".")[0])
