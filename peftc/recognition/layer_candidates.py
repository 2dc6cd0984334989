"""Modules that may be layers: those that a model repeats, or that its stages hold.

A stage is a repeated module with a list of layers: all its sub-layers are those of the blocks in
the list. A layer with a list of experts, or of feed-forward networks, has an attention beside them.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from peftc.dataflow.nodes import module_path
from peftc.modules.lazy_children import prototype_of
from peftc.modules.walk import Named, outline, outline_module
from peftc.recognition.sublayer import SubLayer

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that a transformer repeats: its layers.

    transformers marks them as `GradientCheckpointingLayer`. Other layers are the elements of lists
    whose elements have one class, or that have several elements of one class among others; and what
    has such a class beside the lists.
    """
    modules = outline(model)
    marked = [n for n, m in modules if isinstance(m, GradientCheckpointingLayer)]
    outer = {n[:i] for n in marked for i, c in enumerate(n) if c == "."}
    marked = [n for n in marked if n not in outer or not _holds_list(model, n, marked)]
    every = frozenset(marked)
    marked = [n for n in marked if every.isdisjoint(n[:i] for i, c in enumerate(n) if c == ".")]
    blocks = _unmarked_blocks(modules, marked)
    return [*marked, *blocks, *_blocks_beside_lists(model, modules, blocks)]


def _unmarked_blocks(modules: Named, marked: list[str]) -> list[str]:
    """The elements of lists that neither hold marked layers nor are part of one."""
    owners = {".".join(n.split(".")[:i]) for n in marked for i in range(len(n.split(".")))}
    blocks: list[str] = []
    for name, children in modules:
        if not isinstance(children, LISTS) or name in owners:
            continue
        if not any(f"{name}.".startswith(f"{other}.") for other in (*marked, *blocks)):
            blocks += [f"{name}.{child}".lstrip(".") for child in _blocks_in(children)]
    return blocks


def _blocks_beside_lists(model: nn.Module, modules: Named, blocks: Sequence[str]) -> list[str]:
    """Modules in no list whose class is that of blocks in lists, and neither in nor around one."""
    # Seen in: no transformers model, but the block between both halves of U-ViT
    if not (classes := {type(outline_module(model, name)) for name in blocks} - {*LISTS}):
        return []
    taken = [f"{name}." for name in blocks]
    return [
        name
        for name, module in modules
        if type(module) in classes and not isinstance(outline_module(model, name.rpartition(".")[0]), LISTS)
        if name and not any(f"{name}.".startswith(other) or other.startswith(f"{name}.") for other in taken)
    ]


class ListPaths:
    """`containing_list` of the modules of a model, looked up once for each parent."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known: dict[str, tuple[str, bool]] = {}  # by the names of parents; whether it is a list

    def find(self, layer: str) -> tuple[str, bool]:
        parent = layer.rpartition(".")[0]
        if parent not in self.known:
            path = containing_list(self.model, layer)
            self.known[parent] = path, isinstance(outline_module(self.model, path), LISTS)
        return self.known[parent]


def stack_path(model: nn.Module, layer: str, layers: Iterable[str], lists: ListPaths) -> str:
    """What holds a layer and those of its stack: a list or, of a layer beside lists of its class,
    the layer itself.
    """
    path, is_list = lists.find(layer)
    if is_list or issubclass(cls := type(outline_module(model, layer)), GradientCheckpointingLayer):
        return path
    others = (name for name in layers if type(outline_module(model, name)) is cls)
    return layer if any(lists.find(other)[1] for other in others) else path


def _blocks_in(children: nn.Module) -> list[str]:
    """The elements of a list that have several matrices, and code that may be a layer's."""
    elements = list_elements(children)
    blocks = {n: c for n, c in elements.items() if _matrices(c) >= 2 and is_callable(c)}
    classes = Counter(map(type, blocks.values()))
    repeats = len(blocks) == len(elements) and len(classes) == 1
    if repeats or max(classes.values(), default=0) > 1:
        return list(blocks)
    # Seen in: no transformers model, but EfficientFormer, whose last block alone attends
    convolutions = Counter(type(c) for n, c in elements.items() if n not in blocks and _has_convolving_parts(c))
    nested = [name for name, block in blocks.items() if _is_nested(block)]
    return nested if max(convolutions.values(), default=0) > 1 else []


