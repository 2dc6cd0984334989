"""Layers by type: one traced graph for all layers of one structure."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.utils.parametrize import is_parametrized

from peftc.dataflow.features import features_dim
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import first_input, is_tensor, shape
from peftc.dataflow.operations import is_norm_by_name
from peftc.dataflow.values import mark_operands
from peftc.diagnostics.model_line import model_line
from peftc.fakes.tensors import fake_copy
from peftc.observation.sample_forward import SampleForward, observe
from peftc.observation.token_flow import TokenFlow
from peftc.recognition.layer_candidates import containing_list, convolutional_blocks, refined, repeated_blocks
from peftc.recognition.loops import (
    Loop,
    contains_name,
    find_loops,
    may_hold_layers,
    stream_starts,
    sub_layers_by_body,
)
from peftc.recognition.moe.experts import find_experts
from peftc.recognition.residual_stream import stream_input
from peftc.recognition.roles import SubLayer, sub_layers
from peftc.recognition.token_mixing import is_weighted
from peftc.recognition.untraced import UntracedPart, opaque_modules, untraced_parts
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.region_trace import NoneAccess, RegionTrace, TraceError, UnknownLength
from peftc.tracing.tracer import RegionTracer

WHOLE = (("",),)  # in place of a loop's bodies: all of a layer


@dataclass
class LayerType:
    """All layers of one structure. `root` is one of them; names are relative to it.

    Of a layer that is the body of a loop, `root` is the module whose code has the loop, and
    `stream` what the layer reads.
    """

    name: str
    root: nn.Module
    traced: RegionTrace
    subs: list[SubLayer]
    arguments: dict[str, Any]
    untraced: list[UntracedPart]
    stream: fx.Node | None  # the residual stream before the sub-layers
    first: str = ""  # the dotted name of the first layer of the type
    parts: tuple[str, ...] = ("",)  # the modules of the layer

    @property
    def key(self) -> str:
        """Identifies the type, in sites."""
        return f"{self.name}@{self.first}"

    @property
    def is_module(self) -> bool:
        """Whether the layer is a module, and no body of a loop."""
        return self.parts == ("",)

    @cached_property
    def layer(self) -> LayerGraph:
        return LayerGraph(self.traced.graph, self.root)

    def calls(self, module: str) -> bool:
        """Whether the graph calls a module, or reads its parameters."""
        readers = (str(n.target).rpartition(".")[0] for n in self.traced.graph.nodes if n.op == "get_attr")
        return not module or any(call.name == module for call in self.traced.calls) or module in readers


@dataclass
class Stack:
    """A list of layers. `name` stands before `layer` in the paths of its sites: `text.decoder`.

    A layer that is the body of a loop has the name of the smallest module around it.
    """

    name: str
    path: str  # of the list that holds the layers
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


def analyze_structure(model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode) -> ModelStructure:
    """Finds and traces the layers of a skeleton (a model of fake tensors).

    Where nothing has a residual stream of tokens, the layers are the blocks of convolutions that
    the model repeats.
    """
    structure = _structure_of_layers(model, sample, mode, repeated_blocks(model))
    _add_loops(structure, sample)
    if not structure.stacks and (blocks := convolutional_blocks(model)):
        convolutions = _structure_of_layers(model, sample, mode, blocks, bare=True)
        return convolutions if convolutions.stacks else structure
    return structure


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
    structure = ModelStructure(model, mode, seen, [])
    types: dict[str, LayerType | str] = {}
    members: dict[str, list[tuple[str, LayerType]]] = {}
    others: list[str] = []
    for name, (key, arguments) in seen.layers.items():
        if key not in types:
            types[key] = trace_layer(model.get_submodule(name), arguments, mode)
        layer_type = types[key]
        if isinstance(layer_type, str):
            structure.untraced[name] = layer_type
            continue
        layer_type.first = layer_type.first or name
        if layer_type.subs or (bare and layer_type.stream is not None):
            members.setdefault(containing_list(model, name), []).append((name, layer_type))
        else:
            others.append(name)
    for name in others:
        neighbours = members.get(containing_list(model, name), [])
        if any(_parameter_shapes(model, name) == _parameter_shapes(model, other) for other, _ in neighbours):
            structure.untraced[name] = "it has the parameters of its neighbours, but no sum with its input was found"
    layers = {path: [(name, kind, name) for name, kind in pairs] for path, pairs in members.items()}
    structure.stacks = _stacks(layers, seen)
    subs = {name: types[key] for name, (key, _) in seen.layers.items()}
    return structure, {name: [] if isinstance(kind, str) else kind.subs for name, kind in subs.items()}


def _parameter_shapes(model: nn.Module, layer: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.get_submodule(layer).named_parameters()}


_Layer = tuple[str, LayerType, str]  # name, type, root


def _stacks(members: Mapping[str, Sequence[_Layer]], seen: SampleForward) -> list[Stack]:
    """Stacks as they run. Lists that differ in a number alone (the stages of a pyramid) are one."""
    stages: dict[str, list[str]] = {}
    for path in members:
        stages.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), []).append(path)
    stacks: list[Stack] = []
    for pattern, paths in stages.items():
        paths.sort(key=_numbers)
        layers = [layer for path in paths for layer in sorted(members[path], key=lambda item: _numbers(item[0]))]
        path = paths[0] if len(paths) == 1 else pattern.partition(".*")[0]
        names, kinds, roots = map(list, zip(*layers, strict=True))
        stacks.append(Stack("", path, names, kinds, roots))
    return sorted(stacks, key=lambda stack: first_call(stack.modules, seen))


def first_call(modules: Collection[str], seen: SampleForward) -> int:
    """When the first of some modules, or of those in them, is called."""
    return next((i for i, name in enumerate(seen.calls) if any(contains_name(m, name) for m in modules)), -1)


def last_call(modules: Collection[str], seen: SampleForward) -> int:
    """When the last of some modules, or of those in them, is first called."""
    calls = list(enumerate(seen.calls))
    return next((i for i, name in reversed(calls) if any(contains_name(m, name) for m in modules)), -1)


def _numbers(name: str) -> list[int]:
    """The numbers in a dotted name, for its place among others that differ in them."""
    return [int(part) for part in name.split(".") if part.isdigit()]


def trace_layer(
    layer: nn.Module, arguments: dict[str, Any], mode: FakeTensorMode, bodies: Sequence[Sequence[str]] = WHOLE
) -> LayerType | str:
    """Traces a layer with all children inlined that have children, that route, or that alone make a
    sub-layer; one that cannot be traced stays a leaf. Where not even the layer's own code can be
    traced, the reason. `bodies`: where `layer` has a loop, the modules that each iteration calls;
    others stay leaves.
    """
    leaves: dict[str, str] = {}
    inlined: set[str] = set()
    tried: set[str] = set()  # leaves that may have missing roles; they stay leaves where they cannot be traced
    nones: set[Any] = set()

    def in_loop(name: str) -> bool:
        return any(contains_name(part, name) for body in bodies for part in body)

    def inline(name: str) -> bool:
        return name not in leaves and in_loop(name) and (name in inlined or has_parts(layer, name))

    while True:
        tracer = RegionTracer(inline)
        tracer.optional_results |= nones
        try:
            with mode:
                traced = tracer.trace_region(layer, fake_copy(arguments, mode))
        except Exception as error:
            if isinstance(error, NoneAccess) and error.origin not in nones:
                nones.add(error.origin)
                continue
            callers = [error.caller] if isinstance(error, UnknownLength) and error.caller else []
            frames = [frame for frame in (*tracer.call_stack, *callers) if frame not in leaves]
            if not frames:
                return _reason(error)
            if frames[-1] in inlined & tried:
                inlined.discard(frames[-1])
                continue
            leaves[frames[-1]] = _reason(error)
            continue
        if not (more := set(filter(in_loop, _routing_leaves(traced, layer))) - inlined):
            layer_type = _layer_type(layer, traced, arguments, leaves, mode, bodies)
            if not (more := set(_sole_leaves(layer_type)) - inlined - leaves.keys()):
                more = {*_leaves_with_roles(layer_type), *_gating_leaves(layer_type)} - inlined - leaves.keys() - tried
                tried |= more
            if not more:
                return layer_type
        inlined.update(more)


def _layer_type(
    root: nn.Module,
    traced: RegionTrace,
    arguments: dict[str, Any],
    reasons: dict[str, str],
    mode: FakeTensorMode,
    bodies: Sequence[Sequence[str]],
) -> LayerType:
    """The sub-layers of a traced layer. `reasons`: why modules in it could not be traced."""
    mark_operands(traced, root, mode)
    layer = LayerGraph(traced.graph, root)
    opaque = opaque_modules(layer, reasons, mode)
    if bodies == WHOLE:
        stream, subs = stream_input(traced.graph), sub_layers(layer, opaque)
    else:
        starts = stream_starts(bodies, traced, layer)
        streams = [(start, _sub_layers_in(bodies, sub_layers(layer, opaque, start), layer)) for start in starts]
        stream, subs = max(streams, key=lambda item: len(item[1]), default=(None, []))
    with_experts = find_experts(traced, subs, layer, mode)
    opaque = {name: attends for name, attends in opaque.items() if name not in with_experts}
    parts = untraced_parts(layer, subs, reasons, opaque, stream)
    return LayerType(type(root).__name__, root, traced, subs, arguments, parts, stream)


def _sub_layers_in(bodies: Sequence[Sequence[str]], subs: list[SubLayer], layer: LayerGraph) -> list[SubLayer]:
    return [sub for group in sub_layers_by_body(bodies, subs, layer) for sub in group]


def _routing_leaves(traced: RegionTrace, layer: nn.Module) -> set[str]:
    """The leaves with a matrix of their own that return more than a tensor: experts, weights."""
    # Seen in: Phi MoE, Qwen2 MoE, GLM-4 MoE Lite
    leaves = {str(n.target) for n in traced.graph.nodes if n.op == "call_module" and not is_tensor(n)}
    return {name for name in leaves if any(p.ndim == 2 for p in layer.get_submodule(name).parameters(recurse=False))}


def _sole_leaves(layer_type: LayerType) -> Iterator[str]:
    """The leaves with code of their own that alone make a sub-layer: their code tells which."""
    # Seen in: no transformers model, but modules of users that attend with bare parameters
    layer = layer_type.layer
    for sub in layer_type.subs:
        if sub.kind in ("ffn", "mixer") and not sub.experts and sub.router is None:
            weighted = [n for n in sub.body if is_weighted(n, layer) and not layer.is_norm(n)]
            if weighted and all(_has_own_code(layer.module(n)) and not layer.is_linear(n) for n in weighted):
                yield from (str(n.target) for n in weighted)


def _leaves_with_roles(layer_type: LayerType) -> Iterator[str]:
    """The leaves with weights and code of their own in sub-layers that lack roles."""
    # Seen in: no transformers model, but Linears of users over several dimensions
    layer = layer_type.layer
    for sub in layer_type.subs:
        roles = {"attn": ("q", "k", "v", "o"), "ffn": ("down",)}.get(sub.kind, ())
        if any(role not in sub.projections for role in roles) and not sub.experts and sub.router is None:
            leaves = (n for n in sub.body if is_weighted(n, layer) and not layer.is_norm(n) and not layer.is_linear(n))
            yield from (str(n.target) for n in leaves if _has_own_code(layer.module(n)))


def _gating_leaves(layer_type: LayerType) -> Iterator[str]:
    """The leaves without weights that change the number of features."""
    # Seen in: no transformers model, but modules like `GEGLU`
    for node in layer_type.traced.graph.nodes:
        module, source = layer_type.layer.module(node), first_input(node)
        is_plain = module is not None and _has_own_code(module) and not module.state_dict() and is_tensor(source)
        if is_plain and len(shape(source)) == len(shape(node)) and shape(source)[-1] != shape(node)[-1]:
            yield str(node.target)


def _has_own_code(module: nn.Module | None) -> bool:
    """Whether a module is neither one of PyTorch's, nor derived from one."""
    return next((c for c in type(module).__mro__ if c.__module__.startswith("torch.")), None) is nn.Module


