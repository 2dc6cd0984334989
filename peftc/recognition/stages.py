"""Stages: modules that a model repeats, each of which holds a list of layers.

A block is a stage where all of its sub-layers are those of the blocks listed in it. A layer with a
list of experts, or of feed-forward networks, has an attention beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from peftc.dataflow.nodes import module_path
from peftc.observation.layer_candidates import containing_list
from peftc.recognition.roles import SubLayer

LISTS = (nn.ModuleList, nn.Sequential)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def refined(blocks: list[str], subs: Mapping[str, Sequence[SubLayer]], model: nn.Module) -> list[str]:
    """The blocks with each list of stages replaced by the layers in them.

    Args:
        subs: the sub-layers of those that ran, by name; none of one that could not be traced.
    """
    lists: dict[str, list[str]] = {}
    for name in blocks:
        lists.setdefault(containing_list(model, name), []).append(name)
    names: list[str] = []
    for members in lists.values():
        stages = are_stages([(subs[name], model.get_submodule(name)) for name in members if name in subs])
        names += [inner for name in members for inner in _listed_blocks(model, name)] if stages else members
    return names


def are_stages(blocks: Sequence[tuple[Sequence[SubLayer], nn.Module]]) -> bool:
    """Whether all sub-layers of the blocks of one list are those of blocks listed in them; where
    they have none, whether what is listed in them has parts.
    """
    listed = [(subs, block, _listed_blocks(block, "")) for subs, block in blocks]
    if not blocks or not all(inside for _, _, inside in listed):
        return False
    if any(subs for subs, _ in blocks):
        return all(_covers(inside, subs) for subs, _, inside in listed)
    return all(_is_nested(block.get_submodule(name)) for _, block, inside in listed for name in inside)


def _covers(modules: Sequence[str], subs: Sequence[SubLayer]) -> bool:
    """Whether each sub-layer is added in one of these modules."""
    paths = [module_path(sub.add) for sub in subs]
    return all(any(f"{path}.".startswith(f"{name}.") for name in modules) for path in paths)


def _is_nested(block: nn.Module) -> bool:
    """Whether a block has parts that have parts with weights, as an attention, and no expert."""
    return any(
        next(child.children(), None) is not None and any(p.ndim >= 2 for p in child.parameters())
        for child in block.children()
    )


def _listed_blocks(model: nn.Module, block: str) -> list[str]:
    """The elements of the outermost lists of blocks in a block, by their names in the model."""
    modules = model.get_submodule(block).named_modules(prefix=block)
    return _elements((name, module) for name, module in modules if name != block and _is_list_of_blocks(module))


def convolutional_blocks(model: nn.Module) -> list[str]:
    """The elements of the outermost lists of modules of one class that hold convolutions."""
    return _elements((name, module) for name, module in model.named_modules() if _is_list_of_convolutions(module))


def _elements(lists: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The names of the elements of the outermost of some lists."""
    names: list[str] = []
    for path, modules in lists:
        if not any(path.startswith(f"{name}.") for name in names):
            names += [f"{path}.{i}".lstrip(".") for i in range(len(list(modules.children())))]
    return names


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The modules in a list of modules of one class, which are no lists themselves."""
    blocks = list(module.children()) if isinstance(module, LISTS) else []
    return blocks if len({type(b) for b in blocks}) == 1 and not isinstance(blocks[0], LISTS) else []


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of modules each of which has matrices of its own."""
    blocks = _blocks(module)
    return bool(blocks) and all(sum(p.ndim >= 2 for p in block.parameters()) >= 2 for block in blocks)


def _is_list_of_convolutions(module: nn.Module) -> bool:
    blocks = _blocks(module)
    convolves = (any(isinstance(m, _CONVOLUTIONS) for m in b.modules()) for b in blocks)
    return bool(blocks) and all(next(b.children(), None) is not None for b in blocks) and all(convolves)