def numbered_blocks(model: nn.Module) -> list[str]:
    """The children of a module that have one class, and names that differ in a number: `block1`."""
    # Seen in: no transformers model, but scripts of users
    for path, module in outline(model):
        groups: dict[tuple[str, type], list[str]] = {}
        for name, child in module.named_children() if not isinstance(module, LISTS) else ():
            pattern, numbers = re.subn(r"\d+", "*", name)
            if numbers and _matrices(child) >= 2 and is_callable(child):
                groups.setdefault((pattern, type(child)), []).append(f"{path}.{name}".lstrip("."))
        if (blocks := max(groups.values(), key=len, default=[])) and len(blocks) > 1:
            return blocks
    return []


def blocks_by_class(model: nn.Module) -> list[list[str]]:
    """Modules that may be layers although no list holds them: those of one class, of which none is
    in another one, then modules alone. Outer ones come first.
    """
    # Seen in: no transformers model, but models of few layers: `self.encoder = Block()`
    classes: dict[type, list[str]] = {}
    for name, module in outline(model):
        if name and not isinstance(module, LISTS) and is_callable(module) and _matrices(module) >= 2:
            classes.setdefault(type(module), []).append(name)
    groups = [names for names in classes.values() if not any(map(_is_in_another, names, repeat(names)))]
    return sorted(groups, key=lambda names: (len(names) == 1, min(name.count(".") for name in names)))


def _is_in_another(name: str, names: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in names)


def _matrices(module: nn.Module) -> int:
    """The number of matrices in a module, of any shape, without those of convolutions."""
    own = ((m, p) for m in prototype_of(module).modules() for p in m.parameters(recurse=False))
    return sum(p.ndim == 2 or (p.ndim > 2 and not isinstance(m, _CONVOLUTIONS)) for m, p in own)


def list_elements(children: nn.Module) -> dict[str, nn.Module]:
    """The elements of a list, by name, without placeholders."""
    # Seen in: DINOv2, whose lists begin with `nn.Identity` so that names are those of all layers
    return {name: child for name, child in children.named_children() if not isinstance(child, nn.Identity)}


def is_callable(module: nn.Module) -> bool:
    """Whether a module has a forward: a ModuleList has none."""
    return type(module).forward is not nn.Module.forward


def _holds_list(model: nn.Module, name: str, blocks: list[str]) -> bool:
    """Whether a block holds a list of other blocks: then it is a stage, and they are the layers."""
    paths = [b.removeprefix(f"{name}.").split(".") for b in blocks if b.startswith(f"{name}.")]
    owners = {".".join([name, *path[:i]]) for path in paths for i in range(1, len(path))}
    return any(isinstance(outline_module(model, n), LISTS) for n in owners)


def containing_list(model: nn.Module, layer: str) -> str:
    """The list that holds a layer, directly or inside a wrapper; else the layer's parent."""
    owner = parent = layer.rpartition(".")[0]
    while owner and not isinstance(outline_module(model, owner), LISTS):
        owner = owner.rpartition(".")[0]
    return owner or parent


def refined(blocks: list[str], subs: Mapping[str, Sequence[SubLayer]], model: nn.Module) -> list[str]:
    """The blocks with each list of stages replaced by the layers in them. `subs`: the sub-layers of
    those that ran, by name; none of one that could not be traced.
    """
    paths = ListPaths(model)
    lists: dict[str, list[str]] = {}
    for name in blocks:
        lists.setdefault(paths.find(name)[0], []).append(name)
    names: list[str] = []
    for members in lists.values():
        pairs = [(subs[name], outline_module(model, name)) for name in members if name in subs]
        kinds = {(id(own), id(block)): (own, block) for own, block in pairs}
        if not are_stages([*kinds.values()]):
            names += members
            continue
        blocks_of = _blocks_in_each([(subs.get(name, ()), outline_module(model, name)) for name in members])
        for name, listed in zip(members, blocks_of, strict=True):
            parts = [*_parts_beside(subs.get(name, ()), listed), *listed]
            names += [f"{name}.{part}" for part in parts] or [name]
    return names


