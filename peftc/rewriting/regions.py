"""Chooses, for each edit, the smallest module that contains every hidden state it reads or writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from peftc.addressing.paths import stack_steps
from peftc.addressing.sites import INPUT, OUTPUT, ActivationRef, Site, State
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.shapes import Tokens
from peftc.planning import ir
from peftc.recognition.layers import LayerType
from peftc.rewriting.anchors import Anchor, calls_of, contains, frames_between, relative
from peftc.rewriting.edits import Bound, Region, RegionEdit, depth, frozen_modules, slug, together, used_states, written
from peftc.rewriting.legality.fast_paths import callers, has_fast_path
from peftc.rewriting.legality.gradients import check_gradients
from peftc.rewriting.legality.parameter_reads import own_parameters, parameter_reads
from peftc.rewriting.states import comes_apart, definitions, may_write, node_of, overwritten, state_anchors, state_of
from peftc.runtime.parameters import stacked_slice
from peftc.tracing.bytecode import mutates_conditionally
from peftc.tracing.module_calls import forward_signature


@dataclass(frozen=True)
class _Choice:
    region: str  # relative to the layer
    inline: frozenset[str]  # relative to the layer
    anchors: dict[str, Anchor]  # relative to the layer


class LayerRegions:
    """The regions of one layer, for the edits placed in it. Choices are remembered by kind of layer and edit.

    `shared`: groups of dotted names that are one module.
    """

    def __init__(
        self,
        kind: LayerType,
        layer: str,
        memory: dict[tuple[object, ...], Any],
        shared: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self.kind, self.layer, self.memory = kind, layer, memory
        self.shared = {
            relative(name, layer): group for group in shared for name in group if f"{name}.".startswith(f"{layer}.")
        }

    def regions(self, placed: Iterable[ir.SiteEdit]) -> list[Region]:
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

    def whole(self, placed: Iterable[ir.SiteEdit]) -> list[RegionEdit]:
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
        # a module whose parameters alone are used is entered where they are
        nodes = (n for n in self.kind.traced.graph.nodes if n.op == "call_module")
        callers = {str(n.target): str(n.meta["origin"][0]) for n in nodes}
        callers |= {c.name: c.caller for c in self.kind.traced.calls}
        found = {inner}
        while inner != outer:
            inner = callers.get(inner, inner.rpartition(".")[0])  # one that nothing calls has its parameters read
            found.add(inner)
        return frozenset(found)

    def home(self, region: str, groups: list[tuple[str, frozenset[str]]]) -> str:
        if any(region == r for r, _ in groups):
            return region
        return next(r for r, inline in groups if region in inline)

    def edit(self, placed: ir.SiteEdit, choice: _Choice, region: str) -> RegionEdit:
        states = {
            name: self.bound(state_of(placed.site, name), anchor, region, placed.site)
            for name, anchor in self.anchored(placed, choice, region).items()
        }
        functions = {f: relative(relative(m, self.layer), region) for f, m in frozen_modules(placed).items()}
        keys = tuple(i.key for i in placed.instances)
        return RegionEdit(placed.edit, slug(placed), placed.assigns, states, functions, keys, placed.lets)

    def bound(self, state: State, anchor: Anchor | None, region: str, site: Site) -> Bound:
        if state.weight is not None:
            module = relative(state.weight.module, self.layer)
            stored = getattr(self.kind.root.get_submodule(module), state.weight.attribute)
            stacked = state.weight.stacked_slice
            if stacked is not None:
                stored = stacked_slice(stored, stacked.count, stacked.index)
                stacked = replace(stacked, reader="")
            width = stored.shape[-1 if state.weight.transposed else 0]
            return Bound(
                width=width, weight=replace(state.weight, module=relative(module, region), stacked_slice=stacked)
            )
        assert anchor is not None
        assert state.activation is not None
        rows = state.activation.rows
        node = node_of(state, self.layer, site, self.kind.traced)
        example = node.meta["example"]
        flat = site.layer_input is not None and isinstance(state.shape, Tokens) and example.ndim == 2
        width = example.shape[-1] if rows else 0
        defining, also = self.named(state, anchor, region, site)
        shape = map_of(state, site, example)
        bound = Bound(anchor.relative(region), rows, width, flat=flat, map=shape, defining=defining, also=also)
        return replace(bound, overwritten=overwritten(anchor, region, node))

    def named(
        self, state: State, anchor: Anchor, region: str, site: Site
    ) -> tuple[tuple[Anchor, ...], tuple[Anchor, ...]]:
        """The anchors in a region that define a state, and all that name it there; two of its own arguments need not be one."""
        if anchor.kind == "argument":
            return (), ()
        own = (relative(site.module, self.layer), site.steps[stack_steps([n for n, _ in site.steps]) + 1 :])
        key = ("named", id(self.kind), own, state, anchor, region)
        if key not in self.memory:
            defining, taken = definitions(state, self.layer, site, self.kind)
            known = state_anchors(state, self.layer, site, self.kind.traced)
            others = [a for a in known if a == anchor or a.kind == "node" or a.module != region]
            sure = [a for a in others if not any(comes_apart(a, end, self.kind.traced) for end in taken)]
            others = sure or others
            self.memory[key] = self.inside(region, defining), self.inside(region, [*others, *taken])
        return self.memory[key]

    def inside(self, region: str, found: list[Anchor]) -> tuple[Anchor, ...]:
        """The anchors that are in a region, as seen from it."""
        return tuple(a.relative(region) for a in found if frames_between(region, a, self.kind.traced) is not None)

    def anchored(self, placed: ir.SiteEdit, choice: _Choice, region: str) -> dict[str, Anchor | None]:
        if region == choice.region and choice.anchors:
            return {n: choice.anchors.get(n) for n in used_states(placed)}
        found: dict[str, Anchor | None] = {}
        for name in used_states(placed):
            state = state_of(placed.site, name)
            if state.weight is not None:
                found[name] = None
                continue
            options = self.options(state, name in written(placed), region, placed.site)
            found[name] = self.nearest(options, state, placed.site)[0] if options else None
        return found

    def choice(self, group: list[ir.SiteEdit]) -> _Choice:
        """The region for edits that have to be applied in one place."""
        states = {n: state_of(p.site, n) for p in group for n in used_states(p)}
        writes = {n for p in group for n in written(p)}
        functions = {relative(m, self.layer) for p in group for m in frozen_modules(p).values()}
        barred = self.barred(group)
        key = (
            id(self.kind),
            barred,
            group[0].site.steps[stack_steps([name for name, _ in group[0].site.steps]) + 1 :] or group[0].site.path,
            *map(tuple, map(sorted, (states, writes, functions))),
        )
        if key not in self.memory:
            self.memory[key] = self.choose(group, states, writes, functions, barred)
        return self.memory[key]

    def barred(self, group: list[ir.SiteEdit]) -> frozenset[str]:
        """The modules in which the edits cannot be: they are used elsewhere, too, where these edits are not."""
        modules = group[0].modules  # edits together are at one site

        def covered(name: str) -> bool:
            return any(contains(name, module) or contains(module, name) for module in modules)

        return frozenset(own for own, names in self.shared.items() if not all(map(covered, names)))

    def choose(
        self,
        group: list[ir.SiteEdit],
        states: dict[str, State],
        writes: set[str],
        functions: set[str],
        barred: frozenset[str],
    ) -> _Choice:
        traced, site = self.kind.traced, group[0].site
        check_gradients([(n, nodes) for n in sorted(writes) if (nodes := self.users(states[n], site))], traced.graph)
        readers = {
            s.weight.stacked_slice.reader
            for s in states.values()
            if s.weight is not None and s.weight.stacked_slice is not None
        }
        if readers:  # what a parameter's pieces are is not seen in the code of its module, which is run as it is
            return _Choice(relative(readers.pop(), self.layer), frozenset(), {})
        names = sorted({c.name for c in calls_of(self.kind.traced)}, key=lambda n: (-len(n.split(".")) if n else 0, n))
        for region in names:
            module = self.kind.root.get_submodule(region)
            if region in barred or self.bypassed(region):
                continue
            if next(module.parameters(), None) is None or not all(
                contains(region, f) and f != region for f in functions
            ):
                continue
            choice = self.try_region(region, states, writes, group[0].site)
            if choice is not None:
                return choice
        where = f"of {group[0].site.root} contains all the states that `{group[0].edit}` uses at {group[0].site.path}"
        raise PeftcError(Diagnostic("P401", f"no one module {where}", notes=(f"states: {', '.join(states)}",)))

    def altering(self, region: str, argument: str) -> frozenset[str]:
        """The modules to enter where the code of a region may change an argument in place, in some calls."""
        inside = [c.name for c in self.kind.traced.calls if c.inlined and contains(region, c.name)]
        root = self.kind.root
        forwards = {name: (inspect.unwrap((cls := type(root.get_submodule(name))).forward), cls) for name in inside}
        forwards |= {region: (inspect.unwrap((cls := type(root.get_submodule(region))).forward), cls)} if inside else {}
        writers = [
            n for n, forward in forwards.items() if mutates_conditionally(*forward, argument if n == region else "")
        ]
        return frozenset[str]().union(*(self.path(region, name) for name in writers))

    def bypassed(self, region: str) -> bool:
        """Whether code around a region may read its parameters without calling it: the edits have to be in that code, too."""
        root = self.kind.root
        around = [n for n in callers(region) if not has_fast_path(type(root.get_submodule(n)))]
        names = own_parameters(root.get_submodule(region), region, recurse=True) if around else []
        return any(
            next(parameter_reads(root.get_submodule(n), [relative(name, n) for name in names]), None) for n in around
        )

    def users(self, state: State, site: Site) -> list[fx.Node]:
        """Where the layer computes a state, or what computes with a parameter."""
        traced = self.kind.traced
        if state.weight is None:
            return [node_of(state, self.layer, site, traced)]
        module = relative(state.weight.module, self.layer)
        names = (module, f"{module}.{state.weight.attribute}")
        return [n for n in traced.graph.nodes if n.op in ("call_module", "get_attr") and n.target in names]

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
            found[name], frames = self.nearest(options, state, site)
            inline |= frames
        return _Choice(region, inline, found)

    def nearest(
        self, options: list[tuple[Anchor, frozenset[str]]], state: State, site: Site
    ) -> tuple[Anchor, frozenset[str]]:
        """The option for which the fewest modules are entered; one that defines the state before others."""
        defining, _ = definitions(state, self.layer, site, self.kind)
        return min(options, key=lambda option: (len(option[1]), option[0] not in defining))

    def options(self, state: State, write: bool, region: str, site: Site) -> list[tuple[Anchor, frozenset[str]]]:
        """The anchors of a state that can be used in `region`, each with the modules to enter for it."""
        traced = self.kind.traced
        found: list[tuple[Anchor, frozenset[str]]] = []
        defining, taken = definitions(state, self.layer, site, self.kind)
        for anchor in state_anchors(state, self.layer, site, traced):
            ends = [] if anchor in defining else [e for e in (*defining, *taken) if comes_apart(anchor, e, traced)]
            ways = [frames_between(region, one, traced) for one in (anchor, *ends)]
            if None in ways:
                continue
            frames = frozenset[str]().union(*filter(None, ways))
            if anchor.kind == "in" and anchor.module == region and not frames:
                frames = self.altering(region, str(anchor.key[0]))
            if write and not may_write(anchor, frames, node_of(state, self.layer, site, traced)):
                continue
            found.append((anchor, frames))
        return found


def map_of(state: State, site: Site, example: object) -> Literal["", "second", "last"]:
    """How a state has its image, where one of the site's is an image with d as its second dimension."""
    if state.activation is not None and state.activation.feature_map:
        return "second"
    maps = any(s.activation is not None and s.activation.feature_map for s in site.states.values())
    image = isinstance(example, torch.Tensor) and example.ndim > 3
    return "last" if maps and image and isinstance(state.shape, Tokens) else ""


