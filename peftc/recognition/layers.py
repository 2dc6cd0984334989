"""The stacks of layers of a model: lists of layers, each with its type."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.dataflow.operations import Op
from peftc.modules.walk import outline_module, submodule
from peftc.observation.recorder import observe
from peftc.observation.sample_forward import SampleForward
from peftc.observation.token_flow import TokenFlow
from peftc.recognition.layer_candidates import (
    ListPaths,
    blocks_by_class,
    blocks_of_other_stages,
    convolutional_blocks,
    numbered_blocks,
    refined,
    repeated_blocks,
    stack_path,
    without_numbers,
)
from peftc.recognition.layer_types import LayerType, LoopTypes, equal_type, kinds_of_one_structure, trace_layer
from peftc.recognition.loops import (
    Loop,
    attribute_loops,
    contains_name,
    find_loops,
    first_norms,
    is_stage,
    leaves_stream,
    may_hold_layers,
    own_part,
    sub_layers_by_body,
    weights_of,
)
from peftc.recognition.sublayer import SubLayer
from peftc.recognition.unplaced.untraced import NOT_ADDED
from peftc.tracing.bytecode import line_of
from peftc.tracing.operations import autograd_function


@dataclass
class Stack:
    """A list of layers. `name` stands before `layer` in the paths of its sites: `text.decoder`.

    A layer that is the body of a loop has the name of the smallest module around it.
    """

    name: str
    path: str  # of the list that holds the layers, or of the layer that is in no list
    layers: list[str]  # dotted names, in order
    kinds: list[LayerType]  # of each layer
    roots: list[str]  # of each layer, the module whose graph holds its states: the layer itself, or around a loop

    @property
    def modules(self) -> list[str]:
        """The modules that make up the layers, which are called: the layers, or the elements of
        lists that a loop calls.
        """
        pairs = zip(self.roots, self.kinds, strict=True)
        return [f"{root}.{part}".strip(".") for root, kind in pairs for part in kind.parts]


@dataclass
class ModelStructure:
    """A model's stacks, and its sample forward.

    `untraced`: layers that could not be traced, and why. `shared`: groups of names that are one
    module. `flows`: of embedded tokens, on demand.
    """

    model: nn.Module
    mode: FakeTensorMode
    seen: SampleForward
    stacks: list[Stack]
    untraced: dict[str, str] = field(default_factory=dict[str, str])
    shared: tuple[tuple[str, ...], ...] = ()
    flows: dict[str, TokenFlow] = field(default_factory=dict[str, TokenFlow])

    @cached_property
    def repeated_blocks(self) -> frozenset[str]:
        """The blocks that the model repeats, whether they are layers or not."""
        return frozenset(repeated_blocks(self.model))

    @cached_property
    def outside_layers(self) -> list[str]:
        """The called modules that are no layer and in none; read once the stacks are final."""
        layers = {name for stack in self.stacks for name in stack.modules}
        return [name for name in calls_outside(layers, self.seen) if name not in layers]


def analyze_structure(model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode) -> ModelStructure:
    """Finds and traces the layers of a skeleton (a model of fake tensors).

    Where nothing has a residual stream of tokens, the layers are the blocks of convolutions that
    the model repeats.
    """
    blocks = repeated_blocks(model)
    structure = _analyze_structure(model, sample, mode, blocks)
    structure.repeated_blocks = frozenset(blocks)
    return structure


def _analyze_structure(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, repeated: list[str]
) -> ModelStructure:
    structure = _structure_of_layers(model, sample, mode, repeated)
    layers = [name for stack in structure.stacks for name in stack.layers]
    if others := blocks_of_other_stages(model, layers):
        structure = _structure_of_blocks(model, sample, mode, [*structure.seen.candidates, *others], False)[0]
    _add_loops(structure, sample)
    if not structure.stacks and not structure.untraced and (blocks := numbered_blocks(model)):
        numbered = _structure_of_layers(model, sample, mode, blocks)
        structure = numbered if numbered.stacks else structure
    if not structure.stacks and (blocks := convolutional_blocks(model)):
        convolutions = _structure_of_layers(model, sample, mode, blocks, bare=True)
        return convolutions if convolutions.stacks else structure
    attends = structure.seen.token_products.keys() & {Op.ATTENTION, Op.SOFTMAX, Op.MATMUL}
    if attends and not structure.stacks and not structure.untraced:
        structure = _structure_of_attributes(model, sample, mode) or structure
    return structure


def _structure_of_attributes(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode
) -> ModelStructure | None:
    """The structure whose layers are modules of one class in no list: attention and more."""
    for blocks in blocks_by_class(model):
        structure = _structure_of_layers(model, sample, mode, blocks)
        kinds = [{sub.kind for sub in kind.subs} for stack in structure.stacks for kind in stack.kinds]
        if kinds and all("attn" in kind and len(kind) > 1 for kind in kinds):
            return structure
    return None


def _structure_of_layers(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, blocks: list[str], bare: bool = False
) -> ModelStructure:
    """The structure whose layers are some blocks or, where these are stages, what is listed in
    them. `bare`: blocks without sub-layers are layers, too.
    """
    structure, subs = _structure_of_blocks(model, sample, mode, blocks, bare)
    while (finer := refined(blocks, subs, model)) != blocks:
        refinement, subs = _structure_of_blocks(model, sample, mode, finer, bare)
        if not refinement.stacks:
            break
        structure, blocks = refinement, finer
    return structure


def _structure_of_blocks(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, blocks: list[str], bare: bool
) -> tuple[ModelStructure, dict[str, list[SubLayer]]]:
    """One sample forward, each type of block in it traced; and the sub-layers of each block."""
    seen = observe(model, sample, mode, blocks)
    types = _types_of_blocks(model, seen, mode)
    if kinds := kinds_of_one_structure(types, seen.layers):
        seen = observe(model, sample, mode, blocks, kinds=kinds)
        types = _types_of_blocks(model, seen, mode)
    structure = ModelStructure(model, mode, seen, [])
    members: dict[str, list[tuple[str, LayerType]]] = {}
    others: list[str] = []
    lists = ListPaths(model)
    for name, layer_type in types.items():
        if isinstance(layer_type, str):
            structure.untraced[name] = layer_type
            continue
        layer_type.first = layer_type.first or name
        if layer_type.subs or (bare and layer_type.stream is not None):
            members.setdefault(stack_path(model, name, blocks, lists), []).append((name, layer_type))
        else:
            others.append(name)
    for name in others:
        if (reason := reason_of_function(types[name])) is not None:
            structure.untraced[name] = reason
            continue
        neighbours = members.get(stack_path(model, name, blocks, lists), [])
        if any(_parameter_shapes(model, name) == _parameter_shapes(model, other) for other, _ in neighbours):
            structure.untraced[name] = "it has the parameters of its neighbours, but no sum with its input was found"
    layers = {path: [(name, kind, name) for name, kind in pairs] for path, pairs in members.items()}
    structure.stacks = _stacks(layers, seen)
    return structure, {name: [] if isinstance(kind, str) else kind.subs for name, kind in types.items()}


def reason_of_function(layer_type: LayerType | str) -> str | None:
    """Why a block is not traced whose modules an autograd function calls."""
    if isinstance(layer_type, str):
        return None
    for node in layer_type.traced.graph.nodes:
        if node.target is autograd_function and any(one.op == "get_attr" for one in node.all_input_nodes):
            function: Any = node.kwargs["function"]
            line = line_of(node.meta["stack"])
            at = "" if line is None else f", at {line}"
            return f"`{function.__name__}`, an autograd function, calls its modules{at}"
    return None


def _types_of_blocks(model: nn.Module, seen: SampleForward, mode: FakeTensorMode) -> dict[str, LayerType | str]:
    """The type of each block. Blocks of one key share a trace where they have equal values of the
    attributes that decide in it.
    """
    traced: dict[str, list[LayerType | str]] = {}
    arguments_of: dict[str, dict[str, Any]] = {}
    types: dict[str, LayerType | str] = {}
    for name, (key, arguments) in seen.layers.items():
        block, known = submodule(model, name), traced.setdefault(key, [])
        arguments_of.setdefault(key, arguments)  # of the first block; the others have none
        if (kind := equal_type(known, block)) is None:
            calls = seen.calls.items()
            several = [relative_name(n, name) for n, c in calls if c.output_path and n.startswith(f"{name}.")]
            kind = trace_layer(block, arguments_of[key], mode, several=several)
            known.append(kind)
        types[name] = kind
    return types


def _parameter_shapes(model: nn.Module, layer: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in outline_module(model, layer).named_parameters()}


_Layer = tuple[str, LayerType, str]  # name, type, root


def _stacks(members: Mapping[str, Sequence[_Layer]], seen: SampleForward) -> list[Stack]:
    """Stacks as they run. Lists that differ in a number alone (the stages of a pyramid) are one, of
    the path before the number; where others have it, too, of all of the path but numbers.
    """
    stages: dict[str, list[str]] = {}
    for path in members:
        stages.setdefault(without_numbers(path), []).append(path)
    starts = Counter(pattern.partition(".*")[0] for pattern in stages)
    stacks: list[Stack] = []
    for pattern, paths in stages.items():
        paths.sort(key=_numbers)
        layers = [layer for path in paths for layer in sorted(members[path], key=lambda item: _numbers(item[0]))]
        start = pattern.partition(".*")[0]
        path = paths[0] if len(paths) == 1 else start if starts[start] == 1 else pattern.replace(".*", "")
        names, kinds, roots = map(list, zip(*layers, strict=True))
        stacks.append(Stack("", path, names, kinds, roots))
    return sorted(stacks, key=lambda stack: first_call(stack.modules, seen))


def first_call(modules: Collection[str], seen: SampleForward) -> int:
    """When the first of some modules, or of those in them, is called."""
    modules = {*modules}
    return next((i for i, name in enumerate(seen.calls) if _is_inside(name, modules)), -1)


def last_call(modules: Collection[str], seen: SampleForward) -> int:
    """When the last of some modules, or of those in them, is first called."""
    modules, calls = {*modules}, list(enumerate(seen.calls))
    return next((i for i, name in reversed(calls) if _is_inside(name, modules)), -1)


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module is one of some modules, or in one."""
    return name in modules or "" in modules or any(parent in modules for parent in _parents(name))