def are_stages(blocks: Sequence[tuple[Sequence[SubLayer], nn.Module]]) -> bool:
    """Whether all sub-layers of the blocks of one list are those of blocks listed in them; where
    they have none, whether what is listed in them has parts. A block whose list holds one
    sub-layer each, of several kinds, is a layer. Beside listed layers, a stage may have mixers, and
    parts with sub-layers of their own.
    """
    # Seen in: ALBERT, CvT, Donut, Swin V2; with mixers GCViT of timm, with such parts LeViT
    with_subs = [(subs, block) for subs, block in blocks if subs]
    owners_of_lists = with_subs or blocks
    inner = _blocks_in_each(owners_of_lists)
    listed = [(subs, block, names) for (subs, block), names in zip(owners_of_lists, inner, strict=True)]
    if not blocks or not all(inside for _, _, inside in listed):
        return False
    if with_subs:
        owners = [[(next(_owners(sub, inside), None), sub.kind) for sub in subs] for subs, _, inside in listed]
        counts = Counter((i, name) for i, block in enumerate(owners) for name, _ in block if name is not None)
        are_layers = max(counts.values(), default=0) > 1
        one_kind = len({kind for block in owners for _, kind in block}) == 1
        # of several mixers of a stage, the last may be called its feed-forward part
        alike = all(_are_alike(block, {n for n, _ in own}) for (_, block, _), own in zip(listed, owners, strict=True))
        outside = {kind for block in owners for name, kind in block if name is None}
        apart = outside <= {"mixer"} or all("" not in _parts_beside(subs, inside) for subs, _, inside in listed)
        return (are_layers and apart) or ((one_kind or alike) and not outside)
    return all(_is_nested(outline_module(block, name)) for _, block, inside in listed for name in inside)


def _are_alike(block: nn.Module, names: Iterable[str | None]) -> bool:
    """Whether some modules have one class, and parameters of the same shapes."""
    # Seen in: no transformers model, but MambaOut
    modules = [outline_module(block, name) for name in names if name is not None]
    return len({(type(module), *(p.shape for p in module.parameters())) for module in modules}) == 1


def _owners(sub: SubLayer, blocks: Iterable[str]) -> Iterator[str]:
    """Of some blocks the one whose code adds a sub-layer to the stream."""
    path = f"{module_path(sub.add)}."
    return (name for name in blocks if path.startswith(f"{name}."))


def _is_nested(block: nn.Module) -> bool:
    """Whether a block has parts that have parts with weights, as an attention, and no expert."""
    parts = (child for child in block.children() if next(child.children(), None) is not None)
    return any(p.ndim >= 2 for part in parts for p in part.parameters())


def _parts_beside(subs: Sequence[SubLayer], blocks: Collection[str]) -> list[str]:
    """The children of a stage, beside the lists of its blocks, whose code adds an attention or a
    feed-forward part to a stream; an empty name where code of the stage itself does.
    """
    # Seen in: no transformers model, but LeViT, whose stages begin with another attention
    others = [sub for sub in subs if sub.kind != "mixer" and not any(_owners(sub, blocks))]
    heads = dict.fromkeys(module_path(sub.add).partition(".")[0] for sub in others)
    return ["" if any(f"{block}.".startswith(f"{head}.") for block in blocks) else head for head in heads]


