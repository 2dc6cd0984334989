"""Chooses, for each edit, the smallest module that contains every hidden state it reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.shapes import Scalar, Tokens
from peftc.planning import ir
from peftc.rewriting.anchors import Anchor, anchors, calls_of, contains, frames_between, parts, relative
from peftc.tracing.kinds import LayerKind
from peftc.tracing.sites import INPUT, OUTPUT, Site, Slice, State, WeightRef
from peftc.tracing.tracer import Traced, signature_of


STREAM = "<stream>"  # the layer's input, used only for its batch and tokens


@dataclass(frozen=True)
class Bound:
    """A state of an edit, found: by an anchor in its region, or as a parameter. Names are relative to the region.

    Where the state is only some rows of the value, `width` is the number of all its rows.
    """

    anchor: Anchor | None = None
    rows: Slice | None = None
    width: int = 0
    flat: bool = False  # (batch · tokens, d) in the model's own code
    weight: WeightRef | None = None


@dataclass(frozen=True)
class RegionEdit:
    """One edit at one site, as a region sees it. `slug` names the site within the region."""

    edit: str
    slug: str
    assigns: tuple[ir.Assign, ...]
    states: dict[str, Bound]
    functions: dict[str, str]
    keys: tuple[str, ...]
    lets: tuple[tuple[int, ir.Term], ...] = ()

    @property
    def edit_name(self) -> str:
        """The edit's name as an identifier."""
        return self.edit.replace(".", "__")

    @property
    def fingerprint(self) -> str:
        """A text that two edits share exactly if they rewrite a region in the same way."""
        return repr(
            (
                self.edit,
                self.slug,
                self.states,
                self.functions,
                [describe(a) for a in self.assigns],
                [(i, describe_term(t)) for i, t in self.lets],
            )
        )


@dataclass
class Region:
    """A module to rewrite: its dotted name in the model, the modules in it whose code is entered, its edits in order."""

    module: str
    inline: frozenset[str]  # relative names; "" is the region itself; empty: nothing but its boundary is touched
    edits: list[RegionEdit]
    placed: list[ir.Placed] = field(default_factory=list[ir.Placed])


def describe(assign: ir.Assign) -> object:
    return (assign.state, describe_term(assign.value))


def describe_term(term: ir.Term) -> object:
    match term:
        case ir.Read(state=state):
            return state
        case ir.Constant(value=value):
            return value
        case ir.Applied(instance=instance, input=value):
            arguments = sorted(instance.args.items(), key=lambda item: item[0])
            return (instance.key, instance.form.name, arguments, describe_term(value) if value else None)
        case ir.Frozen(function=function, input=value):
            return (function, describe_term(value))
        case ir.Arithmetic(op=op, left=left, right=right):
            return (op, describe_term(left), describe_term(right))
        case ir.Concat(parts=parts):
            return ("concat", *map(describe_term, parts))


def reads(term: ir.Term) -> Iterator[str]:
    match term:
        case ir.Read(state=state):
            yield state
        case ir.Applied(input=value) if value is not None:
            yield from reads(value)
        case ir.Frozen(input=value):
            yield from reads(value)
        case ir.Arithmetic(left=left, right=right):
            yield from reads(left)
            yield from reads(right)
        case ir.Concat(parts=parts):
            for part in parts:
                yield from reads(part)
        case _:
            pass


def frozen_modules(term: ir.Term) -> Iterator[tuple[str, str]]:
    match term:
        case ir.Frozen(function=function, module=module, input=value):
            yield function, module
            yield from frozen_modules(value)
        case ir.Applied(input=value) if value is not None:
            yield from frozen_modules(value)
        case ir.Arithmetic(left=left, right=right):
            yield from frozen_modules(left)
            yield from frozen_modules(right)
        case ir.Concat(parts=parts):
            for part in parts:
                yield from frozen_modules(part)
        case _:
            pass


@dataclass(frozen=True)
class _Choice:
    region: str  # relative to the layer
    inline: frozenset[str]  # relative to the layer
    anchors: dict[str, Anchor]  # relative to the layer


