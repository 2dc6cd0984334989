"""Layers, gathered into kinds: one traced graph for all layers of one structure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from peftc.fakes.tensors import fake_copy
from peftc.observation.layer_candidates import containing_list, repeated_blocks
from peftc.observation.recorder import observe
from peftc.observation.sample_forward import SampleForward
from peftc.observation.token_flow import TokenFlow
from peftc.recognition.graph import nodes
from peftc.recognition.graph.feature_axis import features_dim
from peftc.recognition.graph.leaf_operands import mark_operands
from peftc.recognition.moe.experts import find_experts
from peftc.recognition.residual_stream import stream_input
from peftc.recognition.roles import SubLayer, sub_layers
from peftc.recognition.stages import convolutional_blocks, refined
from peftc.recognition.token_mixing import weighted
from peftc.recognition.untraced import UntracedPart, opaque_modules, unread_parts
from peftc.tracing.context_managers import NoneAccess, TraceError
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.ragged_loops import UnknownLength
from peftc.tracing.tracer import RegionTrace, RegionTracer


@dataclass
class LayerType:
    """All layers of one structure. `root` is one of them; names in `traced` and `subs` are relative to it."""

    name: str
    root: nn.Module
    traced: RegionTrace
    subs: list[SubLayer]
    arguments: dict[str, Any] = field(repr=False)
    opaque: dict[str, str] = field(default_factory=dict[str, str])  # modules in it that could not be entered, and why
    unread: list[UntracedPart] = field(
        default_factory=list[UntracedPart]
    )  # those of them that have no sites although they matter
    states: dict[object, Any] = field(
        default_factory=dict[object, Any], repr=False
    )  # of attentions, the same in all layers

    def calls(self, module: str) -> bool:
        """Whether a module's call is seen in the graph, or that its parameters are read by other code."""
        reads = (str(n.target).rpartition(".")[0] for n in self.traced.graph.nodes if n.op == "get_attr")
        return not module or any(call.name == module for call in self.traced.calls) or module in reads


@dataclass
class Stack:
    """A list of layers. `name`: the steps that stand before `layer` in the paths of its sites, e.g. `text.decoder`."""

    name: str
    path: str  # of the list that holds the layers
    layers: list[str]  # dotted names, in order
    kinds: list[LayerType]  # of each layer


@dataclass
class ModelStructure:
    """A model's stacks, and what the sample forward showed. `shared`: groups of dotted names that are one module."""

    model: nn.Module
    mode: FakeTensorMode
    seen: SampleForward
    stacks: list[Stack]
    untraced: dict[str, str] = field(default_factory=dict[str, str])  # layers that could not be traced, and why
    shared: tuple[tuple[str, ...], ...] = ()
    flows: dict[str, TokenFlow] = field(
        default_factory=dict[str, TokenFlow]
    )  # of the tokens of embeddings, where asked for


def analyze_structure(model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode) -> ModelStructure:
    """Finds and traces the layers of a skeleton (a model of fake tensors).

    Where nothing has a residual stream of tokens, the layers are the blocks of convolutions that the model repeats.
    """
    anatomy = dissected(model, sample, mode, repeated_blocks(model))
    if not anatomy.stacks and (blocks := convolutional_blocks(model)):
        maps = dissected(model, sample, mode, blocks, bare=True)
        return maps if maps.stacks else anatomy
    return anatomy


def dissected(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, blocks: list[str], bare: bool = False
) -> ModelStructure:
    """The anatomy whose layers are some blocks or, where these are stages, what is listed in them.

    `bare`: blocks without sub-layers are layers, too.
    """
    anatomy, subs = taken_apart(model, sample, mode, blocks, bare)
    while (finer := refined(blocks, subs, model)) != blocks:
        more, subs = taken_apart(model, sample, mode, finer, bare)
        if not more.stacks:
            break
        anatomy, blocks = more, finer
    return anatomy


def taken_apart(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, blocks: list[str], bare: bool
) -> tuple[ModelStructure, dict[str, list[SubLayer]]]:
    """One sample forward, each kind of block in it traced; and the sub-layers of each block."""
    seen = observe(model, sample, mode, blocks)
    anatomy = ModelStructure(model, mode, seen, [])
    kinds: dict[str, LayerType | str] = {}
    members: dict[str, list[tuple[str, LayerType]]] = {}
    for name, (key, arguments) in seen.layers.items():
        if key not in kinds:
            kinds[key] = trace_layer(model.get_submodule(name), arguments, mode)
        kind = kinds[key]
        if isinstance(kind, str):
            anatomy.untraced[name] = kind
        elif kind.subs or (bare and stream_input(kind.traced.graph) is not None):
            members.setdefault(containing_list(model, name), []).append((name, kind))
    for path, layers in members.items():
        shapes = {parameter_shapes(model.get_submodule(name)) for name, _ in layers}
        for name, (key, _) in seen.layers.items():
            missing = not isinstance(kinds[key], str) and not any(name == layer for layer, _ in layers)
            if (
                missing
                and containing_list(model, name) == path
                and parameter_shapes(model.get_submodule(name)) in shapes
            ):
                anatomy.untraced[name] = "it has the parameters of its neighbours, but no sum with its input was found"
    anatomy.stacks = gathered(members, {name: i for i, name in enumerate(seen.calls)})
    found = {name: kinds[key] for name, (key, _) in seen.layers.items()}
    return anatomy, {name: [] if isinstance(kind, str) else kind.subs for name, kind in found.items()}


