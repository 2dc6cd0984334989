"""Graphs of regions that are edited at their boundary: they call the class's own forward."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from peftc.addressing.sites import parameter_name
from peftc.rewriting.edits import RegionEdit
from peftc.runtime.layouts import replace_part
from peftc.runtime.parameters import ModuleView
from peftc.tracing.region_trace import RegionTrace


def base_call(base: type, *arguments: Any, own: Any = None) -> Any:
    """Stands for `base.forward(self, *arguments)`; `own` replaces `self`."""
    raise AssertionError("only printed")


def boundary_graph(base: type[nn.Module], signature: inspect.Signature, edits: tuple[RegionEdit, ...]) -> RegionTrace:
    """A graph that calls the base's forward and unpacks the parts of its result that edits use."""
    graph = fx.Graph()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    nodes = [graph.placeholder(stars.get(p.kind, "") + p.name) for p in list(signature.parameters.values())[1:]]
    arguments: tuple[Any, ...] = (base, *nodes)
    call = out = graph.call_function(base_call, arguments, module_view(graph, edits))
    anchors = (state.anchor for edit in edits for state in edit.states.values())
    result: Any = {}
    for path in dict.fromkeys(anchor.key for anchor in anchors if anchor is not None and anchor.kind == "out"):
        part = call
        for key in path:
            part = graph.call_function(operator.getitem, (part, key))
        out = graph.call_function(replace_part, (out, path, part)) if path else part
        result = with_part(result, path, part)
    graph.output(out)
    return RegionTrace(graph, [], [], {}, result=result)


def module_view(graph: fx.Graph, edits: tuple[RegionEdit, ...]) -> dict[str, Any]:
    """The argument `own` of `base_call` where edits change stacked parameters."""
    values: dict[str, Any] = {}
    for weight in (state.weight for edit in edits for state in edit.states.values()):
        if weight is not None and weight.stacked_slice is not None:
            inner = values
            for name in weight.module.split(".") if weight.module else ():
                inner = inner.setdefault(name, {})
            if weight.attribute not in inner:
                inner[weight.attribute] = graph.get_attr(parameter_name(weight))
    return {"own": graph.call_function(ModuleView, (graph.get_attr("_self"), values))} if values else {}


def with_part(parts: Any, path: tuple[Any, ...], value: fx.Node) -> Any:
    """Nested dictionaries with `value` at a path."""
    if not path:
        return value
    return {**parts, path[0]: with_part(parts.get(path[0], {}), path[1:], value)}


def wrap_base_call(graph: fx.Graph, function: Callable[..., Any], *arguments: Any) -> fx.Node:
    """Replaces the base call by `function(base, self, named, rest, *arguments)`."""
    call = next(n for n in graph.nodes if n.target is base_call)
    base, *operands = call.args
    named = {str(n.target).lstrip("*"): n for n in operands if isinstance(n, fx.Node)}
    name = next((name for name, n in named.items() if str(n.target).startswith("**")), None)
    rest: Any = {} if name is None else named.pop(name)
    with graph.inserting_before(call):
        node = graph.call_function(function, (base, graph.get_attr("_self"), named, rest, *arguments))
    call.replace_all_uses_with(node)
    graph.erase_node(call)
    return node