class LayerRegions:
    """The regions of one layer, for the edits placed in it. Choices are remembered by kind of layer and edit."""

    def __init__(self, kind: LayerKind, layer: str, memory: dict[tuple[object, ...], _Choice]) -> None:
        self.kind, self.layer, self.memory = kind, layer, memory

    def regions(self, placed: Iterable[ir.Placed]) -> list[Region]:
        chosen = [(p, c) for group in together(placed) for c in [self.choice(group)] for p in group]
        groups = self.merged([(c.region, c.inline) for _, c in chosen])
        found: list[Region] = []
        for region, inline in groups:
            members = [(p, c) for p, c in chosen if self.home(c.region, groups) == region]
            members.sort(key=lambda item: depth(item[0]))
            name = f"{self.layer}.{region}".rstrip(".")
            edits = [self.edit(p, c, region) for p, c in members]
            entered = frozenset(relative(f, region) if f != region else "" for f in inline)
            found.append(Region(name, entered, edits, [p for p, _ in members]))
        return found

    def whole(self, placed: Iterable[ir.Placed]) -> list[RegionEdit]:
        """The edits as seen from the whole layer."""
        return [self.edit(p, _Choice("", frozenset(), {}), "") for p in sorted(placed, key=depth)]

    def merged(self, chosen: list[tuple[str, frozenset[str]]]) -> list[tuple[str, frozenset[str]]]:
        """Joins a region into one whose code is entered around it."""
        groups: dict[str, frozenset[str]] = {}
        for region, inline in chosen:
            groups[region] = groups.get(region, frozenset()) | inline
        changed = True
        while changed:
            changed = False
            for outer, inline in list(groups.items()):
                for inner in [r for r in groups if r != outer and r in inline]:
                    groups[outer] = groups[outer] | groups.pop(inner) | self.path(outer, inner)
                    changed = True
                if changed:
                    break
        return list(groups.items())

    def path(self, outer: str, inner: str) -> frozenset[str]:
        callers = {c.name: c.frame for c in self.kind.traced.calls}
        found = {inner}
        while inner != outer:
            inner = callers[inner]
            found.add(inner)
        return frozenset(found)

    def home(self, region: str, groups: list[tuple[str, frozenset[str]]]) -> str:
        if any(region == r for r, _ in groups):
            return region
        return next(r for r, inline in groups if region in inline)

    def edit(self, placed: ir.Placed, choice: _Choice, region: str) -> RegionEdit:
        states = {
            name: self.bound(state_of(placed.site, name), anchor, region, placed.site)
            for name, anchor in self.anchored(placed, choice, region).items()
        }
        functions = {
            f: relative(relative(m, self.layer), region) for a in placed.assigns for f, m in frozen_modules(a.value)
        }
        keys = tuple(i.key for i in placed.instances)
        return RegionEdit(placed.edit, slug(placed), placed.assigns, states, functions, keys, placed.lets)

    def bound(self, state: State, anchor: Anchor | None, region: str, site: Site) -> Bound:
        if state.weight is not None:
            module = relative(state.weight.module, self.layer)
            stored = getattr(self.kind.root.get_submodule(module), state.weight.attribute)
            width = stored.shape[-1 if state.weight.transposed else 0]
            return Bound(width=width, weight=replace(state.weight, module=relative(module, region)))
        assert anchor is not None
        assert state.place is not None
        rows = state.place.rows
        example = node_of(state, self.layer, site, self.kind.traced).meta["example"]
        flat = site.stream is not None and isinstance(state.shape, Tokens) and example.ndim == 2
        return Bound(anchor.relative(region), rows, example.shape[-1] if rows else 0, flat=flat)

    def anchored(self, placed: ir.Placed, choice: _Choice, region: str) -> dict[str, Anchor | None]:
        if region == choice.region and choice.anchors:
            return {n: choice.anchors.get(n) for n in used_states(placed)}
        found: dict[str, Anchor | None] = {}
        for name in used_states(placed):
            state = state_of(placed.site, name)
            if state.weight is not None:
                found[name] = None
                continue
            options = self.options(state, name in written(placed), region, placed.site)
            found[name] = min(options, key=lambda o: len(o[1]))[0] if options else None
        return found

    def choice(self, group: list[ir.Placed]) -> _Choice:
        """The region for edits that have to be applied in one place."""
        states = {n: state_of(p.site, n) for p in group for n in used_states(p)}
        writes = {n for p in group for n in written(p)}
        functions = {relative(m, self.layer) for p in group for a in p.assigns for _, m in frozen_modules(a.value)}
        key = (
            id(self.kind),
            group[0].site.steps[2:] or group[0].site.path,
            *map(tuple, map(sorted, (states, writes, functions))),
        )
        if key not in self.memory:
            self.memory[key] = self.choose(group, states, writes, functions)
        return self.memory[key]

    def choose(
        self, group: list[ir.Placed], states: dict[str, State], writes: set[str], functions: set[str]
    ) -> _Choice:
        names = sorted({c.name for c in calls_of(self.kind.traced)}, key=lambda n: (-len(n.split(".")) if n else 0, n))
        for region in names:
            module = self.kind.root.get_submodule(region)
            if next(module.parameters(), None) is None or not all(
                contains(region, f) and f != region for f in functions
            ):
                continue
            choice = self.try_region(region, states, writes, group[0].site)
            if choice is not None:
                return choice
        where = f"of {group[0].site.root} contains all the states that `{group[0].edit}` uses at {group[0].site.path}"
        raise PeftcError(Diagnostic("P401", f"no one module {where}", notes=(f"states: {', '.join(states)}",)))

    def try_region(self, region: str, states: dict[str, State], writes: set[str], site: Site) -> _Choice | None:
        inline: frozenset[str] = frozenset()
        found: dict[str, Anchor] = {}
        for name, state in states.items():
            if state.weight is not None:
                module = relative(state.weight.module, self.layer)
                if not contains(region, module):
                    return None
                inline |= self.path(region, module)
                continue
            options = self.options(state, name in writes, region, site)
            if not options:
                return None
            found[name], frames = min(options, key=lambda option: len(option[1]))
            inline |= frames
        return _Choice(region, inline, found)

    def options(self, state: State, write: bool, region: str, site: Site) -> list[tuple[Anchor, frozenset[str]]]:
        """The anchors of a state that can be used in `region`, each with the modules to enter for it."""
        traced = self.kind.traced
        found: list[tuple[Anchor, frozenset[str]]] = []
        for anchor in state_anchors(state, self.layer, site, traced):
            frames = frames_between(region, anchor, traced)
            if frames is None:
                continue
            if write and not may_write(anchor, frames, node_of(state, self.layer, site, traced)):
                continue
            found.append((anchor, frames))
        return found


