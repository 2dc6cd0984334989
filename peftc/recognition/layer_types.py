"""Types of layers: one traced graph for all layers of one structure."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.utils.parametrize import is_parametrized

from peftc.dataflow.feature_axis import features_dim
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.linear_code import has_own_forward
from peftc.dataflow.nodes import example, first_input, is_tensor, shape
from peftc.dataflow.operations import is_norm_by_name
from peftc.dataflow.values import mark_operands
from peftc.diagnostics.model_line import model_line
from peftc.fakes.tensors import fake_copy
from peftc.modules.lazy_children import attribute_of
from peftc.modules.walk import submodule
from peftc.observation.sample_forward import SampleForward
from peftc.recognition.attention.patterns import reads_scores
from peftc.recognition.loops import Loop, are_interleaved, contains_name, repeated_part, sub_layers_in_loop
from peftc.recognition.moe.experts import find_experts
from peftc.recognition.moe.routers import has_matrix, routing_leaves
from peftc.recognition.residual_stream import gives_states, stream_input
from peftc.recognition.roles import sub_layers
from peftc.recognition.sublayer import SubLayer
from peftc.recognition.token_mixing import has_state, is_weighted, moves_entries
from peftc.recognition.unplaced.untraced import UntracedPart, attending_modules, opaque_modules, untraced_parts
from peftc.tracing.members import are_equal
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.proxy import concrete_values
from peftc.tracing.region_trace import Absent, NoneAccess, RegionTrace, TraceError, UnknownLength
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

    def decides_equally(self, block: nn.Module) -> bool:
        """Whether the attributes that decide in the trace have the same values in another block."""
        for path, value in self.decisions:
            try:
                own = attribute_of(block, path)
            except AttributeError:
                own = Absent
            if own is not value and not are_equal(own, value):
                return False
        return True

    @cached_property
    def decisions(self) -> list[tuple[str, Any]]:
        """The attributes that decide in the trace, by path, with the values that they had."""
        return [(f"{owner}.{name}".lstrip("."), v) for (owner, name), v in self.traced.attribute_guards.items()]

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


def equal_type(types: Iterable[LayerType | str], block: nn.Module) -> LayerType | str | None:
    """The type that a block shares, among those of its structure. What is not traced is of one."""
    return next((kind for kind in types if isinstance(kind, str) or kind.decides_equally(block)), None)


def kinds_of_one_structure(
    types: Mapping[str, LayerType | str], layers: Mapping[str, tuple[str, Any]]
) -> dict[str, int]:
    """A number for each block of a key whose blocks call different modules. Blocks of one number
    call the same: of a key, only the first block has run in the sample forward.

    Args: `layers`: the key of each block, and its arguments.
    """
    if len(set(map(id, types.values()))) == len({key for key, _ in layers.values()}):
        return {}
    kinds: dict[str, dict[Any, int]] = {}
    numbers: dict[str, int] = {}
    for name, (key, _) in layers.items():
        kind = types[name]
        if not isinstance(kind, str):
            known = kinds.setdefault(key, {})
            numbers[name] = known.setdefault(tuple(call.name for call in kind.traced.calls), len(known))
    return {name: number for name, number in numbers.items() if len(kinds[layers[name][0]]) > 1}


class _LayerTracer(RegionTracer):
    """Does not enter modules whose code asks which entries of a tensor are not zero. To find that
    out while their code is entered would cost another trace of the whole layer.
    """

    # Seen in: the experts of Mixtral, Qwen MoE, DeepSeek V3

    def __init__(self, inline: Callable[[str], bool]) -> None:
        super().__init__(inline)
        self.errors: dict[str, Exception] = {}  # of the modules that are not entered

    def enters(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        forward: Any = inspect.unwrap(type(module).forward)
        has_parts = any(True for child in module.children() for _ in child.parameters())
        if not self.inline(name) or has_parts or "nonzero" not in getattr(forward, "__code__", forward).co_names:
            return self.inline(name)
        try:
            with self.pause(), torch.no_grad():
                forward(module, *concrete_values(args), **concrete_values(kwargs))
        except DynamicOutputShapeException as error:
            if error.func is torch.ops.aten.nonzero.default:
                self.errors[name] = error
        except Exception:  # of a model's own code: tracing it tells
            return True
        return name not in self.errors


def trace_layer(
    layer: nn.Module,
    arguments: dict[str, Any],
    mode: FakeTensorMode,
    bodies: Sequence[Sequence[str]] = WHOLE,
    several: Iterable[str] = (),
) -> LayerType | str:
    """Traces a layer with all children inlined that have children, that route, or that alone make a
    sub-layer; one that cannot be traced stays a leaf. Where not even the layer's own code can be
    traced, the reason. `bodies`: where `layer` has a loop, the modules that each iteration calls;
    others stay leaves. `several`: modules in it that returned more than a tensor in the sample
    forward: those that route need no further trace to be found.
    """
    leaves: dict[str, str] = {}
    tried: set[str] = set()  # leaves that may have missing roles; they stay leaves where they cannot be traced
    nones: set[Any] = set()

    def in_loop(name: str) -> bool:
        return any(contains_name(part, name) for body in bodies for part in body)

    inlined = {name for name in several if in_loop(name) and has_matrix(submodule(layer, name))}

    def inline(name: str) -> bool:
        return name not in leaves and in_loop(name) and (name in inlined or has_parts(layer, name))

    while True:
        tracer = _LayerTracer(inline)
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
                if not has_state(submodule(layer, frames[-1])):  # nothing but its code can tell
                    leaves[frames[-1]] = _reason(error)
                continue
            leaves[frames[-1]] = _reason(error)
            continue
        leaves |= {name: _reason(error) for name, error in tracer.errors.items()}
        if not (more := set(filter(in_loop, routing_leaves(traced.graph, layer))) - inlined):
            layer_type = _layer_type(layer, traced, arguments, leaves, mode, bodies)
            if not (more := set(_sole_leaves(layer_type)) - inlined - leaves.keys()):
                leaves_to_try = (_leaves_with_roles, _own_code_leaves, _adding_leaves, _moving_leaves)
                more = set(chain(*(find(layer_type) for find in leaves_to_try))) - inlined - leaves.keys() - tried
                tried |= more
            if not more:
                traced.memory = {}
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
        subs = sub_layers_in_loop(bodies, traced, layer, opaque)
        stream = subs[0].res if subs else None
    with_experts = find_experts(traced, subs, layer, mode, () if bodies == WHOLE else bodies)
    opaque -= with_experts
    attending = attending_modules(opaque, layer, mode)
    parts = untraced_parts(layer, subs, reasons, {name: name in attending for name in opaque}, stream)
    layer_type = LayerType(type(root).__name__, root, traced, subs, arguments, parts, stream)
    layer_type.layer = layer  # which knows its norms and Linears by now
    return layer_type


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
    """The leaves with weights and code of their own in sub-layers that lack roles. One of a mixer
    may attend, if it has several matrices.
    """
    # Seen in: no transformers model, but Linears of users over several dimensions
    layer = layer_type.layer
    for sub in layer_type.subs:
        roles = {"attn": ("q", "k", "v", "o"), "ffn": ("up", "down"), "mixer": ("q",)}.get(sub.kind, ())
        if any(role not in sub.projections for role in roles) and not sub.experts and sub.router is None:
            leaves = (n for n in sub.body if is_weighted(n, layer) and not layer.is_norm(n) and not layer.is_linear(n))
            least = 2 if sub.kind == "mixer" else 1
            yield from (str(n.target) for n in leaves if _has_own_matrices(layer.module(n), least))


def _own_code_leaves(layer_type: LayerType) -> Iterator[str]:
    """The leaves without matrices whose code says what they are: those without state that change
    the layout, combine several values or read the scores of an attention, and those that scale by a
    vector of several dimensions.
    """
    # Seen in: no transformers model, but modules like `GEGLU`, `Rearrange` and `Attend`, and the
    # softmax with a mask of Megatron
    for node in layer_type.traced.graph.nodes:
        module, source = layer_type.layer.module(node), first_input(node)
        if module is None or not is_tensor(source) or not _has_own_code(module):
            continue
        has_shape, after = shape(source) == shape(node), shape(node)
        several = sum(map(gives_states, node.all_input_nodes)) > 1
        combines = (several or not has_shape or reads_scores(source, layer_type.layer)) and not has_state(module)
        if combines or (has_shape and any(_scales(p.shape, after) for p in module.parameters())):
            yield str(node.target)


def _scales(sizes: Sequence[int], features: tuple[int, ...]) -> bool:
    """Whether a parameter of several dimensions has a number for each of some features."""
    pairs = [*zip(reversed(sizes), reversed(features), strict=False)]
    return sum(size > 1 for size in sizes) > 1 and len(pairs) == len(sizes) and all(s in (1, f) for s, f in pairs)


def _adding_leaves(layer_type: LayerType) -> Iterator[str]:
    """The leaves without matrices that compute one tensor from several of its shape, or several:
    they may add the output of a sub-layer to the stream.
    """
    # Seen in: x-transformers, whose `Residual` is called with both; norms of vLLM, which return
    # the sum beside the norm of it
    for node in layer_type.traced.graph.nodes:
        module = layer_type.layer.module(node)
        if module is None or not _has_own_code(module) or any(p.ndim > 1 for p in module.parameters()):
            continue
        result = example(node)
        sizes = [tuple(t.shape) for t in result if isinstance(t, torch.Tensor)] if isinstance(result, tuple) else []
        is_single = bool(shape(node)) and not layer_type.layer.is_norm(node)
        operands = [shape(n) for n in (*node.args, *node.kwargs.values()) if isinstance(n, fx.Node) and shape(n)]
        adds = is_single and operands.count(shape(node)) > 1
        if adds or (len(sizes) > 1 and len({*sizes, *operands}) == 1):
            yield str(node.target)


def _moving_leaves(layer_type: LayerType) -> Iterator[str]:
    """The leaves that do nothing but move entries: their shapes do not tell where these go."""
    # Seen in: no transformers model, but torchvision's ConvNeXt (`Permute`)
    for node in layer_type.traced.graph.nodes:
        module, source = layer_type.layer.module(node), first_input(node)
        if module is None or not _has_own_code(module) or has_state(module) or len(sizes := shape(source)) < 3:
            continue
        if sorted(sizes) == sorted(shape(node)) and moves_entries(module, sizes):
            yield str(node.target)


def _has_own_code(module: nn.Module | None) -> bool:
    """Whether a module's code is neither one of PyTorch's, nor that of a class of PyTorch's."""
    return module is not None and has_own_forward(module)


