"""The sites of a dissected model: canonical paths, states, shapes and weights."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from peftc.addressing.renaming import LayerName
from peftc.addressing.site_list import Block, Numbers, SiteList, Template, TemplateSite
from peftc.addressing.sites import ActivationRef, FeatureDims, Site, Slice, State, WeightRef
from peftc.dataflow.feature_axis import dim_of_input, dim_read_by, features_dim, stream_dim
from peftc.dataflow.features import separates
from peftc.dataflow.matrices import MatrixPart, MatrixProduct, rows_within
from peftc.dataflow.nodes import first_input, is_tensor, output_of, shape
from peftc.forms import shapes
from peftc.modules.walk import submodule
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.attention.projections import q_width
from peftc.recognition.attention.states import attention_heads, pair_shape
from peftc.recognition.ffn import Projection, unpadded_input
from peftc.recognition.layer_types import LayerType
from peftc.recognition.layers import ModelStructure
from peftc.recognition.module_features import boundary_states, patch_states, reads_examples, reads_patches
from peftc.recognition.moe.lists import ExpertModules, LinearRows
from peftc.recognition.moe.routers import Router
from peftc.recognition.moe.states import expert_states, linear_states, router_states
from peftc.recognition.non_layer_sites import Steps, embeddings, final_norms, heads, path_of, qualified, weight_states
from peftc.recognition.norms import norm_parts, normalized_role
from peftc.recognition.stack_names import ROLES, common, named_steps, numbered, relative_name, sub_layer_steps
from peftc.recognition.sublayer import SubLayer
from peftc.recognition.token_mixing import is_weighted

CALLS = ("interface", "function")


def all_sites(structure: ModelStructure) -> SiteList:
    """Every site of the model, in model order; those of layers once for each type."""
    blocks = [outside_layers(embeddings(structure))]
    cache: dict[object, Any] = {}
    for stack in structure.stacks:
        templates: dict[int, Template] = {}
        layers = zip(stack.layers, stack.kinds, stack.roots, strict=True)
        for i, (name, kind, root) in enumerate(layers):
            steps, call = qualified(stack.name, (("layer", i),)), structure.seen.calls.get(root)
            layer = LayerName(steps, path_of(steps), name, call.count if call is not None else 1)
            if id(kind) not in templates:
                items = LayerSites(root, name, kind, steps, stack.name, cache).items()
                own = (replace(item, site=replace(item.site, runs=layer.runs)) for item in items)
                templates[id(kind)] = Template(layer, tuple(own))
            blocks.append(Block(templates[id(kind)], layer))
    return SiteList([*blocks, outside_layers((*final_norms(structure), *heads(structure)))])


def outside_layers(sites: Iterable[Site]) -> Block:
    return Block(Template(None, tuple(map(TemplateSite, sites))))


class LayerSites:
    """The sites of one layer. `root`: the module whose graph has its states. `cache`: states, which
    layers of one type share.
    """

    def __init__(
        self, root: str, layer: str, kind: LayerType, steps: Steps, stack: str, cache: dict[object, Any]
    ) -> None:
        self.root, self.layer, self.kind, self.steps, self.stack, self.cache = root, layer, kind, steps, stack, cache
        self.graph = kind.layer
        assert kind.stream is not None
        self.stream = kind.stream
        self.calls = Counter(str(n.target) for n in kind.traced.graph.nodes if n.op == "call_module")
        self.others = set[str]()  # Linears without a role; several sub-layers may read what one computes
        # states that the model's own code keeps as (batch · tokens, d)
        self.flat = {n.name for n in kind.traced.graph.nodes if getattr(n.meta.get("example"), "ndim", 0) == 2}

    def items(self) -> list[TemplateSite]:
        items = [TemplateSite(self.layer_site())]
        subs = [sub for sub in self.kind.subs if sub.kind != "untraced"]
        for sub, steps in zip(subs, sub_layer_steps(subs), strict=True):
            sites = self.sub_layer_sites(sub, steps)
            items += [site if isinstance(site, TemplateSite) else TemplateSite(site) for site in sites]
        return items

    def layer_site(self) -> Site:
        first = self.kind.subs[0].res if self.kind.subs else self.stream
        states = {"x": self.state("x", self.graph.stripped(first))}
        result = output_of(self.kind.traced.graph).args[0] if self.kind.is_module else self.end_of_body()
        while isinstance(result, (tuple, list)) and result:
            result = result[0]
        if isinstance(result, fx.Node) and is_tensor(result):  # put there by the layer itself
            last = next((sub for sub in self.kind.subs if sub.add is result), None)
            states["h"] = self.state("h", result) if last is None else self.summand("h", result, last)
        parts = () if self.kind.is_module else tuple(map(self.full, self.kind.parts))
        return replace(self.site((), self.layer, states), parts=parts)

    def end_of_body(self) -> fx.Node:
        """The residual stream behind an iteration of a loop: its last sum, or the norm of that."""
        sub = self.kind.subs[-1]
        return sub.add if sub.output_norm is None else sub.output_norm

    def sub_layer_sites(self, sub: SubLayer, steps: Steps) -> Iterator[Site | TemplateSite]:
        attention, group = sub.attention, f"{self.stack}.{sub.variant}".removesuffix(".")
        states, module = self.sub_layer_states(sub, steps), self.module(sub)
        yield replace(self.site(steps, module, states, group), frozen_modules=self.functions(sub))
        yield from () if sub.calls_again else (*self.routed_sites(sub, steps), *self.linear_sites(sub, steps, group))
        heads = attention_heads(attention) if attention is not None and "q" in states else None
        if heads is not None:
            h = State("h", shapes.Heads(*shape(heads)[2:]), ActivationRef(heads.name))
            yield self.site(steps + (("heads", None),), module, {"h": h, "q": states["q"]}, group=group)
        if sub.hidden is not None and self.is_called_again(str(sub.projections["down"].node.target)):
            yield from [] if sub.calls_again else [self.hidden_of_all_calls(sub, steps + (("hidden", None),))]
        elif sub.hidden is not None:
            hidden = {"h": self.input_of("h", sub.projections["down"])} | ({"x": states["x"]} if "x" in states else {})
            yield self.site(steps + (("hidden", None),), self.owner_of(sub.projections["down"].node), hidden)
        yield from self.norm_sites(sub, steps, group)
        if not sub.is_added_again:  # no sum has it alone
            yield self.site(steps + (("add", None),), self.layer, {"h": self.summand("h", sub.add, sub)}, group=group)

    def hidden_of_all_calls(self, sub: SubLayer, steps: Steps) -> Site:
        """What `down` reads in each of its calls: other streams have the same feed-forward part."""
        # Seen in: no transformers model, but CogView 4
        down = self.linear((), sub.projections["down"])
        site = self.site(steps, down.module, {"h": replace(down.states["x"], name="h")})
        return with_own_graph(replace(site, calls=down.calls, by_example=down.by_example))

    def routed_sites(self, sub: SubLayer, steps: Steps) -> Iterator[Site | TemplateSite]:
        """The router, the Linears of the experts, and those of the networks beside them."""
        if sub.router is not None:
            yield self.router_site(sub.router, steps + (("router", None),))
        for i, experts in enumerate(sub.experts):
            word = "experts" if i == 0 else "shared" if not sub.shared else f"shared_{i}"
            members = tuple(map(self.full, experts.members)) if isinstance(experts, ExpertModules) else ()
            numbers = Numbers(experts.count, len(self.steps + steps), members)
            for role, module, states in expert_states(experts, self.kind.root, self.full):
                site = self.site(steps + ((word, 0), (role, None)), module, states)
                if isinstance(experts, ExpertModules):
                    site = with_own_graph(site)
                    if not members:  # each role has a list of its own
                        numbers = replace(numbers, modules=tuple(map(self.full, experts.linears[role])))
                yield TemplateSite(site, numbers)
        several = len(sub.shared) + len(sub.shared_in_leaf) > 1
        for i, network in enumerate((*sub.shared, *sub.shared_in_leaf)):
            inner = steps + (("shared", i if several else None),)
            for role, linear in network.items():
                at = inner + ((role, None),)
                yield self.linear_in_leaf(at, linear) if isinstance(linear, LinearRows) else self.linear(at, linear)

    def router_site(self, router: Router, steps: Steps) -> Site:
        states, module = router_states(router, self.full), router.weight.rpartition(".")[0]
        if router.inside_leaf and router.logits.op == "call_module":
            return self.linear_in_leaf(steps, LinearRows(module))
        if router.inside_leaf:
            site = self.site(steps, self.full(module), states)
            return site if self.kind.calls(module) else with_own_graph(site)
        states |= {"x": self.state("x", router.x), "h": self.state("h", router.logits)}
        site, product = self.site(steps, self.full(module), states), self.graph.product(router.logits)
        return site if product is None else self.of_product(site, product, None)

    def linear_in_leaf(self, steps: Steps, linear: LinearRows) -> Site:
        """A Linear in a module that could not be traced: it is edited at its own border."""
        name, own = self.full(linear.name), submodule(self.kind.root, linear.name)
        return with_own_graph(self.site(steps, name, linear_states(name, own, linear.rows)))

    def module(self, sub: SubLayer) -> str:
        """The smallest module that contains a sub-layer's Linears, or its other parameters."""
        if names := [self.name_of(p.node) for p in sub.projections.values()]:
            return self.full(common(names))
        used = [n for n in sub.body if is_weighted(n, self.graph) and not self.graph.is_norm(n)]
        return self.full(common([f"{n.target}." if n.op == "call_module" else str(n.target) for n in used]))

    def linear_sites(self, sub: SubLayer, steps: Steps, group: str) -> Iterator[Site]:
        """The Linears of a sub-layer: by role, the others by their own names."""
        for role in ROLES:
            several = [roles[role] for roles in (sub.projections, *sub.heads) if role in roles]
            for i, projection in enumerate(several):
                yield self.linear(steps + ((role, i if len(several) > 1 else None),), projection, group)
        inside = self.module(sub)
        again = {self.name_of(p.node) for p in sub.projections.values()} & set(filter(self.is_called_again, self.calls))
        named = again | self.others  # a role is that of each call
        targets = {n: name for n in sub.linears if (name := self.name_of(n)) not in named}
        self.others.update(targets.values())
        names = {name: relative_name(self.full(name), inside) for name in targets.values()}
        many = Counter(names.values())
        first = {name: n for n, name in reversed(targets.items())}  # call of each
        for full, node in sorted(first.items(), key=lambda item: item[1]):
            inner = named_steps(full if many[names[full]] > 1 else names[full])
            yield self.linear(steps + inner, Projection(node), group)

    def norm_sites(self, sub: SubLayer, steps: Steps, group: str) -> Iterator[Site]:
        named = {self.graph.norm_name(n): n for n in reversed(sub.norms)}
        norms = [n for name, n in named.items() if not (sub.calls_again and self.calls[name] > 1)][::-1]
        owners = numbered([self.norm_owner(n, sub) for n in norms])
        for node, (owner, index) in zip(norms, owners, strict=True):
            inner = ((owner, None),) if owner else ()
            yield self.norm(steps + inner + (("norm", index),), node, group)

    def norm_owner(self, node: fx.Node, sub: SubLayer) -> str:
        roles = (normalized_role(node, attention, self.graph) for attention in sub.attentions)
        return "" if node is sub.output_norm else next(filter(None, roles), "")

    def norm(self, steps: Steps, node: fx.Node, group: str) -> Site:
        """A norm: a module, or code of the layer that scales by a parameter."""
        norm = self.graph.normalization(node)
        if norm is None or norm.weight is None:
            return self.norm_module(self.linear(steps, Projection(node), group), node)
        states = {"w": self.vector_state("w", norm.weight), "h": self.state("h", node)}
        states |= {} if norm.bias is None else {"b": self.vector_state("b", norm.bias)}
        owner = self.full(norm.weight.parameter.rpartition(".")[0])
        return replace(self.site(steps, owner, states, group=group), bare=True)

    def norm_module(self, site: Site, node: fx.Node) -> Site:
        """A norm whose parameters have names of their own, with its `w` and `b`."""
        module = submodule(self.kind.root, str(node.target))
        if not {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
            return site
        parts = norm_parts(module, node)
        own = {name: self.vector_state(name, part, f"{node.target}.") for name, part in parts.items()}
        return replace(site, states={**own, **site.states})

    def vector_state(self, name: str, part: MatrixPart, prefix: str = "") -> State:
        """`w` or `b` of a norm. `prefix`: of the module that `part` is named in."""
        owner, _, attribute = f"{prefix}{part.parameter}".rpartition(".")
        ref = WeightRef(self.full(owner), attribute, part.rows, layout=part.layout)
        return State(name, shapes.Vector(part.rows.width if part.rows else part.size), weight=ref)

    def sub_layer_states(self, sub: SubLayer, steps: Steps) -> dict[str, State]:
        states = {"h": self.summand("h", sub.h, sub), "res": self.summand("res", sub.res, sub)}
        last = "down" if sub.attention is None else "o"
        if last in sub.projections and self.graph.stripped(sub.h) is self.graph.output_of(sub.projections[last].node):
            states["h"] = replace(states["h"], linear=path_of(self.steps + steps + ((last, None),)))
        if sub.x is not None:
            x, readers = self.in_batches(sub.x, sub.h), [p.node for p in sub.projections.values()]
            states["x"] = self.state("x", x, dims=dim_read_by(readers, x, self.graph))
        if sub.context is not None:
            states["c"] = state = self.state("c", sub.context)
            if sub.variant == "cross" and isinstance(state.shape, shapes.Tokens):
                states["c"] = replace(state, shape=replace(state.shape, of="context"))
        if sub.hidden is not None:
            states["z"] = self.input_of("z", sub.projections["down"])
        if len(sub.attentions) == 1:  # of several, each has its own
            states |= self.attention_states(sub.attentions[0], q_width(sub.projections, self.graph))
        elif sub.attentions and (pair := self.shared_pair(sub)) is not None:
            states["kv"] = pair
        return states

    def in_batches(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A value before a reshape, where that has as many dimensions as `like`."""
        # Seen in: ERNIE 4.5, LFM2 MoE, Qwen2 MoE
        before: fx.Node | None = node
        while before is not None and len(shape(before)) != len(shape(like)):
            before = self.graph.passes_through(before)
        return node if before is None else before

    def attention_states(self, attention: Attention, q_width: int | None) -> dict[str, State]:
        """q, k, v and kv as the attention gets them."""
        if attention.call in self.cache:
            return self.cache[attention.call]
        states = self.cache[attention.call] = dict[str, State]()
        for name, node in zip("qkv", (attention.q, attention.k, attention.v), strict=True):
            sizes = shape(node)
            if len(sizes) == 4 and attention.sort in CALLS and separates(node, -1, self.graph):
                rows = shapes.Rows(sizes[1], sizes[3], "queries" if name == "q" else "keys")
                states[name] = State(name, rows, ActivationRef(f"{attention.call.name}.{name}"))
        if (pair := pair_shape(attention, q_width, self.graph)) is not None:
            states["kv"] = State("kv", pair, ActivationRef(f"{attention.call.name}.kv"))
        return states

    def shared_pair(self, sub: SubLayer) -> State | None:
        """The rows that can be joined to the keys and values of each of several attentions."""
        # Seen in: ProphetNet, whose two streams of queries share keys
        written = all(a.sort == "written" for a in sub.attentions)
        width = q_width(sub.projections, self.graph)
        pairs = {pair_shape(a, width, self.graph) for a in sub.attentions} if written else set()
        first, *others = (a.call for a in sub.attentions)
        pair = pairs.pop() if len(pairs) == 1 else None
        if pair is None or any(n.meta["origin"][0] != first.meta["origin"][0] for n in others):
            return None
        return State("kv", pair, ActivationRef(f"{first.name}.kv", other_nodes=tuple(n.name for n in others)))

    def functions(self, sub: SubLayer) -> dict[str, str]:
        norms = [n for n in sub.norms if n.op == "call_module"]
        norm = sub.output_norm if sub.output_norm in norms else None
        norm = norm or next((n for n in norms if not self.norm_owner(n, sub)), None)
        return {"norm": self.full(str(norm.target))} if norm is not None else {}

    def linear(self, steps: Steps, projection: Projection, group: str = "") -> Site:
        """A Linear or norm, or a part of the rows of a fused Linear."""
        node, rows = projection.node, projection.rows
        if (product := self.graph.product(node)) is not None:
            return self.bare_linear(steps, product, rows, group)
        name, module = self.full(str(node.target)), submodule(self.kind.root, str(node.target))
        if reads_patches(module):
            states = patch_states(name, module, shape(first_input(node)), shape(node))
            site = replace(self.site(steps, name, states, group=group), calls=self.calls[str(node.target)])
            return with_own_graph(site)
        states = weight_states(name, module, rows)
        if (source := first_input(node)) is not None:
            states["x"] = self.state("x", source, dims=dim_of_input(node, self.graph))
        states["h"] = self.state("h", node, rows)
        site = replace(self.site(steps, name, states, group=group), calls=self.calls[str(node.target)])
        if not self.is_called_again(str(node.target)):
            return site
        calls = [call for call in self.kind.traced.calls if call.name == str(node.target)]
        by_example = reads_examples(n for n in self.kind.traced.graph.nodes if n.target == node.target)
        states = boundary_states(states, {"x": source, "h": node}, calls)
        return with_own_graph(replace(site, states=states, by_example=by_example, layer_input=None))

    def is_called_again(self, name: str) -> bool:
        """Whether the layer calls a module several times, and never reads its weight itself."""
        return self.calls[name] > 1 and self.calls[name] == sum(call.name == name for call in self.kind.traced.calls)

    def bare_linear(self, steps: Steps, product: MatrixProduct, rows: Slice | None, group: str) -> Site:
        """A matrix that code multiplies by itself: a parameter, or some of its rows."""
        states = {"w": self.part_state("w", product.weight, rows, product.d_in.width(shape(product.x)))}
        joined = product.bias_of(rows)
        if joined is not None and joined.parameter is not None:
            states["b"] = self.part_state("b", joined.parameter, None)
        elif product.bias is not None:
            states["b"] = self.part_state("b", product.bias, rows)
        states["x"] = self.state("x", product.x, dims=product.d_in)
        states["h"] = self.state("h", product.result, rows, product.d_out)
        owner = self.full(product.weight.parameter.rpartition(".")[0])
        return self.of_product(self.site(steps, owner, states, group=group), product, rows)

    def of_product(self, site: Site, product: MatrixProduct, rows: Slice | None) -> Site:
        """A site whose `x` and `h` are those of a product in code."""
        own, joined = site.states["w"].weight, product.bias_of(rows)
        calls = self.graph.product_count(product.weight.parameter, None if own is None else own.rows)
        constant = self.full(joined.constant) if joined is not None and joined.constant else ""
        is_computed = joined is None and product.has_computed_bias
        is_read = self.graph.is_read_besides(product.weight.parameter)
        site = replace(site, calls=calls, bare=True, read_besides=is_read)
        return replace(site, computed_bias=is_computed, constant_bias=constant)

    def input_of(self, name: str, projection: Projection) -> State:
        """What a Linear reads."""
        padded, product = self.graph.input_of(projection.node), self.graph.product(projection.node)
        source = unpadded_input(projection.node, self.graph)
        assert source is not None
        dims = dim_of_input(projection.node, self.graph) if product is None else product.d_in
        state = self.state(name, source, dims=dims)
        if source is padded or state.activation is None:
            return state
        return replace(state, activation=replace(state.activation, before_padding=True))

    def part_state(self, name: str, part: MatrixPart, rows: Slice | None, d_in: int = 0) -> State:
        """`w` or `b` of some of the features that rows of a parameter compute."""
        owner, _, attribute = part.parameter.rpartition(".")
        own = rows_within(part.rows, rows, part.size)
        width = own.width if own is not None else part.size
        shape = shapes.Weight(width, d_in) if name == "w" else shapes.Vector(width)
        is_transposed = part.layout is not None and part.layout.is_transposed
        layout = None if is_transposed else part.layout
        return State(name, shape, weight=WeightRef(self.full(owner), attribute, own, is_transposed, layout=layout))

    def name_of(self, linear: fx.Node) -> str:
        """The module of a Linear in the layer, or its parameter."""
        product = self.graph.product(linear)
        return str(linear.target) if product is None else product.weight.parameter.removesuffix(".weight")

    def owner_of(self, linear: fx.Node) -> str:
        """The module of a Linear in the model, or that of its parameter."""
        product = self.graph.product(linear)
        return self.full(str(linear.target) if product is None else product.weight.parameter.rpartition(".")[0])

    def summand(self, name: str, node: fx.Node, sub: SubLayer) -> State:
        """A summand or the sum of a sub-layer: its features are where those of the stream are."""
        same = len(shape(node)) == len(shape(sub.add))
        return self.state(name, node, dims=stream_dim((sub.res, sub.add), self.graph) if same else None)

    def state(
        self, name: str, node: fx.Node, rows: Slice | None = None, dims: FeatureDims | int | None = None
    ) -> State:
        """A state at a node. `dims`: where its features are, if what reads or computes it tells."""
        key = (name, node, rows, dims)
        if key not in self.cache and isinstance(dims, FeatureDims) and not dims.is_plain:
            tokens = shapes.Tokens(rows.width if rows else dims.width(shape(node)))
            self.cache[key] = State(name, tokens, ActivationRef(node.name, rows, dims=dims))
        if key not in self.cache:
            sizes, own = shape(node), features_dim(node, self.graph)
            dim = dims if isinstance(dims, int) else own
            tokens, is_map = shapes.Tokens(rows.width if rows else sizes[dim]), dim < len(sizes) - 1
            self.cache[key] = State(name, tokens, ActivationRef(node.name, rows, is_map, by_reader=dim != own))
        return self.cache[key]

    def site(self, steps: Steps, module: str, states: dict[str, State], group: str = "") -> Site:
        steps = self.steps + steps
        flat = any(s.activation is not None and s.activation.node in self.flat for s in states.values())
        stream = self.state("stream", self.stream) if flat else None
        path, group = path_of(steps), group or self.stack
        return Site(path, steps, module, self.root, self.kind.key, states, group=group, layer_input=stream)

    def full(self, name: str) -> str:
        return f"{self.root}.{name}".strip(".")


def with_own_graph(site: Site) -> Site:
    """The site as one whole module, whose call the graph of the layer does not have."""
    return replace(site, root=site.module, kind=site.module)
