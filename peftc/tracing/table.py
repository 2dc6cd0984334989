"""The sites of a dissected model: canonical paths, states, shapes and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx, nn
from transformers.pytorch_utils import Conv1D

from peftc.forms import shapes
from peftc.tracing import graphs
from peftc.tracing.kinds import Anatomy, LayerKind, example_width
from peftc.tracing.roles import Projection, SubLayer, stream_input
from peftc.tracing.sites import INPUT, OUTPUT, ModuleInfo, Place, Site, Slice, State, WeightRef

Steps = tuple[tuple[str, int | None], ...]


def path_of(steps: Steps) -> str:
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def all_sites(anatomy: Anatomy) -> tuple[Site, ...]:
    """Every site of the model, in model order."""
    found: list[Site] = [*embeddings(anatomy)]
    for stack in anatomy.stacks:
        for i, (name, kind) in enumerate(zip(stack.layers, stack.kinds, strict=True)):
            found += LayerSites(name, kind, ((stack.name, None), ("layer", i)), stack.name).sites()
    found += [*final_norms(anatomy), *heads(anatomy)]
    return tuple(found)


class LayerSites:
    """The sites of one layer."""

    def __init__(self, layer: str, kind: LayerKind, steps: Steps, stack: str) -> None:
        self.layer, self.kind, self.steps, self.stack = layer, kind, steps, stack
        stream = stream_input(kind.traced.graph)
        assert stream is not None
        self.stream = stream
        # states that the model's own code keeps as (batch · tokens, d)
        self.flat = {n.name for n in kind.traced.graph.nodes if getattr(n.meta.get("example"), "ndim", 0) == 2}

    def sites(self) -> list[Site]:
        found = [self.layer_site()]
        for sub, steps in zip(self.kind.subs, sub_layer_steps(self.kind.subs), strict=True):
            found += self.attention_sites(sub, steps) if sub.kind == "attn" else self.ffn_sites(sub, steps)
        return found

    def layer_site(self) -> Site:
        first, output = self.kind.subs[0], next(n for n in self.kind.traced.graph.nodes if n.op == "output")
        states = {"x": self.state("x", graphs.stripped(first.res, self.kind.root))}
        result = output.args[0]
        while isinstance(result, (tuple, list)):
            result = result[0]
        if isinstance(result, fx.Node):
            states["h"] = self.state("h", result)
        return self.site((), self.layer, states)

    def attention_sites(self, sub: SubLayer, steps: Steps) -> Iterator[Site]:
        assert sub.attention is not None
        group = f"{self.stack}.{sub.variant}"
        states = self.sub_layer_states(sub, steps, "o") | self.attention_states(sub.attention)
        module = self.full(common([str(p.node.target) for p in sub.projections.values()]))
        yield self.site(steps, module, states, self.functions(sub), group)
        for role in ("q", "k", "v", "o"):
            if role in sub.projections:
                yield self.linear(steps + ((role, None),), sub.projections[role], group)
        out = next((u for u in sub.attention.users if u.args[1:] == (0,)), None)
        if out is not None and "q" in states:
            yield self.site(
                steps + (("heads", None),), module, {"h": self.state("h", out), "q": states["q"]}, group=group
            )
        yield from self.norm_sites(sub, steps, group)
        yield self.site(steps + (("add", None),), self.layer, {"h": self.state("h", sub.add)}, group=group)

    def ffn_sites(self, sub: SubLayer, steps: Steps) -> Iterator[Site]:
        states = self.sub_layer_states(sub, steps, "down")
        if sub.hidden is not None:
            states["z"] = self.state("z", sub.hidden)
        module = self.full(common([str(p.node.target) for p in sub.projections.values()]))
        yield self.site(steps, module, states, self.functions(sub), self.stack)
        for role in ("gate", "up", "down"):
            if role in sub.projections:
                yield self.linear(steps + ((role, None),), sub.projections[role], self.stack)
        if sub.hidden is not None:
            hidden = {"h": self.state("h", sub.hidden)} | ({"x": states["x"]} if "x" in states else {})
            yield self.site(steps + (("hidden", None),), self.full(str(sub.projections["down"].node.target)), hidden)
        yield from self.norm_sites(sub, steps, self.stack)
        yield self.site(steps + (("add", None),), self.layer, {"h": self.state("h", sub.add)})

    def norm_sites(self, sub: SubLayer, steps: Steps, group: str) -> Iterator[Site]:
        owners = [norm_owner(n, sub, self.kind.root) for n in sub.norms]
        many = Counter(owners)
        seen: Counter[str] = Counter()
        for node, owner in zip(sub.norms, owners, strict=True):
            index = seen[owner] if many[owner] > 1 else None
            seen[owner] += 1
            inner = ((owner, None),) if owner else ()
            yield self.linear(steps + inner + (("norm", index),), Projection(node), group)

    # Parts -------------------------------------------------------------------------------------------------------

    def sub_layer_states(self, sub: SubLayer, steps: Steps, last: str) -> dict[str, State]:
        states = {"h": self.state("h", sub.h), "res": self.state("res", sub.res)}
        if last in sub.projections and graphs.stripped(sub.h, self.kind.root) is sub.projections[last].node:
            linear = path_of(self.steps + steps + ((last, None),))
            states["h"] = replace(states["h"], linear=linear)
        if sub.x is not None:
            states["x"] = self.state("x", sub.x)
        if sub.context is not None:
            states["c"] = state = self.state("c", sub.context)
            if sub.variant == "cross" and isinstance(state.shape, shapes.Tokens):
                states["c"] = replace(state, shape=replace(state.shape, of="context"))
        return states

    def attention_states(self, attention: fx.Node) -> dict[str, State]:
        states: dict[str, State] = {}
        for name, node in zip("qkv", attention.args[2:5], strict=True):
            value = graphs.example(node)
            if isinstance(node, fx.Node) and isinstance(value, torch.Tensor) and value.ndim == 4:
                shape = shapes.Rows(value.shape[1], value.shape[3], "queries" if name == "q" else "keys")
                states[name] = State(name, shape, Place(f"{attention.name}.{name}"))
        if "k" in states and "v" in states and states["k"].shape == states["v"].shape:
            k = states["k"].shape
            assert isinstance(k, shapes.Rows)
            states["kv"] = State("kv", shapes.KeyValue(k.heads, k.d_head), Place(f"{attention.name}.kv"))
        return states

    def functions(self, sub: SubLayer) -> dict[str, str]:
        norm = sub.output_norm or next((n for n in sub.norms if not norm_owner(n, sub, self.kind.root)), None)
        return {"norm": self.full(str(norm.target))} if norm is not None else {}

    def linear(self, steps: Steps, projection: Projection, group: str = "") -> Site:
        """A Linear or norm called at `projection.node`; a part of its rows where the Linear is fused."""
        node, rows = projection.node, projection.rows
        name = self.full(str(node.target))
        states = weight_states(name, self.kind.root.get_submodule(str(node.target)), rows)
        source = graphs.first_input(node)
        if source is not None:
            states["x"] = self.state("x", source)
        states["h"] = self.state("h", node, rows)
        return self.site(steps, name, states, group=group)

    def state(self, name: str, node: fx.Node, rows: Slice | None = None) -> State:
        value = node.meta["example"]
        assert isinstance(value, torch.Tensor)
        if value.ndim == 4:
            return State(name, shapes.Heads(value.shape[2], value.shape[3]), Place(node.name, rows))
        width = rows.stop - rows.start if rows else value.shape[-1]
        return State(name, shapes.Tokens(width), Place(node.name, rows))

    def site(
        self,
        steps: Steps,
        module: str,
        states: Mapping[str, State],
        functions: Mapping[str, str] | None = None,
        group: str = "",
    ) -> Site:
        steps = self.steps + steps
        kind = f"{self.kind.name}@{id(self.kind)}"
        flat = any(s.place is not None and s.place.node in self.flat for s in states.values())
        stream = self.state("stream", self.stream) if flat else None
        path, group = path_of(steps), group or self.stack
        return Site(path, steps, module, self.layer, kind, dict(states), dict(functions or {}), group, stream)

    def full(self, name: str) -> str:
        return f"{self.layer}.{name}".rstrip(".")


def sub_layer_steps(subs: list[SubLayer]) -> list[Steps]:
    """`attn.self`, `attn.cross`, `ffn`; numbered where a layer has several of one sort."""
    names = [("attn", sub.variant) if sub.kind == "attn" else ("ffn", "") for sub in subs]
    many, seen = Counter(names), Counter[tuple[str, str]]()
    found: list[Steps] = []
    for name, variant in names:
        index = seen[name, variant] if many[name, variant] > 1 else None
        seen[name, variant] += 1
        found.append(((name, None), (variant, index)) if variant else ((name, index),))
    return found


def norm_owner(node: fx.Node, sub: SubLayer, root: nn.Module) -> str:
    """`q` or `k` for a norm of queries or keys inside the attention, else empty."""
    if sub.attention is None or node is sub.output_norm:
        return ""
    for role, value in zip("qk", sub.attention.args[2:4], strict=True):
        behind = (
            set(graphs.upstream(value, lambda n: graphs.is_linear(n, root))) if isinstance(value, fx.Node) else set()
        )
        if node in behind:
            return role
    return ""


def weight_states(name: str, module: nn.Module, rows: Slice | None = None) -> dict[str, State]:
    """`w` and `b` of a leaf module, as nn.Linear would store them."""
    found: dict[str, State] = {}
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2:
        transposed = isinstance(module, Conv1D)  # stored (in, out)
        d_out, d_in = weight.shape[::-1] if transposed else weight.shape
        d_out = rows.stop - rows.start if rows else d_out
        found["w"] = State("w", shapes.Weight(d_out, d_in), weight=WeightRef(name, "weight", rows, transposed))
    elif isinstance(weight, nn.Parameter) and weight.ndim == 1:
        found["w"] = State("w", shapes.Vector(weight.shape[0]), weight=WeightRef(name, "weight"))
    if isinstance(bias, nn.Parameter) and bias.ndim == 1:
        width = rows.stop - rows.start if rows else bias.shape[0]
        found["b"] = State("b", shapes.Vector(width), weight=WeightRef(name, "bias", rows))
    return found


def common(names: list[str]) -> str:
    """The deepest module that contains all the named ones."""
    if not names:
        return ""
    split = [n.split(".")[:-1] for n in names]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) != 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


# Outside the layers ------------------------------------------------------------------------------------------------------


def outside(anatomy: Anatomy) -> list[str]:
    """Modules called outside every layer, in the order of their calls."""
    layers = [n + "." for s in anatomy.stacks for n in s.layers]
    return [n for n in anatomy.seen.order if not any((n + ".").startswith(layer) for layer in layers)]


def stack_of(name: str, anatomy: Anatomy) -> str | None:
    """The stack whose own modules `name` belongs to, by the longest shared path."""
    if len(anatomy.stacks) == 1:
        return anatomy.stacks[0].name
    for stack in anatomy.stacks:
        parent = stack.path.rpartition(".")[0]
        if parent and name.startswith(parent + "."):
            return stack.name
    return None


def module_site(name: str, steps: Steps, anatomy: Anatomy, group: str = "") -> Site:
    """A site that is one whole module; its graph is the module's own."""
    module = anatomy.model.get_submodule(name)
    states = weight_states(name, module)
    for state, node, seen in (("x", INPUT, anatomy.seen.inputs), ("h", OUTPUT, anatomy.seen.outputs)):
        shape = seen.get(name)
        if shape and (state == "h" or not isinstance(module, nn.Embedding)):
            states[state] = State(state, shapes.Tokens(shape[-1]), Place(node))
    return Site(path_of(steps), steps, name, name, type(module).__name__, states, {}, group)