def state_of(site: Site, name: str) -> State:
    return site.stream if name == STREAM and site.stream is not None else site.states[name]


def node_of(state: State, layer: str, site: Site, traced: Traced) -> fx.Node:
    """The node of a state in its layer's graph; for a state of an attention call, the call."""
    assert state.place is not None
    name = state.place.node.partition(".")[0]
    if name in (INPUT, OUTPUT):
        return boundary_node(name, relative(site.module, layer), traced)
    return next(n for n in traced.graph.nodes if n.name == name)


def boundary_node(place: str, module: str, traced: Traced) -> fx.Node:
    """The first tensor that a module in a layer takes, or returns."""
    call = next(c for c in calls_of(traced) if c.name == module)
    found = parts(call.arguments if place == INPUT else call.result)
    return next(n for _, n in found if isinstance(n.meta.get("example"), torch.Tensor))


def state_anchors(state: State, layer: str, site: Site, traced: Traced) -> list[Anchor]:
    assert state.place is not None
    argument = state.place.node.partition(".")[2]
    node = node_of(state, layer, site, traced)
    if argument:
        frame, operation, n = node.meta["origin"]
        return [Anchor("argument", frame, (operation, n, argument))]
    return anchors(node, traced)


def may_write(anchor: Anchor, frames: frozenset[str], node: fx.Node) -> bool:
    """Whether a new value there is what everyone who uses the state gets."""
    if anchor.kind == "argument":
        return True
    inside = [u for u in node.users if contains(anchor.module, owner(u))]
    if anchor.kind == "in":
        return bool(anchor.module) and len(inside) == len(node.users)
    if anchor.kind == "out" and not frames:  # written as it leaves the region
        return not inside or not anchor.module
    return node.op != "placeholder"


