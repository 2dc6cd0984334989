"""Layers, gathered into kinds: one traced graph for all layers of one structure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.model.fakes import fake_copy
from peftc.tracing import graphs
from peftc.tracing.blocks import TraceError
from peftc.tracing.observe import Observation, observe
from peftc.tracing.roles import SubLayer, sub_layers
from peftc.tracing.routed import find_experts
from peftc.tracing.tracer import RegionTracer, Traced


@dataclass
class LayerKind:
    """All layers of one structure. `root` is one of them; names in `traced` and `subs` are relative to it."""

    name: str
    root: nn.Module
    traced: Traced
    subs: list[SubLayer]
    arguments: dict[str, Any] = field(repr=False)
    opaque: dict[str, str] = field(default_factory=dict[str, str])  # modules in it that could not be entered, and why

    def calls(self, module: str) -> bool:
        """Whether a module's call is seen in the graph."""
        return not module or any(call.name == module for call in self.traced.calls)


@dataclass
class Stack:
    """A list of layers: `encoder`, `decoder`, or a tower of its own name."""

    name: str
    path: str  # of the list that holds the layers
    layers: list[str]  # dotted names, in order
    kinds: list[LayerKind]  # of each layer


@dataclass
class Anatomy:
    """A model's stacks, and what the sample forward showed."""

    model: nn.Module
    mode: FakeTensorMode
    seen: Observation
    stacks: list[Stack]
    warnings: list[str] = field(default_factory=list[str])


def dissect(model: nn.Module, inputs: Mapping[str, Any], mode: FakeTensorMode) -> Anatomy:
    """Finds and traces the layers of a skeleton (a model of fake tensors)."""
    seen = observe(model, inputs, mode)
    anatomy = Anatomy(model, mode, seen, [])
    kinds: dict[str, LayerKind | None] = {}
    members: dict[str, list[tuple[str, LayerKind]]] = {}
    for name, (key, arguments) in seen.layers.items():
        if key not in kinds:
            kinds[key] = trace_layer(model.get_submodule(name), name, arguments, anatomy)
        kind = kinds[key]
        if kind is not None and kind.subs:
            members.setdefault(name.rpartition(".")[0], []).append((name, kind))
    for path, layers in members.items():
        layers.sort(key=lambda item: int(item[0].rpartition(".")[2]) if item[0].rpartition(".")[2].isdigit() else 0)
        anatomy.stacks.append(Stack("", path, [n for n, _ in layers], [k for _, k in layers]))
    name_stacks(anatomy)
    return anatomy


def trace_layer(layer: nn.Module, name: str, arguments: dict[str, Any], anatomy: Anatomy) -> LayerKind | None:
    """Traces a layer with all children inlined that have children, or that route; one that cannot be entered stays a leaf."""
    leaves: dict[str, str] = {}
    routes: set[str] = set()
    while True:
        tracer = RegionTracer(partial(entered, layer, leaves, routes))
        try:
            with anatomy.mode:
                traced = tracer.trace_region(layer, fake_copy(arguments, anatomy.mode))
        except Exception as error:
            inside = [f for f in tracer.frames if f not in leaves]
            if not inside:
                anatomy.warnings.append(f"{name} ({type(layer).__name__}) could not be traced: {reason(error)}")
                return None
            leaves[inside[-1]] = reason(error)
            continue
        if more := routing(traced, layer) - routes:
            routes |= more
            continue
        kind = LayerKind(type(layer).__name__, layer, traced, sub_layers(traced.graph, layer), arguments, leaves)
        find_experts(kind.traced, kind.subs, layer, anatomy.mode)
        return kind


def entered(layer: nn.Module, leaves: Collection[str], routes: Collection[str], child: str) -> bool:
    return child not in leaves and (child in routes or has_children(layer, child))


def routing(traced: Traced, layer: nn.Module) -> set[str]:
    """The leaves that multiply by a matrix of their own and return more than the product: an expert's number, a weight."""
    calls = [n for n in traced.graph.nodes if n.op == "call_module" and not graphs.is_tensor(n)]
    return {
        str(n.target) for n in calls if any(p.ndim == 2 for p in own_parameters(layer.get_submodule(str(n.target))))
    }


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def has_children(root: nn.Module, name: str) -> bool:
    return next(root.get_submodule(name).children(), None) is not None


def reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text and isinstance(error, TraceError) else f"{type(error).__name__}: {text[0] if text else ''}"


def name_stacks(anatomy: Anatomy) -> None:
    """Encoder and decoder by dataflow: a stack with cross-attention decodes; so does a lone causal one."""
    for stack in anatomy.stacks:
        stack.name = "decoder" if decodes(stack) else "encoder"
    for name in ("encoder", "decoder"):
        same = [s for s in anatomy.stacks if s.name == name]
        if len(same) > 1:
            for stack in same:
                stack.name = tower_name(stack.path, [s.path for s in same])


def decodes(stack: Stack) -> bool:
    for kind in stack.kinds:
        for sub in kind.subs:
            if sub.variant == "cross":
                return True
            if sub.attention is not None and sub.attention.sort == "interface":
                owner: Any = sub.attention.call.args[0]
                module = kind.root.get_submodule("" if owner.target == "_self" else owner.target)
                if getattr(module, "is_causal", False):
                    return True
    return False


def tower_name(path: str, others: list[str]) -> str:
    """The first part of a stack's path that tells it from the other stacks."""
    parts = path.split(".")
    split = [o.split(".") for o in others if o != path]
    for i, part in enumerate(parts):
        if any(i >= len(o) or o[i] != part for o in split):
            return part
    return path.replace(".", "_")


def example_width(kind: LayerKind) -> int:
    """Width of the residual stream."""
    value = kind.subs[0].res.meta["example"]
    assert isinstance(value, torch.Tensor)
    return value.shape[-1]
