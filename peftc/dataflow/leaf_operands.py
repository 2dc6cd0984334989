"""Which arguments of a leaf module its results are computed from.

`rotary(values, positions)` takes `values` for their dtype alone; `rotary(q, k)` returns two
results, each of one argument. The leaf's code is traced by itself, and values are followed back
from each of its results.
"""

from __future__ import annotations

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.dataflow.nodes import output_of
from peftc.dataflow.values import CARRIERS, WHOLE, upstream
from peftc.fakes.tensors import fake_copy
from peftc.tracing.region_trace import ModuleCall, RegionTrace
from peftc.tracing.tracer import approximate_trace


def mark_operands(traced: RegionTrace, root: nn.Module, mode: FakeTensorMode) -> None:
    """Notes at each leaf without matrices what its results are computed from."""
    for call in traced.calls:
        node, arguments = call.result, _node_arguments(call)
        if isinstance(node, fx.Node) and len(arguments) > 1 and _is_plain(root.get_submodule(call.name)):
            carriers = _carriers(call, root, mode)
            if carriers:
                node.meta[CARRIERS] = {part: [arguments[n] for n in names] for part, names in carriers.items()}


def _node_arguments(call: ModuleCall) -> dict[str, fx.Node]:
    """The arguments of a leaf that are tensors, by parameter; none where arguments are nested."""
    nested = any(isinstance(value, (tuple, list, dict)) and value for value in call.arguments.values())
    nodes = {name: value for name, value in call.arguments.items() if isinstance(value, fx.Node)}
    return {} if call.inlined or nested else nodes


def _is_plain(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.") and all(p.ndim < 2 for p in module.parameters())


def _carriers(call: ModuleCall, root: nn.Module, mode: FakeTensorMode) -> dict[int, list[str]]:
    """The parameters of a leaf's forward that each of its results is computed from."""
    arguments = fx.map_arg(call.arguments, lambda n: n.meta.get("example"))
    try:
        with mode:
            graph = approximate_trace(root.get_submodule(call.name), fake_copy(arguments, mode)).graph
    except Exception:  # of a model's own code
        return {}
    result = output_of(graph).args[0]
    parts = dict(enumerate(result)) if isinstance(result, (tuple, list)) else {WHOLE: result}
    return {
        i: [str(n.target) for n in sorted(upstream(part)) if n.op == "placeholder"]
        for i, part in parts.items()
        if isinstance(part, fx.Node)
    }
