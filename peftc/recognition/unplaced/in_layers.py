"""Weights of a traced layer that have no role: an edit of the role leaves them out.

A Linear in no sub-layer has no site at all. Sub-layers that lack a role have sites for their
Linears, under names of their own; so has an attention beside the one with the roles.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from math import prod

from torch import fx, nn

from peftc.dataflow.features import is_affine, source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, module_path, shape
from peftc.dataflow.operations import Op
from peftc.dataflow.values import reaches, value_operands
from peftc.modules.walk import submodule
from peftc.recognition.attention.patterns import Attention, attentions, value_mixtures
from peftc.recognition.attention.projections import joined_operands
from peftc.recognition.attention.side_by_side import feed_forward_beside
from peftc.recognition.layer_types import LayerType
from peftc.recognition.loops import contains_name
from peftc.recognition.module_features import reads_patches
from peftc.recognition.moe.routers import has_matrix
from peftc.recognition.sublayer import SubLayer
from peftc.recognition.unplaced.unknown_products import unknown_matrices
from peftc.recognition.unplaced.untraced import NOT_ADDED, UntracedPart
from peftc.tracing.bytecode import line_of

OUTSIDE = "what it computes is in no sub-layer of its layer"
JOINED = "its result joins that of the Linear with the role"
BOTH = "it computes the results of an attention and of a feed-forward network in one"
PARTIAL = "its code multiplies by its matrix in another way than a Linear"
FURTHER = "another attention of its sub-layer has the roles"


def unplaced_parts(kind: LayerType) -> list[UntracedPart]:
    """The modules of a layer with weights that lack a role, and which of the roles."""
    finder = _Finder(kind)
    parts = [*finder.outside_sub_layers(), *finder.further_attentions(), *finder.without_role()]
    parts += [*finder.joined_tokens(), *finder.output_of_both(), *finder.partial_linears()]
    roles: dict[tuple[str, str], frozenset[str]] = {}
    for part in parts:
        if not part.hides <= finder.hidden(part.module):
            key = (part.module, part.reason)
            roles[key] = roles.get(key, frozenset()) | part.hides
    return [UntracedPart(module, reason, hides) for (module, reason), hides in roles.items()]


class _Finder:
    def __init__(self, kind: LayerType) -> None:
        self.kind, self.layer = kind, kind.layer
        self.subs = [sub for sub in kind.subs if sub.kind != "untraced"]
        self.attentions = attentions(self.layer)

    def hidden(self, module: str) -> frozenset[str]:
        """The kinds of sub-layers that selectors are refused for, since a module is untraced."""
        parts = (part for part in self.kind.untraced if contains_name(part.module, module))
        return frozenset(name for part in parts for name in part.hides)

    def is_own(self, module: str) -> bool:
        """Whether a module belongs to the layer, where that is the body of a loop."""
        return any(contains_name(part, module) for part in self.kind.parts)

    def outside_sub_layers(self) -> Iterator[UntracedPart]:
        """The Linears in no sub-layer that attend, or that follow each other as in an ffn."""
        inside = {name_of(n, self.layer) for sub in self.kind.subs for n in self.layer.linears(sub.body)}
        others = [n for n in self.layer.linears(set(self.layer.graph.nodes)) if name_of(n, self.layer) not in inside]
        others = [n for n in others if self.is_own(name_of(n, self.layer))]
        attending = {n for attention in self.attentions for n in attention_linears(attention, self.layer)}
        attending |= self.mixture_linears()
        multiplied = self.multiplied(others)
        not_added = {part.module for part in self.kind.untraced if part.reason == NOT_ADDED}
        for linear in others:
            roles = {"attn"} if linear in attending else {"ffn"} if self.is_in_network(linear, others) else set[str]()
            roles |= {"attn"} if linear in multiplied else set()
            module = owner(name_of(linear, self.layer))
            if roles:
                reason = NOT_ADDED if any(contains_name(name, module) for name in not_added) else OUTSIDE
                yield UntracedPart(module, reason, frozenset(roles))

    def mixture_linears(self) -> set[fx.Node]:
        """The Linears of softmaxes that weigh tokens, but are no attention that is known: queries
        may be parameters.
        """
        layer, known = self.layer, {attention.call for attention in self.attentions}
        others = [n for n in layer.graph.nodes if layer.op(n) is Op.SOFTMAX and n not in known]
        linears = set[fx.Node]()
        for softmax in others:
            for mixture, value in value_mixtures(softmax):
                linears.update(n for operand in (softmax, value) for n, _ in source_linears(layer, operand))
                linears.update(filter(None, [layer.consumer_linear(mixture, set(layer.graph.nodes))]))
        return linears

    def multiplied(self, linears: Collection[fx.Node]) -> set[fx.Node]:
        """Those of three matrices that are multiplied: of an attention without a softmax."""
        products = [n for n in self.layer.graph.nodes if self.layer.op(n) is Op.MATMUL and not self.layer.is_linear(n)]
        sources = [[source_linears(self.layer, operand) for operand in value_operands(n)] for n in products]
        pairs = ([{n for n, _ in one}.intersection(linears) for one in operands] for operands in sources)
        return {n for operands in pairs if all(operands) and len(every := set().union(*operands)) > 2 for n in every}

    def is_in_network(self, linear: fx.Node, others: Collection[fx.Node]) -> bool:
        """Whether a Linear is before or behind another with an activation between them, and both
        depend on the stream of the layer.
        """
        stream = self.kind.stream
        if stream is None or not reaches(stream, linear):
            return False
        pairs = ((up, down) for n in others for up, down in ((n, linear), (linear, n)))
        return any(_are_up_and_down(up, down, others, self.layer) for up, down in pairs)

    def further_attentions(self) -> Iterator[UntracedPart]:
        """The attentions of a sub-layer whose queries, keys and values other Linears compute."""
        for sub in self.subs:
            roles = (sub.projections, *sub.heads)
            names = {name_of(p.node, self.layer) for known in roles for p in known.values()}
            for attention in sub.attentions[1:]:
                values = (attention.q, attention.k, attention.v)
                sources = [{name_of(n, self.layer) for n, _ in source_linears(self.layer, v)} for v in values]
                if all(own and own.isdisjoint(names) for own in sources) and self.is_own(module_path(attention.call)):
                    yield UntracedPart(self.owner_of(attention, sources), FURTHER, frozenset({"attn"}))

    def owner_of(self, attention: Attention, sources: Sequence[Collection[str]]) -> str:
        """The module around an attention that has weights: a part may compute the scores."""
        # Seen in: no transformers model, but modules like `Attend`, which have no weights
        path = module_path(attention.call)
        if has_matrix(submodule(self.layer.root, path)):
            return path
        parts = [name.split(".")[:-1] for own in sources for name in own]
        return ".".join(steps[0] for steps in takewhile(lambda steps: len({*steps}) == 1, zip(*parts, strict=False)))

    def without_role(self) -> Iterator[UntracedPart]:
        """The sub-layers that lack roles and have Linears without one."""
        for sub in self.subs:
            lacking = lacking_roles(sub)
            linears = [n for n in self.without_roles(sub) if self.is_own(name_of(n, self.layer))]
            if any(other.h is sub.h for other in self.subs if other is not sub):
                continue  # `output_of_both` has it
            if linears and lacking and not sub.experts:
                roles = frozenset(f"{sub.kind}.{role}" for role in lacking)
                lines = {owner(name_of(n, self.layer)): line_of(n.meta.get("stack", ())) for n in reversed(linears)}
                reason = f"its `{sub.kind}` has no {' and no '.join(f'`{role}`' for role in lacking)}"
                for name, line in reversed(lines.items()):
                    yield UntracedPart(name, reason if line is None else f"{reason}, at {line}", roles)

    def without_roles(self, sub: SubLayer) -> list[fx.Node]:
        """The Linears of a sub-layer without a role, and convolutions over several positions."""
        roles = {p.node for roles in (sub.projections, *sub.heads) for p in roles.values()}
        kernels = [n for n in sorted(sub.body - roles) if reads_patches(self.layer.module(n))]
        return [*sub.linears, *kernels, *unknown_matrices(sub.body, self.layer)]

    def joined_tokens(self) -> Iterator[UntracedPart]:
        """The Linears of tokens that are joined to those of the stream in an attention, but have
        no role, as where another stream ends.
        """
        roles = [known for sub in self.subs for known in (sub.projections, *sub.heads)]
        names = {name_of(p.node, self.layer) for known in roles for p in known.values()}
        for attention in {a.call: a for sub in self.subs for a in sub.attentions}.values():
            for role, value in (("q", attention.q), ("k", attention.k), ("v", attention.v)):
                sources = [self.sources(operand) for operand in joined_operands(value, self.layer)]
                if any(names.intersection(own) for own in sources):
                    others = (name for own in sources if names.isdisjoint(own) for name in own)
                    yield from (UntracedPart(owner(name), JOINED, frozenset({f"attn.{role}"})) for name in others)

    def output_of_both(self) -> Iterator[UntracedPart]:
        """The Linears that are no `o` and no `down`, but both at once."""
        # Seen in: no transformers model, but the single blocks of Flux
        for sub in (sub for sub in self.subs if sub.attention is not None and "o" not in sub.projections):
            out = self.layer.consumer_linear(sub.attentions[0].out, sub.body)
            name = "" if out is None else name_of(out, self.layer)
            if out is not None and self.is_own(name) and feed_forward_beside(out, sub.attentions, self.layer):
                yield UntracedPart(owner(name), BOTH, frozenset({"attn.o", "ffn.down", "ffn.hidden"}))

    def partial_linears(self) -> Iterator[UntracedPart]:
        """The modules derived from nn.Linear that are none, such as of a matrix for each group."""
        # Seen in: DeepSeek V4, between the attention and `o`
        for sub in (sub for sub in self.subs if sub.router is None and not sub.experts):
            linears = [n for n in sorted(sub.body) if is_tensor(n) and isinstance(self.layer.module(n), nn.Linear)]
            for linear in (n for n in linears if not self.layer.is_linear(n) and self.is_own(str(n.target))):
                roles = ("up", "down") if sub.attention is None else ("q", "k", "v")
                roles = ("o",) if sub.attention is not None and reaches(sub.attention.out, linear) else roles
                yield UntracedPart(str(linear.target), PARTIAL, frozenset(f"{sub.kind}.{role}" for role in roles))

    def sources(self, value: fx.Node) -> list[str]:
        names = [name_of(n, self.layer) for n, _ in source_linears(self.layer, value)]
        return [name for name in names if self.is_own(name)]


def lacking_roles(sub: SubLayer) -> list[str]:
    """The roles that every sub-layer of its kind should have, and this one has not."""
    match sub.kind:
        case "attn":
            return [role for role in ("q", "k", "v") if role not in sub.projections]
        case "ffn":
            return [role for role in ("up", "down") if role not in sub.projections]
        case _:
            return []


def attention_linears(attention: Attention, layer: LayerGraph) -> set[fx.Node]:
    """The Linears that compute what an attention reads, and the one that reads its result."""
    inputs = {n for value in (attention.q, attention.k, attention.v) for n, _ in source_linears(layer, value)}
    out = layer.consumer_linear(attention.out, set(layer.graph.nodes))
    return inputs if out is None else {*inputs, out}


def _are_up_and_down(up: fx.Node, down: fx.Node, others: Collection[fx.Node], layer: LayerGraph) -> bool:
    """Whether a Linear reads what an activation makes of another's result, token by token, and
    computes as many features as that one reads. `others`: the Linears that may take part.
    """
    before, hidden = layer.input_of(up), layer.input_of(down)
    if up is down or before is None or hidden is None or not reaches(up, hidden):
        return False
    sizes = [prod(shape(node)) for node in (before, layer.output_of(up), hidden, layer.output_of(down))]
    if sizes[0] != sizes[3] or sizes[2] not in (sizes[1], sizes[1] / 2):
        return False
    sources = [n for n, _ in source_linears(layer, hidden)]
    return up in sources and all(n in others for n in sources) and not is_affine(hidden, up, layer)


def name_of(linear: fx.Node, layer: LayerGraph) -> str:
    """The module of a Linear in its layer, or the parameter that code multiplies by."""
    product = layer.product(linear)
    return str(linear.target) if product is None else product.weight.parameter


def owner(name: str) -> str:
    return name.removesuffix(".weight")