def qualified(stack: str | None, steps: Steps) -> Steps:
    return ((stack, None), *steps) if stack else steps


def embeddings(anatomy: Anatomy) -> Iterator[Site]:
    """Token embeddings: the embeddings outside layers as tall as the model's own input embedding."""
    getter = getattr(anatomy.model, "get_input_embeddings", None)
    try:
        own = getter() if getter else None
    except NotImplementedError:
        own = None
    for name in outside(anatomy):
        module = anatomy.model.get_submodule(name)
        if (
            isinstance(module, nn.Embedding)
            and isinstance(own, nn.Embedding)
            and module.weight.shape == own.weight.shape
        ):
            stack = stack_of(name, anatomy)
            yield module_site(name, qualified(stack, (("embed", None),)), anatomy, stack or "")


def final_norms(anatomy: Anatomy) -> Iterator[Site]:
    """The norms of a stack that run after its last layer, before the head."""
    order = {n: i for i, n in enumerate(anatomy.seen.order)}
    for stack in anatomy.stacks:
        last = order[stack.layers[-1]]
        parent = stack.path.rpartition(".")[0]
        found = [
            n
            for n in outside(anatomy)
            if order[n] > last
            and n.startswith(parent + "." if parent else "")
            and graphs.is_norm_module(anatomy.model.get_submodule(n))
            and anatomy.seen.inputs.get(n, (0,))[-1] == example_width(stack.kinds[-1])
        ]
        for i, name in enumerate(found):
            index = i if len(found) > 1 else None
            yield module_site(name, ((stack.name, None), ("norm", index)), anatomy, stack.name)


