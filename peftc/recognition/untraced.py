"""Modules of a layer whose code could not be followed: which of them matter, and what may be in them.

Nothing in such a module is named, and a sub-layer that is computed by one has no name either: it may be an attention, a
feed-forward network or neither. Whether it attends is seen by running it on its example, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy
from peftc.recognition.attention.patterns import attentions, is_softmax, mixed
from peftc.recognition.graph import nodes
from peftc.recognition.residual_stream import Stream, gives_states, stream_input
from peftc.recognition.roles import SubLayer
from peftc.tracing.tracer import RegionTrace

UNTOLD = "the queries, keys and values of its attention cannot be told apart"
BESIDE = "what its attention gives is not added to the residual stream of the layer"


@dataclass(frozen=True)
class UntracedPart:
    """A module of a layer, by its name in it. `hides`: see `UnreadModule`."""

    module: str
    reason: str
    hides: frozenset[str]


def opaque_modules(
    traced: RegionTrace, opaque: Iterable[str], root: nn.Module, mode: FakeTensorMode
) -> dict[str, bool]:
    """Of the modules that could not be entered those that have matrices or attend; and whether they do."""
    found: dict[str, bool] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module" and node.target in opaque:
            runs_attention = attends(node, root, mode)
            if runs_attention or any(p.ndim >= 2 for p in root.get_submodule(node.target).parameters()):
                found[node.target] = runs_attention or found.get(node.target, False)
    return found


def attends(node: fx.Node, root: nn.Module, mode: FakeTensorMode) -> bool:
    """Whether a call of a module runs an attention, or something that cannot be told from one."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example"))
    seen = _Operations()
    try:
        with mode, fake_data_answers(), seen, torch.no_grad():
            root.get_submodule(str(node.target))(*fake_copy(args, mode), **fake_copy(kwargs, mode))
    except Exception:  # of a model's own code
        return True
    kernels = any("scaled_dot_product" in n or not n.startswith(("aten.", "prim")) for n in seen.names)
    return kernels or (any("softmax" in n for n in seen.names) and any("bmm" in n for n in seen.names))


class _Operations(TorchDispatchMode):
    """The names of all operations inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def unread_parts(
    traced: RegionTrace, subs: list[SubLayer], reasons: Mapping[str, str], opaque: Mapping[str, bool], root: nn.Module
) -> list[UntracedPart]:
    """What of a layer has no sites because it could not be followed. `opaque`: as `opaque_modules` gives them."""
    first = stream_input(traced.graph)
    if first is None:
        return []
    stream = Stream(first, root)
    stream.values += [sub.add for sub in subs]
    named = frozenset(sub.kind for sub in subs)
    modules: dict[str, frozenset[str]] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module" and node.target in opaque:
            modules.setdefault(node.target, frozenset())
            if gives_states(node) and stream.reaches(node):
                inside = hidden_in(node, subs, opaque[node.target], named) | norms(root.get_submodule(node.target))
                modules[node.target] |= inside
    found = [UntracedPart(module, reasons[module], hides) for module, hides in modules.items()]
    return [*found, *untold(subs, opaque, root), *beside(traced, subs, stream, root)]


def hidden_in(node: fx.Node, subs: list[SubLayer], attends: bool, named: frozenset[str]) -> frozenset[str]:
    """What may be in an opaque module that turns hidden states into others."""
    if any(node in sub.body for sub in subs if sub.kind != "unread"):
        return frozenset({"attn"}) if attends else frozenset()  # a part of what has a name
    return (frozenset({"attn", "ffn"}) - (named & {"ffn"})) if attends else frozenset({"ffn", "mixer"})


def norms(module: nn.Module) -> frozenset[str]:
    inside = any(nodes.is_norm_module(m) and any(True for _ in m.parameters()) for m in module.modules())
    return frozenset({"norm"}) if inside else frozenset()


def untold(subs: list[SubLayer], opaque: Mapping[str, bool], root: nn.Module) -> Iterator[UntracedPart]:
    """Attentions that are written out in a way that is not known."""
    for sub in subs:
        softmax = next((n for n in sorted(sub.body) if is_softmax(n, root) and any(mixed(n))), None)
        if sub.kind == "unread" and softmax is not None and not any(n.target in opaque for n in sub.body):
            yield UntracedPart(str(softmax.meta["origin"][0]), UNTOLD, frozenset({"attn"}))


def beside(traced: RegionTrace, subs: list[SubLayer], stream: Stream, root: nn.Module) -> Iterator[UntracedPart]:
    """Attentions in no sub-layer, over values that a Linear makes: what mixes streams may have a softmax, too."""
    inside = {node for sub in subs for node in sub.body}
    outside = [a for a in attentions(traced.graph, root) if a.call not in inside]
    projected = [a for a in outside if any(nodes.is_linear(n, root) for n in stream.body(a.v))]
    modules = [str(a.call.meta["origin"][0]) for a in projected]
    yield from (UntracedPart(module, BESIDE, frozenset()) for module in dict.fromkeys(modules))
