"""The graph of a region that is only touched at its boundary: the code of its own class, between its arguments and its result."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from peftc.rewriting.base_call import base_call
from peftc.rewriting.edits import RegionEdit
from peftc.runtime.layouts import replace_part
from peftc.runtime.parameters import ModuleView
from peftc.tracing.region_trace import RegionTrace


def boundary_graph(base: type[nn.Module], signature: inspect.Signature, edits: tuple[RegionEdit, ...]) -> RegionTrace:
    """A graph that calls the base's own forward, and takes apart only what the edits use of its result."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for p in list(signature.parameters.values())[1:]:
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        nodes.append(graph.placeholder(star + p.name))
    arguments: tuple[Any, ...] = (base, *nodes)
    call = out = graph.call_function(base_call, arguments, own_values(graph, edits))
    result: Any = {}
    for path in dict.fromkeys(result_paths(edits)):
        part = call
        for key in path:
            part = graph.call_function(operator.getitem, (part, key))
        out = graph.call_function(replace_part, (out, path, part)) if path else part
        result = nested(result, path, part)
    graph.output(out)
    return RegionTrace(graph, [], [], {}, result=result)


def own_values(graph: fx.Graph, edits: tuple[RegionEdit, ...]) -> dict[str, Any]:
    """What the base's own forward runs on: the module itself, or a view of it with the parameters that edits change."""
    refs = [bound.weight for edit in edits for bound in edit.states.values() if bound.weight is not None]
    values: dict[str, Any] = {}
    for ref in refs:
        if ref.stacked_slice is not None:
            inner = values
            for part in ref.module.split(".") if ref.module else ():
                inner = inner.setdefault(part, {})
            if ref.attribute not in inner:
                inner[ref.attribute] = graph.get_attr(f"{ref.module}.{ref.attribute}".lstrip("."))
    return {"own": graph.call_function(ModuleView, (graph.get_attr("_self"), values))} if values else {}


def result_paths(edits: tuple[RegionEdit, ...]) -> Iterator[tuple[Any, ...]]:
    for edit in edits:
        for bound in edit.states.values():
            if bound.anchor is not None and bound.anchor.kind == "out":
                yield bound.anchor.key


def nested(parts: Any, path: tuple[Any, ...], value: fx.Node) -> Any:
    """The parts of a result by path, as nested dictionaries."""
    if not path:
        return value
    return {**parts, path[0]: nested(parts.get(path[0], {}), path[1:], value)}