def parameter_shapes(module: nn.Module) -> frozenset[tuple[str, tuple[int, ...]]]:
    return frozenset((name, tuple(p.shape)) for name, p in module.named_parameters())


def gathered(members: Mapping[str, list[tuple[str, LayerType]]], order: Mapping[str, int]) -> list[Stack]:
    """Stacks in the order in which they run. Lists that differ in a number alone (the stages of a pyramid) are one."""
    stages: dict[str, list[str]] = {}
    for path in members:
        stages.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), []).append(path)
    found: list[Stack] = []
    for pattern, paths in stages.items():
        paths.sort(key=numbers)
        layers = [layer for path in paths for layer in sorted(members[path], key=lambda item: numbers(item[0]))]
        path = paths[0] if len(paths) == 1 else pattern.partition(".*")[0]
        found.append(Stack("", path, [n for n, _ in layers], [k for _, k in layers]))
    return sorted(found, key=lambda stack: order[stack.layers[0]])


def numbers(name: str) -> list[int]:
    """The numbers in a dotted name, for its place among others that differ in them."""
    return [int(part) for part in name.split(".") if part.isdigit()]


def trace_layer(layer: nn.Module, arguments: dict[str, Any], mode: FakeTensorMode) -> LayerType | str:
    """Traces a layer with all children inlined that have children, that route, or that alone make a sub-layer; one that cannot
    be entered stays a leaf.

    Returns: the reason, where not even the layer's own code can be followed.
    """
    leaves: dict[str, str] = {}
    routes: set[str] = set()
    nones: set[Any] = set()
    while True:
        tracer = RegionTracer(partial(entered, layer, leaves, routes))
        tracer.optional_results |= nones
        try:
            with mode:
                traced = tracer.trace_region(layer, fake_copy(arguments, mode))
        except Exception as error:
            if isinstance(error, NoneAccess) and error.origin not in nones:
                nones.add(error.origin)
                continue
            asking = [error.caller] if isinstance(error, UnknownLength) and error.caller else []
            inside = [f for f in [*tracer.call_stack, *asking] if f not in leaves]
            if not inside:
                return reason(error)
            leaves[inside[-1]] = reason(error)
            continue
        if more := routing(traced, layer) - routes:
            routes |= more
            continue
        kind = layer_kind(layer, traced, arguments, leaves, mode)
        if more := set(closed(kind)) - routes - leaves.keys():
            routes |= more
            continue
        return kind


def layer_kind(
    layer: nn.Module, traced: RegionTrace, arguments: dict[str, Any], reasons: dict[str, str], mode: FakeTensorMode
) -> LayerType:
    """The sub-layers of a traced layer. `reasons`: why modules in it could not be entered."""
    mark_operands(traced, layer, mode)
    opaque = opaque_modules(traced, reasons, layer, mode)
    subs = sub_layers(traced.graph, layer, opaque)
    read = find_experts(traced, subs, layer, mode)
    opaque = {name: attends for name, attends in opaque.items() if name not in read}
    unread = unread_parts(traced, subs, reasons, opaque, layer)
    return LayerType(type(layer).__name__, layer, traced, subs, arguments, reasons, unread)


def entered(layer: nn.Module, leaves: Collection[str], routes: Collection[str], child: str) -> bool:
    return child not in leaves and (child in routes or has_children(layer, child))


def routing(traced: RegionTrace, layer: nn.Module) -> set[str]:
    """The leaves that multiply by a matrix of their own and return more than the product: an expert's number, a weight."""
    calls = [n for n in traced.graph.nodes if n.op == "call_module" and not nodes.is_tensor(n)]
    return {
        str(n.target) for n in calls if any(p.ndim == 2 for p in own_parameters(layer.get_submodule(str(n.target))))
    }


def closed(kind: LayerType) -> Iterator[str]:
    """The leaves with code and matrices of their own that alone make a sub-layer: only their code tells what it is."""
    for sub in kind.subs:
        if sub.kind in ("ffn", "mixer") and not sub.experts and sub.router is None:
            inside = [n for n in sub.body if weighted(n, kind.root) and not nodes.is_norm(n, kind.root)]
            if inside and all(n.op == "call_module" and has_own_code(n, kind.root) for n in inside):
                yield from (str(n.target) for n in inside)


def has_own_code(node: fx.Node, root: nn.Module) -> bool:
    """Whether a module is none of torch's own, nor derived from one, nor a Linear under another name."""
    module = root.get_submodule(str(node.target))
    known = next(c for c in type(module).__mro__ if c.__module__.startswith("torch."))
    return known is nn.Module and not nodes.is_linear(node, root)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def has_children(root: nn.Module, name: str) -> bool:
    module = root.get_submodule(name)
    return next(module.children(), None) is not None or joins(module)


def joins(module: nn.Module) -> bool:
    """Whether a module is a sum in disguise: of several tensors, each times and plus a parameter of its own."""
    given = list(forward_signature(module).parameters.values())[1:]
    needed = [p for p in given if p.default is p.empty]
    plain = len(needed) > 1 and not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed)
    return plain and {p.ndim for p in module.parameters()} == {1} and not nodes.is_norm_named(module)


def reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"its code depends on the values of tensors ({text[0]})"
    return text[0] if text and isinstance(error, TraceError) else f"{type(error).__name__}: {text[0] if text else ''}"


def example_width(kind: LayerType) -> int:
    """Width of the residual stream."""
    stream = kind.subs[0].res if kind.subs else stream_input(kind.traced.graph)
    assert stream is not None
    return nodes.shape(stream)[features_dim(stream, kind.root)]
