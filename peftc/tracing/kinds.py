"""Layers, gathered into kinds: one traced graph for all layers of one structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.model.fakes import fake_copy
from peftc.tracing import graphs
from peftc.tracing.blocks import TraceError
from peftc.tracing.calls import innermost
from peftc.tracing.observe import Observation, observe
from peftc.tracing.roles import SubLayer, sub_layers
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
    """Traces a layer with all children inlined that have children; one that cannot be entered stays a leaf."""
    leaves: dict[str, str] = {}
    while True:
        tracer = RegionTracer(lambda child: child not in leaves and has_children(layer, child))
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
        return LayerKind(type(layer).__name__, layer, traced, sub_layers(traced.graph, layer), arguments, leaves)


def has_children(root: nn.Module, name: str) -> bool:
    module = root.get_submodule(name)
    return next(module.children(), None) is not None or joins(module)


def joins(module: nn.Module) -> bool:
    """Whether a module is a sum in disguise: of several tensors, each times and plus a parameter of its own."""
    given = list(signature(innermost(type(module).forward)).parameters.values())[1:]
    needed = [p for p in given if p.default is p.empty]
    plain = len(needed) > 1 and not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed)
    return plain and {p.ndim for p in module.parameters()} == {1} and not graphs.is_norm_named(module)


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
