"""For people who write their own passes: layers as graphs, and edits inserted into them. Nothing is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names, nearest
from peftc.fakes.tensors import fake_copy
from peftc.installation.compiled_model import analyse_base
from peftc.planning.planner import make_plan
from peftc.planning.selection.selectors import resolve
from peftc.recognition.analysis import Analysis, ModelLike
from peftc.recognition.attention.patterns import attention_at
from peftc.recognition.layers import LayerType, has_parts
from peftc.rewriting.insert import Inserter
from peftc.rewriting.regions import LayerRegions
from peftc.rewriting.states import node_of
from peftc.semantics.load import Include
from peftc.semantics.spec_argument import Settings, SpecLike, flat_spec
from peftc.specialization.code_layout import function
from peftc.specialization.code_printer import function_body
from peftc.specialization.names import GlobalNames
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.region_trace import RegionTrace
from peftc.tracing.tracer import RegionTracer


@dataclass(frozen=True, eq=False)
class TracedRegion:
    """A layer as an fx graph, standing for all layers of its kind.

    `module` is the dotted name of the layer that was traced, `layers` are all that share the graph. `states` names the hidden
    states in it, `attn.self.q.h` for instance, and each node lists the names it bears in `node.meta["states"]`.
    """

    module: str
    layers: tuple[str, ...]
    graph: fx.Graph
    states: Mapping[str, fx.Node]
    sites: tuple[Site, ...]
    traced: RegionTrace = field(repr=False)
    kind: LayerType = field(repr=False)
    analysis: Analysis = field(repr=False)

    @property
    def code(self) -> str:
        """The graph as the Python function it is."""
        return code_of(self.graph, self.kind)

    def state(self, name: str) -> fx.Node:
        """The node of a hidden state: `h` where the region has one site, `ffn.h`, or a full path.

        Raises: P207 where no state, or more than one, has that name.
        """
        ends = [key for key in self.states if key == name or key.endswith("." + name) or f"layer.{key}" == name]
        if name in self.states:
            ends = [name]
        if len(ends) == 1:
            return self.states[ends[0]]
        if not ends:
            close = nearest(name, self.states)
            message = f"`{self.module}` has no state `{name}`"
            raise PeftcError(Diagnostic("P207", message, help=f"did you mean {join_names(close)}?" if close else None))
        notes = (f"it could be {join_names(ends)}",)
        raise PeftcError(
            Diagnostic("P207", f"`{name}` is the name of {len(ends)} states of `{self.module}`", notes=notes)
        )


def trace(
    model: ModelLike,
    sites: str | None = None,
    *,
    sample: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> list[TracedRegion]:
    """The layers of a model as graphs with named hidden states, one for each kind of layer. No weight is read.

    Args: `sites`: a selector; then only the layers that it reaches, and only the states of the sites that it selects.
    `sample`, `trust_remote_code`: as in `peftc.sites`.
    Raises: P0xx and P2xx for the selector, P5xx for the model.
    """
    analysis = analyse_base(model, sample, trust_remote_code)
    wanted = set[str]() if sites is None else {s.path for s in resolve(selector_of(sites), analysis.table)}
    found: list[TracedRegion] = []
    roots = {n for s in analysis.structure.stacks for n in s.layers}
    if wanted and not any(s.root in roots for s in analysis.table.sites if s.path in wanted):
        raise PeftcError(Diagnostic("P209", f"`{sites}` selects nothing inside a layer of {analysis.table.model_id}"))
    kinds = {id(k): k for stack in analysis.structure.stacks for k in stack.kinds}
    for kind in kinds.values():
        stacks = analysis.structure.stacks
        layers = [n for s in stacks for n, k in zip(s.layers, s.kinds, strict=True) if k is kind]
        own = [s for s in analysis.table.sites if s.root in layers and (sites is None or s.path in wanted)]
        first = next((layer for layer in layers if any(s.root == layer for s in own)), None)
        if first is not None:
            mine = tuple(s for s in own if s.root == first)
            found.append(region_of(first, tuple(layers), kind, mine, analysis))
    return found


def region_of(
    module: str, layers: tuple[str, ...], kind: LayerType, sites: tuple[Site, ...], analysis: Analysis
) -> TracedRegion:
    states: dict[str, fx.Node] = {}
    for site in sites:
        cut = next(i + 1 for i, (name, _) in enumerate(site.steps) if name == "layer")
        below = [name if index is None else f"{name}[{index}]" for name, index in site.steps[cut:]]
        for name, state in site.states.items():
            if state.activation is not None:
                node = argument_of(node_of(state, module, site, kind.traced), state.activation.node, kind)
                states[".".join([*below, name])] = node
                node.meta["states"] = [*node.meta.get("states", ()), f"{site.path}.{name}"]
    return TracedRegion(module, layers, kind.traced.graph, states, sites, kind.traced, kind, analysis)


def argument_of(node: fx.Node, place: str, kind: LayerType) -> fx.Node:
    """For q, k and v: the node that feeds the attention, however that is written; for kv the attention itself."""
    name = place.partition(".")[2]
    attention = attention_at(node, kind.layer) if name in ("q", "k", "v") else None
    return node if attention is None else {"q": attention.q, "k": attention.k, "v": attention.v}[name]


def selector_of(text: str) -> ast.Selector:
    statement = parse_text(f"peft 1\ntrain sites = [w] at {text}\n", "<selector>").statements[0]
    assert isinstance(statement, ast.Train)
    return statement.selector


def rewrite(
    region: TracedRegion, edits: SpecLike, *, settings: Settings | None = None, include: Include = ()
) -> fx.Graph:
    """The graph of a region with the equations of `edits` written into it. The region itself is left as it is.

    The parameters of the edits stand in the graph as calls of `peftc.<edit>.<site>.<form>`.
    Args: `settings`, `include`: as in `peftc.plan`.
    Raises: as `peftc.plan`.
    """
    analysis = region.analysis
    planned = make_plan(flat_spec(edits, settings, include), analysis.table)
    placed = [use for p in planned.site_edits for use in p.uses() if use.site.root == region.module]
    if not placed:
        names = join_names(dict.fromkeys(p.edit for p in planned.site_edits))
        raise PeftcError(Diagnostic("P210", f"no edit has a site in `{region.module}`", notes=(f"edits: {names}",)))
    weights = {b.module for p in placed for s in p.site.states.values() if (b := s.weight) is not None}
    parameters = {name[len(region.module) + 1 :] for name in weights}
    layer = LayerRegions(region.kind, region.module, {})
    traced = again(region.kind, parameters, analysis)
    inserter, written = Inserter(traced), layer.layer_edits(placed)
    inserter.lookup.resolve(written)
    for edit in written:
        inserter.insert(edit)
    return traced.graph


def again(kind: LayerType, entered: set[str], analysis: Analysis) -> RegionTrace:
    """A fresh trace of a layer, in which also these leaves are entered."""
    tracer = RegionTracer(lambda name: name in entered or has_parts(kind.root, name))
    with analysis.structure.mode:
        return tracer.trace_region(kind.root, fake_copy(kind.arguments, analysis.structure.mode))


def code_of(graph: fx.Graph, kind: LayerType) -> str:
    signature = forward_signature(kind.root)
    copied = fx.Graph()
    result = copied.graph_copy(graph, {})
    copied.output(result)
    return function("forward", signature, function_body(copied, GlobalNames(), signature))
