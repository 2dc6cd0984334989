"""Layers as fx graphs, and edits inserted into them, for people who write passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import EllipsisType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names, nearest
from peftc.fakes.tensors import fake_copy
from peftc.installation.compiled_model import analyse_base
from peftc.models.samples import joint_sample
from peftc.planning.planner import make_plan
from peftc.planning.selection.selectors import resolve
from peftc.recognition.analysis import Analysis, ModelLike
from peftc.recognition.attention.patterns import attention_at
from peftc.recognition.layer_types import LayerType, has_parts
from peftc.rewriting.insert import Inserter
from peftc.rewriting.regions import LayerRegions
from peftc.rewriting.states import node_of
from peftc.semantics.files import Include
from peftc.semantics.spec_argument import Settings, SpecLike, flat_spec
from peftc.specialization.code_printer import function_body
from peftc.specialization.expressions import function
from peftc.specialization.names import GlobalNames
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.tracer import RegionTracer

_PRINTED = int | float | complex | str | EllipsisType | torch.dtype | torch.device | torch.layout | torch.memory_format


@dataclass(frozen=True, eq=False)
class TracedRegion:
    """A layer as an fx graph, which stands for all layers of its type.

    Attributes:
        module: the dotted name of the layer that was traced.
        layers: the dotted names of all layers that share the graph.
        graph: the traced code, down to Linears, norms and activations.
        states: nodes by the names of hidden states, such as `attn.self.q.h`. A node lists the full
            names in `node.meta["states"]`.
        sites: the sites of the layer that was traced.
    """

    module: str
    layers: tuple[str, ...]
    graph: fx.Graph
    states: Mapping[str, fx.Node]
    sites: tuple[Site, ...]
    kind: LayerType = field(repr=False)
    analysis: Analysis = field(repr=False)

    def holds(self, site: Site) -> bool:
        """Whether the states of a site are in the graph, at the layer that was traced."""
        return site.root == self.module and site.kind in (self.kind.key, site.module)

    @property
    def code(self) -> str:
        """The graph as a Python function."""
        signature = forward_signature(self.kind.root)
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return function("forward", signature, function_body(graph, GlobalNames(signature.parameters), signature))

    def graph_module(self, layer: nn.Module) -> fx.GraphModule:
        """The graph as a module that has what it reads of a layer: for `fx.Interpreter`,
        `ShapeProp`, and other tools of torch.fx.

        Its inputs are the arguments of the layer's forward, by position or by name; `**kwargs` is
        one dictionary, `kwargs`, where the code reads it. Functions and other objects among the
        operands, which torch.fx cannot print, are attributes. Nodes have the `meta` of the graph.

        Args:
            layer: of the model, one of `layers`.
        """
        return graph_module(self.graph, layer)

    def state(self, name: str) -> fx.Node:
        """The node of a hidden state: `h` if the region has one site, `ffn.h`, or a full path.

        Raises:
            PeftcError: P207 (no state has that name, or more than one).
        """
        matches = [key for key in self.states if key.endswith(f".{name}") or f"layer.{key}" == name]
        matches = [name] if name in self.states else matches
        if len(matches) == 1:
            return self.states[matches[0]]
        if matches:
            message = f"`{name}` is the name of {len(matches)} states of `{self.module}`"
            raise PeftcError(Diagnostic("P207", message, notes=(f"it could be {join_names(matches)}",)))
        close = nearest(name, self.states)
        help = f"did you mean {join_names(close)}?" if close else None
        raise PeftcError(Diagnostic("P207", f"`{self.module}` has no state `{name}`", help=help))


def graph_module(graph: fx.Graph, layer: nn.Module) -> fx.GraphModule:
    """A copy of a layer's graph as a module. See `TracedRegion.graph_module`."""
    own, objects = fx.Graph(), dict[str, object]()
    own.output(own.graph_copy(graph, {}))
    for node in list(own.nodes):
        if node.op == "placeholder" and str(node.target).startswith("*"):
            node.target, node.args = str(node.target).lstrip("*"), ({},)
            if not node.users:
                own.erase_node(node)
        with own.inserting_before(node):
            lift = partial(_as_node, own, objects)
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lift)
    parts = {str(node.target) for node in own.nodes if node.op in ("get_attr", "call_module")}
    return fx.GraphModule({name: objects[name] if name in objects else attrgetter(name)(layer) for name in parts}, own)


def _as_node(graph: fx.Graph, objects: dict[str, object], value: Any) -> Any:
    """An operand that torch.fx can print: of an object, the node that reads it."""
    if value is None or isinstance(value, fx.Node | slice | range | _PRINTED):
        return value
    name = next((name for name, other in objects.items() if other is value), f"object_{len(objects)}")
    objects[name] = value
    return graph.get_attr(name)