def _numbers(name: str) -> list[int]:
    """The numbers in a dotted name, for its place among others that differ in them."""
    return [int(part) for part in name.split(".") if part.isdigit()]


def _add_loops(structure: ModelStructure, sample: Mapping[str, Any] | None) -> None:
    """Adds the layers that are bodies of loops, in place of the layers around them or in them."""
    model, seen, mode = structure.model, structure.seen, structure.mode
    layers = {n: k for s in structure.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
    stages = _layers_around_loops(layers, structure)
    others = {name: kind.subs for name, kind in layers.items() if name not in stages}
    outside = calls_outside(others, seen)
    loops = [loop for loop in find_loops(model, seen, outside) if may_hold_layers(loop, model, others)]
    if not loops and not layers and not structure.untraced and seen.token_products:
        loops = [loop for loop in attribute_loops(model, seen) if may_hold_layers(loop, model, others)]
    if not loops:
        return
    arguments = observe(model, sample, mode, seen.candidates, {loop.caller for loop in loops}).arguments
    types = LoopTypes(model, mode, seen, arguments)
    members: dict[str, list[_Layer]] = {}
    accepted: list[Loop] = []
    refused: list[Loop] = []  # in stages, which are no layers in their place
    for loop in loops:
        if loop.caller not in arguments or any(loop.holds(inner.caller) for inner in (*accepted, *refused)):
            continue
        kind = types.of([loop])
        if (reason := types.interruption(loop, [loop])) is not None:
            kind = reason
            refused += [loop] if loop.caller in stages else []
        if isinstance(kind, str):
            is_named = (loop.caller not in stages or loop in refused) and not leaves_stream(loop, seen)
            structure.untraced |= {loop.place(body): kind for body in loop.bodies if is_named}
        elif len(kind.subs) > 1 and not is_stage(loop, model, kind.subs):
            accepted.append(loop)
    for loop in accepted:
        # Loops of one module are in one graph, since one edit may be in several of them.
        # Seen in: Perceiver AR
        beside = [other for other in accepted if other.caller == loop.caller]
        kind = types.interruption(loop, beside) or types.of(beside)
        if isinstance(kind, str):
            structure.untraced |= {loop.place(body): kind for body in loop.bodies}
            continue
        kind.first = loop.caller
        names = [loop.place(body) for body in loop.bodies]
        members[loop.lists[0]] = [
            (name, part, loop.caller)
            for name, part in zip(names, _bodies(kind, loop.bodies_in_caller()), strict=True)
            if part.subs
        ]
    around = {name for name in layers for loop in (*accepted, *refused) if contains_name(name, loop.caller)}
    replaced = around | {name for name in layers for loop in accepted if loop.holds(name)}
    for stack in structure.stacks:
        pairs = zip(stack.layers, stack.kinds, strict=True)
        if remaining := [(name, kind, name) for name, kind in pairs if name not in replaced]:
            path = stack_path(model, remaining[0][0], seen.candidates, ListPaths(model))
            members.setdefault(path, []).extend(remaining)
    structure.stacks = _stacks(members, seen)


def calls_outside(layers: Collection[str], seen: SampleForward) -> list[str]:
    """The called modules that are in no layer."""
    outside: list[str] = []
    start = "."  # of modules in the layer of the last one: mostly those of a layer follow each other
    for name in seen.calls:
        if not name.startswith(start):
            layer = next((prefix for prefix in _parents(name) if prefix in layers), "")
            start = f"{layer}."
            outside += [] if layer else [name]
    return outside


def _bodies(kind: LayerType, bodies: Sequence[tuple[str, ...]]) -> Iterator[LayerType]:
    """The type of each iteration of a loop: its part of the graph."""
    groups = sub_layers_by_body(bodies, kind.subs, kind.layer)
    for body, members in zip(bodies, groups, strict=True):
        subs = [own_part(sub, body, bodies, kind.layer) for sub in members]
        if norms := first_norms(body, subs, [s for other in groups if other is not members for s in other], kind.layer):
            subs[0] = replace(subs[0], norms=[*norms, *subs[0].norms])
        untraced = [part for part in kind.untraced if any(contains_name(name, part.module) for name in body)]
        stream = subs[0].res if subs else kind.stream
        first = f"{kind.first}.{body[0]}".lstrip(".")
        yield replace(kind, subs=subs, untraced=untraced, stream=stream, first=first, parts=body)


def _layers_around_loops(layers: Mapping[str, LayerType], structure: ModelStructure) -> set[str]:
    """The layers whose sub-layers are those of loops in them, whose bodies are the true layers."""
    first = {kind.key: name for name, kind in reversed(list(layers.items()))}
    stages = set[str]()
    for key, name in first.items():
        kind = layers[name]
        start = f"{name}." if name else ""
        calls = [call for call in structure.seen.calls if call != name and call.startswith(start)]
        lacks = any(part.reason == NOT_ADDED for part in kind.untraced)  # another stream may have it
        loops = find_loops(structure.model, structure.seen, calls) if len(kind.subs) > 1 or lacks else []
        bodies = [[relative_name(part, name) for part in body] for loop in loops for body in loop.bodies]
        groups = sub_layers_by_body(bodies, kind.subs, kind.layer)
        weights = [{weights_of(sub, kind.layer) for sub in group} for group in groups]
        several = max(map(len, weights), default=0) > 1 or len({sub.kind for sub in kind.subs}) == 1
        if several and set().union(*weights) == {weights_of(sub, kind.layer) for sub in kind.subs}:
            stages.add(key)
    return {name for name, kind in layers.items() if kind.key in stages}


def _parents(name: str) -> Iterator[str]:
    """The dotted names of the modules around one."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))


def relative_name(name: str, module: str) -> str:
    """A dotted name relative to a module that contains it."""
    return name[len(module) + 1 :] if module else name
