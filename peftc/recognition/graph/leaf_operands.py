"""Which arguments of a module that stays a leaf its results are computed from.

`rotary(values, positions)` takes `values` for their dtype alone; `rotary(q, k)` returns two results, each of one argument.
The leaf's own code tells: it is traced by itself, and values are followed back from each of its results.
"""

from __future__ import annotations

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.fakes.tensors import fake_copy
from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import CARRIERS, WHOLE
from peftc.tracing.approximate_trace import approximate_trace
from peftc.tracing.tracer import ModuleCall, RegionTrace


def mark_operands(traced: RegionTrace, root: nn.Module, mode: FakeTensorMode) -> None:
    """Notes at each leaf of several arguments, without matrices, what its results are computed from."""
    for call in traced.calls:
        node, arguments = call.result, nodes_by_name(call)
        if isinstance(node, fx.Node) and len(arguments) > 1 and is_plain(root.get_submodule(call.name)):
            found = carriers(call, root, mode)
            if found:
                node.meta[CARRIERS] = {part: [arguments[n] for n in names] for part, names in found.items()}


def nodes_by_name(call: ModuleCall) -> dict[str, fx.Node]:
    """The arguments of a call that are tensors, by parameter; none where the call is entered or has nested arguments."""
    given = {name: value for name, value in call.arguments.items() if isinstance(value, fx.Node)}
    nested = any(isinstance(value, (tuple, list, dict)) and value for value in call.arguments.values())
    return {} if call.inlined or nested else given


def is_plain(module: nn.Module) -> bool:
    """Whether a module is code of a model's own without matrices: a rotary embedding, a gated norm."""
    return not type(module).__module__.startswith("torch.") and all(p.ndim < 2 for p in module.parameters())


def carriers(call: ModuleCall, root: nn.Module, mode: FakeTensorMode) -> dict[int, list[str]]:
    """The parameters of a leaf's forward that each of its results is computed from; none where it cannot be traced."""
    arguments = fx.map_arg(call.arguments, lambda n: n.meta.get("example"))
    try:
        with mode:
            graph = approximate_trace(root.get_submodule(call.name), fake_copy(arguments, mode)).graph
    except Exception:  # of a model's own code
        return {}
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    parts = dict(enumerate(result)) if isinstance(result, (tuple, list)) else {WHOLE: result}
    return {i: reached(part) for i, part in parts.items() if isinstance(part, fx.Node)}


def reached(node: fx.Node) -> list[str]:
    """The arguments that a value is computed from, in the order of the signature."""
    return [str(n.target) for n in sorted(nodes.upstream(node, lambda _: False)) if n.op == "placeholder"]
