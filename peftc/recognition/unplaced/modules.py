"""The modules of a model whose weights lack a role: in its layers, and blocks outside of them."""

import re
from collections.abc import Collection, Iterator

from torch import nn

from peftc.addressing.sites import UnplacedModule
from peftc.dataflow.nodes import module_path
from peftc.dataflow.operations import Op
from peftc.modules.walk import outline, outline_module
from peftc.observation.layer_keys import structure_key
from peftc.recognition.layer_candidates import LISTS
from peftc.recognition.layer_types import LayerType
from peftc.recognition.layers import ModelStructure
from peftc.recognition.loops import contains_name
from peftc.recognition.non_layer_sites import enclosing, qualified
from peftc.recognition.token_mixing import is_weighted
from peftc.recognition.unplaced.in_layers import unplaced_parts

ALIKE = "it is in no layer that was recognised, and is like `{}`"
ATTENDS = "it attends, and is in no layer that was recognised"


def unplaced_modules(structure: ModelStructure) -> tuple[UnplacedModule, ...]:
    """Every module that an edit of a role would leave out."""
    return (*_in_layers(structure), *_outside_layers(structure))


def _in_layers(structure: ModelStructure) -> Iterator[UnplacedModule]:
    for stack in structure.stacks:
        parts = {id(kind): unplaced_parts(kind) for kind in {id(k): k for k in stack.kinds}.values()}
        for i, (root, kind) in enumerate(zip(stack.roots, stack.kinds, strict=True)):
            for part in parts[id(kind)]:
                name = f"{root}.{part.module}".strip(".")
                steps = qualified(stack.name, (("layer", i),))
                yield UnplacedModule(name, _type_of(structure, name), part.reason, steps, part.hides)


def _type_of(structure: ModelStructure, name: str) -> str:
    """The class of a module; that of its owner for a parameter."""
    owner, _, attribute = name.rpartition(".")
    module = outline_module(structure.model, owner)
    return type(getattr(module, attribute) if attribute in dict(module.named_children()) else module).__name__


def _outside_layers(structure: ModelStructure) -> Iterator[UnplacedModule]:
    """Repeated blocks that run in no layer, and are attentions, or like blocks of the layers."""
    layers = {name for stack in structure.stacks for name in stack.modules}
    if not layers:
        return
    around = {name for layer in layers for name in enclosing(layer)} | {""}
    others = [name for name in structure.outside_layers if name not in around]
    classes = {type(outline_module(structure.model, name)) for name in layers}
    attending = _attending(structure)
    if not (others := [name for name in others if _may_be_block(name, structure, classes, attending)]):
        return
    blocks, listed = _Blocks(structure, attending), set[str]()
    for name in others:
        if not listed.isdisjoint(enclosing(name)):
            continue
        if (place := blocks.alike(name)) is not None:
            reason, roles = ALIKE.format(place), blocks.roles[place]
        elif blocks.attends(name):
            reason, roles = ATTENDS, frozenset({"attn"})
        else:
            continue
        listed.add(name)
        yield UnplacedModule(name, _type_of(structure, name), reason, (), roles)


def _attending(structure: ModelStructure) -> set[str]:
    """The innermost modules with matrices around the attentions of a model."""

    def owner(name: str) -> str:
        return next((one for one in enclosing(name) if _matrices(outline_module(structure.model, one))), "")

    owners = {op: set(map(owner, names)) for op, names in structure.seen.token_products.items()}
    return owners.get(Op.ATTENTION, set()) | (owners.get(Op.SOFTMAX, set()) & owners.get(Op.MATMUL, set()))


def _may_be_block(
    name: str, structure: ModelStructure, classes: set[type[nn.Module]], attending: Collection[str]
) -> bool:
    """Whether a module has several matrices, and is in a list, or of a class that layers have, or
    an attention whose result has the shape of what it reads: not of one token, as where it pools.
    """
    if any(contains_name(other, name) for other in structure.untraced):
        return False
    module = outline_module(structure.model, name)
    if _matrices(module) < 2:
        return False
    call = structure.seen.calls[name]
    if name in attending and call.input_shape == call.output_shape and call.input_shape[-2:-1] > (1,):
        return True  # Seen in: I2VGen-XL, whose latents' encoder is one block
    # Seen in: U-ViT, whose middle block is beside its lists
    return type(module) in classes or any(
        isinstance(outline_module(structure.model, parent), LISTS) for parent in enclosing(name)
    )


def _matrices(module: nn.Module) -> int:
    tensors = (p for _, part in outline(module) for p in vars(part)["_parameters"].values() if p is not None)
    return sum(p.ndim >= 2 for p in tensors)


class _Blocks:
    """The blocks of the layers that hold the roles of a sub-layer, by name."""

    def __init__(self, structure: ModelStructure, attending: Collection[str]) -> None:
        self.model, self.seen = structure.model, structure.seen
        self.roles: dict[str, frozenset[str]] = {}
        for stack in structure.stacks:
            first = {id(kind): (root, kind) for root, kind in reversed([*zip(stack.roots, stack.kinds, strict=True)])}
            for root, kind in first.values():
                self.roles |= {f"{root}.{name}".strip("."): roles for name, roles in _blocks_of(kind).items()}
        self.patterns = {(_pattern(name), structure_type(self.model, name)): name for name in reversed(self.roles)}
        self.attending = {structure_type(self.model, name) for name in attending}

    def alike(self, name: str) -> str | None:
        """The block of a layer that a module repeats, by its name but for numbers, or its class."""
        kind = structure_type(self.model, name)
        if (same := self.patterns.get((_pattern(name), kind))) is not None:
            return same
        if type(outline_module(self.model, name)).__module__.startswith("torch."):
            return None
        others = (other for other, roles in self.roles.items() if "attn" in roles)
        return next((other for other in others if structure_type(self.model, other) == kind), None)

    def attends(self, name: str) -> bool:
        return structure_type(self.model, name) in self.attending


def _blocks_of(kind: LayerType) -> dict[str, frozenset[str]]:
    """The modules of a layer that hold all weights of sub-layers, each with their kinds."""
    blocks: dict[str, frozenset[str]] = {}
    for sub in kind.subs:
        if sub.kind in ("attn", "ffn"):
            nodes = [n for n in sub.body if is_weighted(n, kind.layer) and not kind.layer.is_norm(n)]
            names = [module_path(n) for n in nodes]
            for name in names:
                for block in enclosing(name):
                    blocks[block] = blocks.get(block, frozenset()) | {sub.kind}
        if kind.is_module:
            blocks[""] = blocks.get("", frozenset()) | {sub.kind}
    return blocks


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def structure_type(model: nn.Module, name: str) -> object:
    """The class of a module with code of its own; of PyTorch's containers, what they contain."""
    module = outline_module(model, name)
    return structure_key(module) if type(module).__module__.startswith("torch.") else type(module)