def module_region(placed: list[ir.SiteEdit], region: str, model: nn.Module) -> Region:
    """The region of edits at a site that is one whole module outside the layers, or of its parameters that `region` reads."""
    module = model.get_submodule(region)
    edits: list[RegionEdit] = []
    inline = frozenset[str]()
    for p in placed:
        states: dict[str, Bound] = {}
        for name in used_states(p):
            state = p.site.states[name]
            if state.weight is not None:
                inner = relative(state.weight.module, region)
                states[name] = Bound(weight=replace(state.weight, module=inner))
                inline |= {".".join(inner.split(".")[:i]) for i in range(inner.count(".") + 2)}
            else:
                assert state.activation is not None
                states[name] = Bound(anchor=boundary(state.activation, module), rows=state.activation.rows)
        functions = {f: relative(m, region) for f, m in frozen_modules(p).items()}
        keys = tuple(i.key for i in p.instances)
        edits.append(RegionEdit(p.edit, slug(p), p.assigns, states, functions, keys, p.lets))
    return Region(region, inline, edits, placed)


def boundary(place: ActivationRef, module: nn.Module) -> Anchor:
    if place.node == OUTPUT:
        return Anchor("out", "", place.key_path)
    assert place.node == INPUT
    return Anchor("in", "", place.key_path or (list(forward_signature(module).parameters)[1],))