def owner(node: fx.Node) -> str:
    """The module whose code uses the inputs of `node`: a leaf module itself, else the frame that ran it."""
    return str(node.target) if node.op == "call_module" else str(node.meta.get("origin", ("",))[0])


def together(placed: Iterable[ir.Placed]) -> list[list[ir.Placed]]:
    """Edits of one state at one site stay together: they apply in the order of the spec."""
    groups: list[list[ir.Placed]] = []
    for p in placed:
        mine = [g for g in groups if g[0].site.path == p.site.path and any(written(o) & written(p) for o in g)]
        groups = [g for g in groups if g not in mine]
        groups.append([*(o for g in mine for o in g), p])
    return groups


def depth(placed: ir.Placed) -> int:
    """Sorts Linears before the sub-layers they are in."""
    return -placed.site.path.count(".")


def used_states(placed: ir.Placed) -> list[str]:
    terms = [a.value for a in placed.assigns] + [t for _, t in placed.lets]
    names = dict.fromkeys([*(s for t in terms for s in reads(t)), *(a.state for a in placed.assigns)])
    if placed.site.stream is not None and any(map(per_example, terms)):
        names[STREAM] = None
    return list(names)


def per_example(term: ir.Term) -> bool:
    """Whether a number an example, (batch, 1, 1), is part of a term: then the batch must be a dimension of its own."""
    match term:
        case ir.Applied(instance=instance, input=value):
            own = isinstance(term.shape, Scalar) and term.shape.per_example
            return own or (value is not None and per_example(value))
        case ir.Frozen(input=value):
            return per_example(value)
        case ir.Arithmetic(left=left, right=right):
            return per_example(left) or per_example(right)
        case ir.Concat(parts=terms):
            return any(map(per_example, terms))
        case _:
            return False


def written(placed: ir.Placed) -> set[str]:
    return {a.state for a in placed.assigns}


def slug(placed: ir.Placed) -> str:
    """The site's path below its layer as an identifier: `attn_self_q`; `h` for the layer itself."""
    steps = placed.site.steps
    cut = next((i + 1 for i, (name, _) in enumerate(steps) if name == "layer"), 0)
    words = [name if index is None else f"{name}_{index}" for name, index in steps[cut:]]
    text = "_".join(words) or "layer"
    return "".join(c if c.isalnum() else "_" for c in text)


def module_region(placed: list[ir.Placed], module: nn.Module) -> Region:
    """The region of edits at a site that is one whole module outside the layers."""
    edits: list[RegionEdit] = []
    inline = False
    for p in placed:
        states: dict[str, Bound] = {}
        for name in used_states(p):
            state = p.site.states[name]
            if state.weight is not None:
                states[name] = Bound(weight=replace(state.weight, module=""))
                inline = True
            else:
                assert state.place is not None
                states[name] = Bound(anchor=boundary(state.place.node, module), rows=state.place.rows)
        functions = {f: relative(m, p.site.root) for a in p.assigns for f, m in frozen_modules(a.value)}
        keys = tuple(i.key for i in p.instances)
        edits.append(RegionEdit(p.edit, slug(p), p.assigns, states, functions, keys, p.lets))
    return Region(placed[0].site.root, frozenset({""} if inline else ()), edits, placed)


def boundary(node: str, module: nn.Module) -> Anchor:
    if node == OUTPUT:
        return Anchor("out", "", ())
    assert node == INPUT
    first = list(signature_of(module).parameters)[1]
    return Anchor("in", "", (first,))
