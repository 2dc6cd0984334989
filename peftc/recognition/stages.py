"""Stages: modules that a model repeats, each of which is a list of layers. The layers are then what its list holds.

A block is a stage where all of its sub-layers are those of the blocks listed in it. A layer with a list of experts, or of
feed-forward networks, has an attention beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from peftc.observation.layer_candidates import containing_list
from peftc.recognition.roles import SubLayer

LISTS = (nn.ModuleList, nn.Sequential)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def refined(blocks: list[str], subs: Mapping[str, Sequence[SubLayer]], model: nn.Module) -> list[str]:
    """The blocks with each list of stages replaced by the layers in them.

    `subs`: the sub-layers of those that ran, by name; none of one that could not be traced.
    """
    lists: dict[str, list[str]] = {}
    for name in blocks:
        lists.setdefault(containing_list(model, name), []).append(name)
    found: list[str] = []
    for members in lists.values():
        ran = {name: model.get_submodule(name) for name in members if name in subs}
        stages = are_stages([(subs[name], block) for name, block in ran.items()])
        found += [inner for name in members for inner in listed_in(model, name)] if stages else members
    return found


def are_stages(blocks: Sequence[tuple[Sequence[SubLayer], nn.Module]]) -> bool:
    """Whether all sub-layers of the blocks of one list, each with its own, are those of blocks listed in them; where they
    have none, whether what is listed in them has parts.
    """
    listed = [(subs, block, listed_in(block, "")) for subs, block in blocks]
    if not blocks or not all(inside for _, _, inside in listed):
        return False
    if any(subs for subs, _ in blocks):
        return all(covers(inside, subs) for subs, _, inside in listed)
    return all(is_nested(block.get_submodule(name)) for _, block, inside in listed for name in inside)


def covers(inside: Sequence[str], subs: Sequence[SubLayer]) -> bool:
    """Whether each sub-layer is that of one of the modules inside of a block, named from there."""
    frames = [str(sub.add.meta["origin"][0]) for sub in subs]
    return all(any(f"{frame}.".startswith(f"{name}.") for name in inside) for frame in frames)


def listed_in(model: nn.Module, block: str) -> list[str]:
    """The elements of the outermost lists of blocks inside of a block, by their names in the model."""
    found: list[str] = []
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        if name != block and alike(module) and not any(name.startswith(f"{f}.") for f in found):
            found += [f"{name}.{i}" for i in range(len(list(module.children())))]
    return found


def alike(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one class, each with matrices of its own."""
    blocks = list(module.children()) if isinstance(module, LISTS) else []
    matrices = [sum(p.ndim >= 2 for p in block.parameters()) for block in blocks]
    return len({type(b) for b in blocks}) == 1 and min(matrices) >= 2 and not isinstance(blocks[0], LISTS)


def is_nested(block: nn.Module) -> bool:
    """Whether a block has parts with weights that have parts themselves, as an attention has, and no expert."""
    return any(
        next(child.children(), None) is not None and any(p.ndim >= 2 for p in child.parameters())
        for child in block.children()
    )


def convolutional_blocks(model: nn.Module) -> list[str]:
    """The elements of the outermost lists of modules of one class that hold convolutions."""
    found: list[str] = []
    for name, module in model.named_modules():
        blocks = list(module.children()) if isinstance(module, LISTS) else []
        same = len({type(b) for b in blocks}) == 1 and not isinstance(blocks[0], LISTS)
        if same and all(map(convolves, blocks)) and not any(name.startswith(f"{f}.") for f in found):
            found += [f"{name}.{i}".lstrip(".") for i in range(len(blocks))]
    return found


def convolves(block: nn.Module) -> bool:
    return next(block.children(), None) is not None and any(isinstance(m, _CONVOLUTIONS) for m in block.modules())