def _blocks_in_each(stages: Sequence[tuple[Sequence[SubLayer], nn.Module]]) -> list[list[str]]:
    """The blocks listed in each of some modules. A list may have several classes of blocks if that
    of the same name in another module has one, or if one of them has parts of several kinds.
    """
    # Seen in: with several classes no transformers model, but the stages of EdgeNeXt
    listed = [_listed_blocks(block) or _listed_layers(subs, block) for subs, block in stages]
    lists = {name.rpartition(".")[0] for names in listed for name in names}
    mixed = (names or _listed_blocks(block, False) for names, (_, block) in zip(listed, stages, strict=True))
    return [[name for name in names if name.rpartition(".")[0] in lists] for names in mixed]


def _listed_layers(subs: Sequence[SubLayer], block: nn.Module) -> list[str]:
    """The elements of lists, of several classes, of which one adds sub-layers of several kinds."""
    # Seen in: no transformers model, but EfficientViT, whose stages begin with a convolution
    listed = _elements(outline(block), lambda module: _has_matrices(module) or not _has_parameters(module), False)
    # parts with names of their own (an OrderedDict) are those of one layer: MaxViT of torchvision
    listed = [name for name in listed if name.rpartition(".")[2].isdigit()]
    names = [name for name in listed if _has_parameters(outline_module(block, name))]
    kinds: dict[str | None, set[str]] = {}
    for sub in subs:
        kinds.setdefault(next(_owners(sub, names), None), set()).add(sub.kind)
    return names if any(len(kinds.get(name, ())) > 1 for name in names) else []


def _listed_blocks(block: nn.Module, one_class: bool = True) -> list[str]:
    """The elements of the lists in a block, itself perhaps one, of modules with matrices."""
    return _elements(outline(block), _has_matrices, one_class)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_matrices(module: nn.Module) -> bool:
    return sum(p.ndim >= 2 for p in module.parameters()) >= 2


def blocks_of_other_stages(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The elements of lists beside those of the layers, whose paths differ from theirs in numbers
    alone: the stages of a pyramid whose blocks have no matrices but those of convolutions.
    """
    # Seen in: no transformers model, but EfficientFormer and CAFormer of timm
    paths = ListPaths(model)
    lists = {path for path in {paths.find(name)[0] for name in layers} if re.search(r"\.\d+\.", path)}
    patterns = {without_numbers(path) for path in lists}
    blocks: list[str] = []
    for path, module in outline(model) if patterns else ():
        if isinstance(module, LISTS) and without_numbers(path) in patterns:
            blocks += [f"{path}.{name}" for name, child in list_elements(module).items() if is_callable(child)]
    return [name for name in blocks if name not in layers and not _is_around_or_in(name, layers)]


def without_numbers(path: str) -> str:
    """A dotted name with `*` for its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _is_around_or_in(name: str, layers: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{layer}.") or layer.startswith(f"{name}.") for layer in layers)


def convolutional_blocks(model: nn.Module) -> list[str]:
    """The elements of lists of modules with parts that hold convolutions."""
    # Seen in: BiT, EfficientNet, ResNet, RegNet
    return _elements(outline(model), _has_convolving_parts)


def _has_convolving_parts(module: nn.Module) -> bool:
    has_parts = next(module.children(), None) is not None
    return has_parts and any(isinstance(m, _CONVOLUTIONS) for m in module.modules())


def _elements(
    modules: Iterable[tuple[str, nn.Module]], is_block: Callable[[nn.Module], bool], one_class: bool = True
) -> list[str]:
    """The elements of the outermost lists of blocks, of one class or any, which are no lists
    themselves.
    """
    names: list[str] = []
    for path, module in modules:
        blocks = list_elements(module) if isinstance(module, LISTS) else {}
        classes = set(map(type, blocks.values()))
        if not classes or (one_class and len(classes) > 1):
            continue
        if not all(map(is_block, map(prototype_of, blocks.values()))):
            continue
        if any(isinstance(block, LISTS) for block in blocks.values()):
            continue
        if not any(f"{path}.".startswith(f"{name}.") for name in names):
            names += [f"{path}.{name}".lstrip(".") for name in blocks]
    return names
