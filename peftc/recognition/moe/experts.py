"""Mixtures of experts: which sub-layers have experts, what routes to them, what is beside them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.dataflow.feature_axis import features_dim
from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, module_path, nodes_in, output_of, shape
from peftc.dataflow.values import upstream
from peftc.fakes.tensors import fake_copy
from peftc.modules.walk import submodule
from peftc.recognition.attention.patterns import attentions
from peftc.recognition.ffn import Projection, input_projections
from peftc.recognition.loops import contains_name
from peftc.recognition.moe.lists import ExpertModules, Experts, expert_modules, networks_beside, networks_of
from peftc.recognition.moe.matrices import StackedExperts, multiplies_slices, stacked_experts
from peftc.recognition.moe.routers import Router, find_router, find_soft_router, routing_leaves
from peftc.recognition.sublayer import SubLayer
from peftc.tracing.region_trace import ModuleCall, RegionTrace
from peftc.tracing.tracer import approximate_trace


def find_experts(
    traced: RegionTrace,
    subs: list[SubLayer],
    layer: LayerGraph,
    mode: FakeTensorMode,
    bodies: Sequence[Sequence[str]] = (),
) -> set[str]:
    """Names the experts of each sub-layer, their router, and the networks beside them.

    Args: `bodies`: of a loop, the modules of each iteration; they are no experts of one layer.

    Matrices in one parameter that nothing routes to are no experts: blocks of features may each
    have one.
    Returns: the modules in which one of these is, whether their code could be traced or not.
    """
    finder = _Finder(traced, layer, mode)
    code_paths = [
        (sub, {f"{n.target if n.op == 'call_module' else module_path(n)}." for n in sub.body})
        for sub in subs
        if not sub.attentions
    ]
    for call in finder.candidates():
        sub = next((s for s, paths in code_paths if any(path.startswith(f"{call.name}.") for path in paths)), None)
        if sub is not None:
            finder.look_into(call, sub)
    for sub in subs:
        if not sub.attentions and not sub.experts and not sub.projections:
            _find_traced_lists(sub, layer, bodies)
        if sub.router is None:
            sub.experts, sub.shared_in_leaf = [], []
        elif sub.router.inside_leaf:
            finder.modules |= {c.name for c in traced.calls if f"{sub.router.weight}.".startswith(f"{c.name}.")}
        if sub.experts:
            sub.kind = "ffn"  # what mixes tokens in it only counts how many an expert is sent
            sub.experts = [e for e in _merge_linears(sub.experts, traced, layer) if _may_be_added(e, sub, layer)]
            _find_shared(sub, layer)
    return finder.modules


@dataclass
class _Finder:
    """Looks for experts in the modules that a layer calls. `modules`: those that have some."""

    traced: RegionTrace
    layer: LayerGraph
    mode: FakeTensorMode
    modules: set[str] = field(default_factory=set[str])

    def candidates(self) -> Iterator[ModuleCall]:
        """Calls of modules that hold several matrices in one parameter, or that could not be
        traced.
        """
        inlined = [call.name for call in self.traced.calls if call.inlined]
        for call in self.traced.calls:
            module = submodule(self.layer.root, call.name)
            stacked = any(p.ndim == 3 and min(p.shape) > 1 for p in module.parameters(recurse=False))
            opaque = call.name not in inlined and next(module.children(), None) is not None
            if (stacked or opaque) and not type(module).__module__.startswith("torch."):
                yield call

    def look_into(self, call: ModuleCall, sub: SubLayer) -> None:
        """Adds the experts of a call to its sub-layer."""
        for code in self.codes_of(call):
            stacked = stacked_experts(call.name, code)
            networks = networks_of(output_of(code.graph), set(code.graph.nodes), code)
            experts = [stacked] if stacked is not None else expert_modules(call.name, networks, code.root)
            if experts and sub.router is None:
                sub.router = self.router(experts[0], call, code, sub)
            if (experts and sub.router is not None) or multiplies_slices(code):
                self.modules.add(call.name)
                sub.kind = "ffn" if sub.kind == "untraced" and not sub.attentions else sub.kind
            if experts:
                sub.experts += experts
                sub.experts.sort(key=lambda one: not self.is_routed(one.module))
                sub.shared_in_leaf += [] if call.inlined else networks_beside(call.name, networks, code.root)
                return

    def is_routed(self, module: str) -> bool:
        """Whether a module is called with indices."""
        calls = (call for call in self.traced.calls if call.name == module)
        return any(_is_index(node) for call in calls for node in nodes_in(call.arguments))

    def codes_of(self, call: ModuleCall) -> Iterator[LayerGraph]:
        """The approximate traces of a call, first without branches on data (`if no tokens:
        continue`), then with them (`if tokens: …`); none where they fail, or have an attention.
        """
        # Seen in: no transformers model with branches, but tutorials
        module = submodule(self.layer.root, call.name)
        arguments = fx.map_arg(call.arguments, lambda n: n.meta.get("example"))
        for branches in (False, True):
            traced = None
            with contextlib.suppress(Exception), self.mode:  # of a model's own code
                traced = approximate_trace(module, fake_copy(arguments, self.mode), branches)
                if inlined := routing_leaves(traced.graph, module):
                    traced = approximate_trace(module, fake_copy(arguments, self.mode), branches, inlined)
            if traced is not None and not attentions(code := LayerGraph(traced.graph, module)):
                yield code
            if traced is not None and not traced.outcomes:
                return

    def router(self, experts: Experts, call: ModuleCall, code: LayerGraph, sub: SubLayer) -> Router | None:
        """The router of experts: before them, in their module, or in another that is a leaf."""
        inputs = nodes_in(call.arguments)
        for values in (filter(_is_index, inputs), inputs):  # indices of experts before what these compute on
            if (router := find_router(values, experts.count, sub.body, self.layer)) is not None:
                return router
        body, own = (sub.body, self.layer) if call.inlined else (set(code.graph.nodes), code)
        results = [sub.h if n is sub.add else n for n in nodes_in(call.result)]  # a module may add to the stream itself
        for result in results if call.inlined else [output_of(code.graph)]:
            router = find_router([result], experts.count, body, own) or find_soft_router(experts, result, body, own)
            if router is not None:
                return router if call.inlined else router.inside(call.name)
        return self.router_in_leaf(inputs, experts.count)

    def router_in_leaf(self, inputs: list[fx.Node], count: int) -> Router | None:
        """The router inside of another module that could not be traced."""
        # Seen in: JetMoE, whose experts have no site without it
        leaves = {str(n.target) for value in inputs for n in upstream(value, lambda n: n.op == "call_module")}
        for call in self.traced.calls:
            has_parts = next(submodule(self.layer.root, call.name).children(), None) is not None
            for code in self.codes_of(call) if call.name in leaves and not call.inlined and has_parts else ():
                router = find_router([output_of(code.graph)], count, set(code.graph.nodes), code)
                if router is not None:
                    return router.inside(call.name)
        return None


def _may_be_added(experts: Experts, sub: SubLayer, layer: LayerGraph) -> bool:
    """Whether experts of one matrix each compute as many features as their sub-layer."""
    # Seen in: no transformers model, but a gate for each group of experts (hierarchical mixtures)
    if not isinstance(experts, StackedExperts) or set(experts.roles) != {"down"}:
        return True
    return experts.roles["down"].weight.d_out == shape(sub.h)[features_dim(sub.h, layer)]


def _find_traced_lists(sub: SubLayer, layer: LayerGraph, bodies: Sequence[Sequence[str]]) -> None:
    """The experts of code that calls each module of a list, on all tokens."""
    # Seen in: no transformers model, but dense mixtures of experts written by hand
    networks = networks_of(sub.h, sub.body, layer)
    experts = expert_modules("", networks, layer.root)
    if not experts or "up" not in experts[0].linears or _are_of_several(experts[0], bodies):
        return
    count = experts[0].count
    router = find_router([sub.h], count, sub.body, layer) or find_soft_router(experts[0], sub.h, sub.body, layer)
    if router is not None:
        sub.router, sub.experts, sub.shared_in_leaf = router, [*experts], networks_beside("", networks, layer.root)


def _are_of_several(experts: ExpertModules, bodies: Sequence[Sequence[str]]) -> bool:
    """Whether experts are in several iterations of a loop: networks that these have in common."""
    names = [name for linears in experts.linears.values() for name in linears]
    inside = [any(contains_name(part, name) for part in body for name in names) for body in bodies]
    return sum(inside) > 1


def _merge_linears(experts: list[Experts], traced: RegionTrace, layer: LayerGraph) -> list[Experts]:
    """Joins experts with a module for each Linear: `up` and `gate` compute the input of `down`."""
    # Seen in: JetMoE, whose experts have no `up` and `gate` without it
    calls = {call.name: call for call in traced.calls if isinstance(call.result, fx.Node)}
    single = [e for e in experts if isinstance(e, StackedExperts) and set(e.roles) == {"down"} and e.module in calls]
    results = {calls[one.module].result: one for one in single}
    graph = _ResultGraph(layer, results)
    for node, last in results.items():
        hidden = first_input(node)
        inputs = input_projections(hidden, graph) if hidden is not None else {}
        first = {role: results[p.node].roles["down"] for role, p in inputs.items()}
        if first and all(linear.weight.count == last.count for linear in first.values()):
            roles = {role: replace(first[role], rows=p.rows) for role, p in inputs.items()}
            parts = [last, *(results[p.node] for p in inputs.values())]
            whole = replace(last, module=calls[last.module].caller, roles={**roles, **last.roles})
            return [whole, *(one for one in experts if one not in parts)]
    return experts


class _ResultGraph(LayerGraph):
    """A layer in which only the results of some modules are Linears."""

    def __init__(self, layer: LayerGraph, results: dict[fx.Node, StackedExperts]) -> None:
        super().__init__(layer.graph, layer.root)
        self.results = results

    def is_linear(self, node: object) -> bool:
        return node in self.results


def _is_index(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _find_shared(sub: SubLayer, layer: LayerGraph) -> None:
    """The networks of ordinary Linears whose result is added to that of the experts."""
    # Seen in: ERNIE 4.5, Qwen2 MoE, GLM-4 MoE Lite
    logits = sub.router.logits if sub.router is not None else None
    own = {node for node in layer.linears(sub.body) if _has_role(node, sub, layer)}
    sub.projections, sub.hidden = {}, None
    for node, rows in source_linears(layer, sub.h) if sub.experts else ():
        hidden = layer.input_of(node)
        if node is logits or node in own or node not in sub.body or hidden is None:
            continue
        inputs = input_projections(hidden, layer)
        if "up" in inputs and all(p.node in sub.body and p.node not in own for p in inputs.values()):
            first = {role: inputs[role] for role in ("gate", "up") if role in inputs}
            sub.shared.append({**first, "down": Projection(node, rows)})
    sub.set_linears(layer, logits, *own, *(p.node for network in sub.shared for p in network.values()))


def _has_role(node: fx.Node, sub: SubLayer, layer: LayerGraph) -> bool:
    """Whether a Linear of a layer's graph is one of an expert."""
    product = layer.product(node)
    for experts in sub.experts:
        if isinstance(experts, ExpertModules):
            is_one = any(node.target in linears for linears in experts.linears.values())
        else:
            weights = (linear.weight for linear in experts.roles.values())
            names = {f"{weight.owner}.{weight.attribute}".strip(".") for weight in weights}
            is_one = product is not None and product.weight.parameter in names
        if is_one:
            return True
    return any(node.target == linear.name for network in sub.shared_in_leaf for linear in network.values())