def _has_own_matrices(module: nn.Module | None, least: int) -> bool:
    """Whether a module has code of its own, and at least as many matrices."""
    return module is not None and _has_own_code(module) and sum(p.ndim >= 2 for p in module.parameters()) >= least


def has_parts(root: nn.Module, name: str) -> bool:
    module = submodule(root, name)
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


@dataclass
class LoopTypes:
    """The types of modules that have loops. `arguments`: of each, with the key of its structure."""

    model: nn.Module
    mode: FakeTensorMode
    seen: SampleForward
    arguments: Mapping[str, tuple[str, dict[str, Any]]]
    known: dict[object, list[LayerType | str]] = field(default_factory=dict[object, list[LayerType | str]])

    def of(self, loops: Sequence[Loop]) -> LayerType | str:
        """The type of the module of some loops, of which the iterations are entered."""
        key, values = self.arguments[loops[0].caller]
        bodies = tuple(body for loop in loops for body in loop.bodies_in_caller())
        module, known = submodule(self.model, loops[0].caller), self.known.setdefault((key, bodies), [])
        if (kind := equal_type(known, module)) is None:
            known.append(kind := trace_layer(module, values, self.mode, bodies))
        return kind

    def interruption(self, loop: Loop, loops: Sequence[Loop]) -> str | None:
        """Why the iterations of a loop are no layers: others run between two calls of one part.
        `loops`: those of the module.
        """
        name, kind = repeated_part(loop, self.model, self.seen), self.of(loops)
        if name is None or isinstance(kind, str) or not are_interleaved(loop, loops, kind.subs, kind.layer):
            return None
        return f"its code calls `{name}` several times, with other layers in between"