def trace(
    model: ModelLike,
    sites: str | None = None,
    *,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    trust_remote_code: bool = False,
) -> list[TracedRegion]:
    """The layers of a model as graphs with named hidden states, one graph per layer type.

    Args:
        model: as in `peftc.sites`.
        sites: a selector; limits the layers and the states to those of the sites that it selects.
        sample: as in `peftc.sites`.
        samples: as in `peftc.sites`.
        trust_remote_code: as in `peftc.sites`.

    Raises:
        PeftcError: P0xx and P2xx (the selector), P5xx (the model).
    """
    analysis = analyse_base(model, joint_sample(sample, samples), trust_remote_code)
    table, stacks = analysis.table, analysis.structure.stacks
    selection = table.sites if sites is None else resolve(parse_selector(sites), table)
    paths = {site.path for site in selection}
    members: dict[int, list[str]] = {}
    kinds: dict[int, LayerType] = {}
    for name, kind in ((n, k) for stack in stacks for n, k in zip(stack.layers, stack.kinds, strict=True)):
        kinds[id(kind)] = kind
        members.setdefault(id(kind), []).append(name)
    regions: list[TracedRegion] = []
    for key, layers in members.items():
        own = [site for site in table.sites if site.kind == kinds[key].key and site.path in paths]
        first = next((site.root for site in own), None)
        if first is not None:
            its_sites = tuple(site for site in own if site.root == first)
            regions.append(region_of(first, tuple(layers), kinds[key], its_sites, analysis))
    if sites is not None and paths and not regions:
        raise PeftcError(Diagnostic("P209", f"`{sites}` selects nothing inside a layer of {table.model_id}"))
    return regions


def region_of(
    module: str, layers: tuple[str, ...], kind: LayerType, sites: tuple[Site, ...], analysis: Analysis
) -> TracedRegion:
    states: dict[str, fx.Node] = {}
    for site in sites:
        layer_step = next(i for i, (name, _) in enumerate(site.steps) if name == "layer")
        prefix = [name if index is None else f"{name}[{index}]" for name, index in site.steps[layer_step + 1 :]]
        for name, state in site.states.items():
            if state.activation is not None:
                node = node_of(state, module, site, kind.traced)
                role = state.activation.node.partition(".")[2]
                attention = attention_at(node, kind.layer) if role in ("q", "k", "v") else None
                if attention is not None:  # the node that feeds the attention call
                    node = {"q": attention.q, "k": attention.k, "v": attention.v}[role]
                states[".".join([*prefix, name])] = node
                node.meta["states"] = [*node.meta.get("states", ()), f"{site.path}.{name}"]
    return TracedRegion(module, layers, kind.traced.graph, states, sites, kind, analysis)


def parse_selector(text: str) -> ast.Selector:
    statement = parse_text(f"peft 1\ntrain sites = [w] at {text}\n", "<selector>").statements[0]
    assert isinstance(statement, ast.Train)
    return statement.selector


def rewrite(
    region: TracedRegion, edits: SpecLike, *, settings: Settings | None = None, include: Include = ()
) -> fx.Graph:
    """A copy of a region's graph with the equations of `edits` written into it.

    Parameters of the edits are calls of `peftc.<edit>.<site>.<form>` in the graph.

    Args:
        region: from `peftc.trace`.
        edits: a spec, as in `peftc.plan`.
        settings: as in `peftc.plan`.
        include: as in `peftc.plan`.

    Raises:
        PeftcError: as `peftc.plan`; P210 (no edit has a site in the region), P545 (no region).
    """
    if not isinstance(region, TracedRegion):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`rewrite` takes a region, not a {type(region).__name__}"
        raise PeftcError(Diagnostic("P545", message, help="one of `peftc.trace(model)`"))
    analysis = region.analysis
    result = make_plan(flat_spec(edits, settings, include), analysis.table)
    uses = [use for edit in result.site_edits for use in edit.uses() if region.holds(use.site)]
    if not uses:
        names = join_names(dict.fromkeys(edit.edit for edit in result.site_edits))
        raise PeftcError(Diagnostic("P210", f"no edit has a site in `{region.module}`", notes=(f"edits: {names}",)))
    weights = {s.weight.module for use in uses for s in use.site.states.values() if s.weight is not None}
    entered = {name[len(region.module) + 1 :] for name in weights}
    # A new trace, which also enters the leaves whose weights are edited.
    tracer = RegionTracer(lambda name: name in entered or has_parts(region.kind.root, name))
    with analysis.structure.mode:
        traced = tracer.trace_region(region.kind.root, fake_copy(region.kind.arguments, analysis.structure.mode))
    inserter, region_edits = Inserter(traced), LayerRegions(region.kind, region.module, {}).layer_edits(uses)
    inserter.lookup.resolve(region_edits)
    for edit in region_edits:
        inserter.insert(edit)
    return traced.graph