def has_parts(root: nn.Module, name: str) -> bool:
    module = root.get_submodule(name)
    own = [n for n, _ in module.named_children() if n != "parametrizations" or not is_parametrized(module)]
    return bool(own) or is_weighted_sum(module)


def is_weighted_sum(module: nn.Module) -> bool:
    """Whether a module adds several tensors, each times and plus a parameter of its own."""
    # Seen in: Mistral Large 4, Muse Spark, ZAYA
    parameters = list(forward_signature(module).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty]
    plain = len(required) > 1 and not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required)
    return plain and {p.ndim for p in module.parameters()} == {1} and not is_norm_by_name(module)


def _reason(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    place = model_line(error)
    at = "" if place is None else f", at {place}"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"its code depends on the values of tensors ({line}){at}"
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return f"{line}{at}" if line and isinstance(error, TraceError) else f"{text}{at}"


def example_width(layer_type: LayerType) -> int:
    """The width of the residual stream."""
    stream = layer_type.subs[0].res if layer_type.subs else layer_type.stream
    assert stream is not None
    return shape(stream)[features_dim(stream, layer_type.layer)]


def _add_loops(structure: ModelStructure, sample: Mapping[str, Any] | None) -> None:
    """Adds the layers that are bodies of loops, in place of the layers around them or in them."""
    model, seen, mode = structure.model, structure.seen, structure.mode
    layers = {n: k for s in structure.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
    stages = _layers_around_loops(layers, structure)
    others = {name: kind.subs for name, kind in layers.items() if name not in stages}
    outside = [name for name in seen.calls if not any(prefix in others for prefix in _parents(name))]
    loops = [loop for loop in find_loops(model, seen, outside) if may_hold_layers(loop, model, others)]
    if not loops:
        return
    arguments = observe(model, sample, mode, seen.candidates, {loop.caller for loop in loops}).arguments
    types: dict[object, LayerType | str] = {}
    members: dict[str, list[_Layer]] = {}
    accepted: list[Loop] = []
    for loop in loops:
        if loop.caller not in arguments or any(loop.holds(inner.caller) for inner in accepted):
            continue
        key, values = arguments[loop.caller]
        bodies = tuple(tuple(relative_name(part, loop.caller) for part in body) for body in loop.bodies)
        if (key, bodies) not in types:
            types[key, bodies] = trace_layer(model.get_submodule(loop.caller), values, mode, bodies)
        kind = types[key, bodies]
        if isinstance(kind, str):
            structure.untraced |= {loop.place(body): kind for body in loop.bodies if loop.caller not in stages}
        elif len(kind.subs) > 1:
            kind.first = loop.caller
            accepted.append(loop)
            names = [loop.place(body) for body in loop.bodies]
            members[loop.lists[0]] = [
                (name, part, loop.caller) for name, part in zip(names, _bodies(kind, bodies), strict=True) if part.subs
            ]
    replaced = {name for name in layers for loop in accepted if loop.holds(name) or contains_name(name, loop.caller)}
    for stack in structure.stacks:
        pairs = zip(stack.layers, stack.kinds, strict=True)
        if remaining := [(name, kind, name) for name, kind in pairs if name not in replaced]:
            members.setdefault(containing_list(model, remaining[0][0]), []).extend(remaining)
    structure.stacks = _stacks(members, seen)


def _bodies(kind: LayerType, bodies: Sequence[tuple[str, ...]]) -> Iterator[LayerType]:
    """The type of each iteration of a loop: its part of the graph."""
    groups = sub_layers_by_body(bodies, kind.subs, kind.layer)
    for body, subs in zip(bodies, groups, strict=True):
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
        calls = [call for call in structure.seen.calls if contains_name(name, call)]
        loops = find_loops(structure.model, structure.seen, calls) if len(kind.subs) > 1 else []
        bodies = [[relative_name(part, name) for part in body] for loop in loops for body in loop.bodies]
        groups = sub_layers_by_body(bodies, kind.subs, kind.layer)
        several = max(map(len, groups), default=0) > 1 or len({sub.kind for sub in kind.subs}) == 1
        if several and sum(map(len, groups)) == len(kind.subs):
            stages.add(key)
    return {name for name, kind in layers.items() if kind.key in stages}


def _parents(name: str) -> Iterator[str]:
    """The dotted names of the modules around one."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))


def relative_name(name: str, module: str) -> str:
    """A dotted name relative to a module that contains it."""
    return name[len(module) + 1 :] if module else name
