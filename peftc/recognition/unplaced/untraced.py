"""Modules of a layer that could not be traced: which of them matter, and what may be in them.

Nothing in such a module has a name, nor has a sub-layer that one computes: it may be an attention,
a feed-forward network or neither. The operations of a run on its example tell whether it attends.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import module_path
from peftc.dataflow.operations import is_norm_module, name_of
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy
from peftc.modules.walk import submodule
from peftc.recognition.attention.patterns import attentions, has_softmax_mixture
from peftc.recognition.residual_stream import Stream, gives_states
from peftc.recognition.sublayer import SubLayer
from peftc.recognition.token_mixing import is_kernel
from peftc.tracing.bytecode import line_of

AMBIGUOUS = "the queries, keys and values of its attention cannot be told apart"
KERNEL = "what `{}` computes cannot be traced; it may be an attention"
NO_SUM = "the result of its attention joins the residual stream by `{}`, not as a term of a sum"
NOT_ADDED = "the result of its attention is not added to the residual stream of the layer"


@dataclass(frozen=True)
class UntracedPart:
    """A module of a layer, by its name in it. `hides`: see `UntracedModule`."""

    module: str
    reason: str
    hides: frozenset[str]


def opaque_modules(layer: LayerGraph, untraced: Iterable[str], mode: FakeTensorMode) -> set[str]:
    """Of the untraced modules those with matrices or attention."""
    modules = set[str]()
    for node in layer.graph.nodes:
        if node.op == "call_module" and node.target in untraced:
            parameters = submodule(layer.root, str(node.target)).parameters()
            if any(p.ndim >= 2 for p in parameters) or _attends(node, layer, mode):
                modules.add(str(node.target))
    return modules


def attending_modules(modules: Collection[str], layer: LayerGraph, mode: FakeTensorMode) -> set[str]:
    """The modules one of whose calls runs an attention, or something that looks like one."""
    calls = (node for node in layer.graph.nodes if node.op == "call_module" and node.target in modules)
    return {str(node.target) for node in calls if _attends(node, layer, mode)}


def _attends(node: fx.Node, layer: LayerGraph, mode: FakeTensorMode) -> bool:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example"))
    operations = _Operations()
    try:
        with mode, fake_data_answers(), operations, torch.no_grad():
            submodule(layer.root, str(node.target))(*fake_copy(args, mode), **fake_copy(kwargs, mode))
    except Exception:  # of a model's own code
        return True
    names = operations.names
    kernels = any("scaled_dot_product" in n or not n.startswith(("aten.", "prim")) for n in names)
    return kernels or (any("softmax" in n for n in names) and any("bmm" in n for n in names))


class _Operations(TorchDispatchMode):
    """Collects the names of all operations in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def untraced_parts(
    layer: LayerGraph,
    subs: list[SubLayer],
    reasons: Mapping[str, str],
    opaque: Mapping[str, bool],
    first: fx.Node | None,
) -> list[UntracedPart]:
    """The modules of a layer whose contents have no sites. `reasons`: why they were not traced.
    `first`: the residual stream before its sub-layers.
    """
    if first is None:
        return []
    stream = Stream(first, layer)
    stream.extend(*(sub.add for sub in subs))
    kinds = frozenset(sub.kind for sub in subs)
    modules: dict[str, frozenset[str]] = {}
    for node in layer.graph.nodes:
        if node.op == "call_module" and node.target in opaque:
            modules.setdefault(node.target, frozenset())
            if gives_states(node) and stream.reaches(node):
                modules[node.target] |= _hidden_kinds(node, subs, opaque[node.target], kinds)
                norms = filter(is_norm_module, submodule(layer.root, node.target).modules())
                if any(True for norm in norms for _ in norm.parameters()):
                    modules[node.target] |= {"norm"}
    parts = [UntracedPart(module, reasons[module], hides) for module, hides in modules.items()]
    parts += [*_ambiguous_attentions(subs, opaque, layer), *_joined_attentions(subs, layer)]
    return [*parts, *_attentions_not_added(subs, stream)]


def _hidden_kinds(node: fx.Node, subs: list[SubLayer], attends: bool, kinds: frozenset[str]) -> frozenset[str]:
    """The kinds of sub-layers that an opaque module may contain."""
    # Seen in: Nemotron H Omni; without it `attn` would silently name nothing
    if any(node in sub.body for sub in subs if sub.kind != "untraced"):
        return frozenset({"attn"}) if attends else frozenset()  # a part of what has a name
    return (frozenset({"attn", "ffn"}) - (kinds & {"ffn"})) if attends else frozenset({"ffn", "mixer"})


def _ambiguous_attentions(
    subs: list[SubLayer], opaque: Mapping[str, bool], layer: LayerGraph
) -> Iterator[UntracedPart]:
    """Attentions that are written out in an unknown way."""
    # Seen in: no transformers model; refuses `attn` of an attention of an unknown kind
    unknown = (s for s in subs if s.kind == "untraced" and not s.attentions)
    for sub in (s for s in unknown if not any(n.target in opaque for n in s.body)):
        if (softmax := next((n for n in sorted(sub.body) if has_softmax_mixture([n], layer)), None)) is not None:
            yield UntracedPart(module_path(softmax), AMBIGUOUS, frozenset({"attn"}))
        elif (kernel := next(filter(is_kernel, sorted(sub.body)), None)) is not None:
            yield UntracedPart(module_path(kernel), KERNEL.format(_name(kernel)), frozenset({"attn"}))


def _joined_attentions(subs: list[SubLayer], layer: LayerGraph) -> Iterator[UntracedPart]:
    """Attentions whose results join the stream in another way than by a sum."""
    # Seen in: no transformers model, but `x.index_put((i,), attention, accumulate=True)`
    for sub in (s for s in subs if s.kind == "untraced" and s.attentions):
        join = layer.stripped(sub.h)
        name, line = name_of(join) or str(join.target), line_of(join.meta.get("stack", ()))
        reason = NO_SUM.format(name) + ("" if line is None else f", at {line}")
        yield UntracedPart(module_path(sub.attentions[0].call), reason, frozenset({"attn"}))


def _name(kernel: fx.Node) -> str:
    function = kernel.kwargs["function"]
    return str(getattr(function, "__name__", None) or getattr(function, "name", "a function"))


def _attentions_not_added(subs: list[SubLayer], stream: Stream) -> Iterator[UntracedPart]:
    """Attentions in no sub-layer whose values a Linear computes."""
    # Seen in: Florence-2, LeViT, Pegasus-X
    inside = {node for sub in subs for node in sub.body}
    others = [a for a in attentions(stream.layer) if a.call not in inside]
    modules = [module_path(a.call) for a in others if stream.layer.linears(stream.body(a.v))]
    yield from (UntracedPart(module, NOT_ADDED, frozenset()) for module in dict.fromkeys(modules))