def heads(anatomy: Anatomy) -> Iterator[Site]:
    """The model's output Linear: its output embeddings, else the last Linear that runs."""
    model, order = anatomy.model, anatomy.seen.order
    getter = getattr(model, "get_output_embeddings", None)
    own = getter() if getter else None
    names = [n for n in outside(anatomy) if n and model.get_submodule(n) is own] if own is not None else []
    if not names and anatomy.stacks:
        last = max(order.index(s.layers[-1]) for s in anatomy.stacks)
        names = [
            n for n in outside(anatomy) if order.index(n) > last and isinstance(model.get_submodule(n), nn.Linear)
        ][-1:]
    for name in names:
        yield module_site(name, (("head", None),), anatomy)


def module_infos(anatomy: Anatomy) -> tuple[ModuleInfo, ...]:
    """Every module of the model with the parameters that are its own."""
    seen = anatomy.seen

    def width(name: str, shapes_seen: Mapping[str, tuple[int, ...]]) -> int | None:
        shape = shapes_seen.get(name, ())
        return shape[-1] if seen.calls.get(name) == 1 and len(shape) in (2, 3) else None

    found: list[ModuleInfo] = []
    for name, module in anatomy.model.named_modules():
        own = {k: tuple(p.shape) for k, p in module.named_parameters(recurse=False)}
        entry = None if isinstance(module, nn.Embedding) else width(name, seen.inputs)
        found.append(ModuleInfo(name, type(module).__name__, own, entry, width(name, seen.outputs)))
    return tuple(found)
