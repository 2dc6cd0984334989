"""A layer without edits: the residual stream, sub-layers on it, and the parts of those entered.

What follows what is read off the names of values: two states of one name are one value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peftc.addressing.paths import BRANCHES, index_ranges
from peftc.addressing.site_list import TemplateSite, show_steps
from peftc.addressing.sites import Site, Steps
from peftc.pictures.graph import Builder, Change, Content, Edge, EdgeKind
from peftc.pictures.slots import Reading, Slot

FIRST = frozenset({"q", "k", "v", "gate", "up"})
LAST = frozenset({"o", "down"})
CORES = {"heads": "attention", "hidden": "activation"}
INSIDE = frozenset({"q", "k", "v", "kv", "z"})  # states of a sub-layer that are between its parts

Value = tuple[object, ...] | None
End = Slot | Reading | str


@dataclass(frozen=True)
class Arrow:
    """An edge whose source is known after all edits."""

    source: End
    target: str
    kind: EdgeKind = "flow"
    change: Change | None = None
    label: bool = False
    heads: bool = True


@dataclass(frozen=True)
class Part:
    """A site of a layer, by its steps below the layer. `numbers`: of the networks it stands for."""

    tail: Steps
    site: Site
    numbers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.tail[-1][0] if self.tail else "layer"


@dataclass
class Sketch:
    """Draws a layer, and says where its states are.

    Attributes:
        entered: the steps below which an edit is, so that parts are drawn.
        touched: the steps at which an edit is.
        slots: each state by the steps of its site and its name.
        boxes: the node that stands for a site, by its steps.
    """

    entered: Collection[Steps] = ()
    touched: Collection[Steps] = ()
    build: Builder = field(default_factory=Builder)
    slots: dict[tuple[Steps, str], Slot] = field(default_factory=dict)
    boxes: dict[Steps, str] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list[Arrow])
    spine: list[Slot] = field(default_factory=list[Slot])
    skipped: set[str] = field(default_factory=set[str])  # joints of what reads the value that it is added to
    hosts: dict[str, str] = field(default_factory=dict[str, str])  # of a node that is added: the one beside it
    frames: dict[Steps, str] = field(default_factory=dict)
    touched_states: Collection[tuple[Steps, str]] = ()
    _values: dict[Value, Slot] = field(default_factory=dict)
    _sums: dict[int, tuple[Slot, Slot]] = field(default_factory=dict)  # by `id` of what they are added to

    def draw(self, parts: Sequence[Part]) -> None:
        """All parts of a layer, in model order."""
        layer = next((part for part in parts if not part.tail), None)
        start = self.build.add("stream", "x", title="what the layer reads")
        current = self.on_spine(Slot(start))
        if layer is not None:
            self._values[value_of(layer.site, "x")] = current
        self.slots[(), "x"] = current
        groups: dict[Steps, list[Part]] = {}
        for part in parts:
            if part.tail:
                groups.setdefault(head_of(part.tail), []).append(part)
        for head, members in groups.items():
            is_owner = any(part.tail == head and set(part.site.states) - {"w", "b"} for part in members)
            if is_owner and head[-1][0] not in ("norm", "add"):
                current = self._sub_layer(head, members, current)
        end = self.on_spine(Slot(current))
        self.slots[(), "h"] = end
        self.arrow(end, self.build.add("stream", "h", title="what the layer computes"), "spine")

    def on_spine(self, slot: Slot) -> Slot:
        self.spine.append(slot)
        return slot

    def arrow(self, source: End, target: str, kind: EdgeKind = "flow", heads: bool = True) -> None:
        self.arrows.append(Arrow(source, target, kind, heads=heads))

    # Sub-layers

    def _sub_layer(self, head: Steps, parts: Sequence[Part], current: Slot) -> Slot:
        """Draws a sub-layer; the stream behind it."""
        owner = next(part for part in parts if part.tail == head)
        norms = [part for part in parts if part.name == "norm" and part.tail[:-1] == head]
        site, own = owner.site, value_of(owner.site, "x")
        origin = self._values.get(value_of(site, "res"), current)
        before = [norm for norm in norms if value_of(norm.site, "h") == own != None]  # noqa: E711
        source = self._values.get(own, origin)
        for norm in before:
            source = self._norm(norm, self._values.get(value_of(norm.site, "x"), origin))
        branch = Slot(self._body(owner, parts, source, origin))
        self.slots[head, "h"] = branch
        self.slots.setdefault((head, "res"), origin)
        behind = [n for n in norms if n not in before and value_of(n.site, "x") == value_of(site, "h")]
        for norm in behind:
            branch = self._norm(norm, branch)
        total = next((part for part in parts if part.name == "add" and part.tail[:-1] == head), None)
        current = self._sum(site, total, origin, branch, current) if "res" in site.states else branch
        for norm in norms:
            if norm not in before and norm not in behind:
                current = self.on_spine(self._norm(norm, current, "spine"))
        return current

    def _norm(self, part: Part, source: Slot, kind: EdgeKind = "flow") -> Slot:
        node = self.build.add("norm", "norm", title=title_of(part))
        self.arrow(source, node, kind)
        slot = Slot(node)
        self.boxes[part.tail] = node
        self.slots[part.tail, "x"], self.slots[part.tail, "h"] = source, slot
        self._values[value_of(part.site, "h")] = slot
        return slot

    def _sum(self, site: Site, total: Part | None, origin: Slot, branch: Slot, current: Slot) -> Slot:
        """The residual stream behind a sub-layer: one sum for sub-layers side by side."""
        node_of_sum = self._sums.get(id(origin))
        if node_of_sum is not None and node_of_sum[1] is current:
            join, slot = node_of_sum
            self.arrow(branch, join.tip)
        else:
            node = self.build.add("join", "+", title="the residual sum")
            self.arrow(origin, node, "spine")
            self.arrow(branch, node)
            join = Slot(node)
            slot = self.on_spine(Slot(join))
            self._sums[id(origin)] = join, slot
        if total is not None:
            self._values[value_of(total.site, "h")] = slot
            self.slots[total.tail, "h"] = slot
        return slot

    # What is inside

    def _body(self, owner: Part, parts: Sequence[Part], source: Slot, origin: Slot) -> Slot:
        head, name = owner.tail, show_steps(owner.tail)
        frame = ""
        if head in self.entered:
            frame = self.frames[head] = self.build.frame(name, title=title_of(owner))
        if head in self.entered or head in self.touched:
            point = self.build.add("point", frame=frame, title="x")
            self.arrow(source, point, heads=False)
            source = Slot(point)
        self.slots[head, "x"] = source
        context = source
        if "c" in owner.site.states and value_of(owner.site, "c") != value_of(owner.site, "x"):
            context = Slot(self.build.add("stream", "c", title="the context: the source of keys and values"))
            self.arrows.append(Arrow(origin, context.tip, "order"))  # above what comes before
            if frame:
                point = self.build.add("point", frame=frame, title="c")
                self.arrow(context, point, heads=False)
                context = Slot(point)
        self.slots[head, "c"] = context
        if head in self.entered:
            return self.parts(head, owner.site, parts, (source, context), frame)
        box = self.boxes[head] = self.build.add("box", name, title=title_of(owner))
        self.arrow(source, box)
        if context is not source:
            self.arrow(context, box)
        return Slot(box)

    def parts(
        self, head: Steps, owner: Site | None, parts: Sequence[Part], inputs: tuple[Slot, Slot], frame: str
    ) -> Slot:
        """The parts of a sub-layer: those that read its input, what is between, and the last."""
        source, _ = inputs
        own = [part for part in parts if len(part.tail) == len(head) + 1 and part.tail[:-1] == head]
        own = [part for part in own if part.name not in ("norm", "add")]
        nested = nested_of(head, parts)
        stages = {part.tail: stage_of(part, owner, (*parts,)) for part in own}
        first = [self._linear(p, inputs, owner, parts, frame) for p in own if stages[p.tail] == "first"]
        cores = [part for part in own if stages[part.tail] == "core"]
        networks = [self._network(steps, nested[steps], source, frame) for steps in nested]
        core = self._core(head, owner, cores, [*first, *networks], bool(networks), frame)
        for part in cores:
            self.slots[part.tail, "h"], self.slots[part.tail, "x"] = core, source
            for state in ("q", "k", "v", "kv"):
                if (head, state) in self.slots:
                    self.slots[part.tail, state] = self.slots[head, state]
        self.slots.setdefault((head, "z"), core)
        ends = [self._last(p, core, frame) for p in own if stages[p.tail] == "last"]
        return self._merged(ends, frame) if ends else core

    def _linear(
        self, part: Part, inputs: tuple[Slot, Slot], owner: Site | None, parts: Sequence[Part], frame: str
    ) -> Slot:
        source, context = inputs
        if owner is not None and "c" in owner.states and value_of(part.site, "x") == value_of(owner, "c"):
            source = context
        slot = self._box(part, source, frame)
        for norm in (p for p in parts if p.name == "norm" and p.tail[:-1] == part.tail):
            node = self.boxes[norm.tail] = self.build.add("norm", "norm", frame=frame, title=title_of(norm))
            self.arrow(slot, node)
            self.slots[norm.tail, "x"] = slot
            slot = self.slots[norm.tail, "h"] = Slot(node)
        head = part.tail[:-1]
        if part.name in ("q", "k", "v"):
            slot = self.slots[head, part.name] = Slot(slot)
        return slot

    def _last(self, part: Part, core: Slot, frame: str) -> Slot:
        return self._box(part, core, frame)

    def _box(self, part: Part, source: Slot, frame: str) -> Slot:
        node = self.boxes[part.tail] = self.build.add("box", part.name, frame=frame, title=title_of(part))
        self.arrow(source, node)
        slot = Slot(node)
        self.slots[part.tail, "x"], self.slots[part.tail, "h"] = source, slot
        return slot

    def _core(
        self, head: Steps, owner: Site | None, cores: Sequence[Part], inputs: Sequence[Slot], sums: bool, frame: str
    ) -> Slot:
        """What brings the first parts together: an attention, an activation, or a sum."""
        states = {} if owner is None else owner.states
        name = next((CORES[part.name] for part in cores if part.name in CORES), "")
        name = name or (
            "attention" if "q" in states else "activation" if "z" in states or head[-1][0] != "attn" else ""
        )
        if not inputs:
            return self.slots[head, "x"]
        if sums:
            node = self.build.add("join", "Σ", frame=frame, title="the sum of the networks, weighed by the router")
        elif name:
            node = self.build.add("box", name, frame=frame, title=name)
        else:
            return self._merged(inputs, frame)
        keys = [self.slots.get((head, state)) for state in ("k", "v")]
        if all(keys) and name == "attention" and (head, "kv") in self.touched_states:
            pair = self.build.add("point", frame=frame, title="kv")
            for slot in keys:
                self.arrow(slot or "", pair, heads=False)
            self.slots[head, "kv"] = Slot(pair)
            inputs = [*(slot for slot in inputs if slot not in keys), self.slots[head, "kv"]]
        for slot in inputs:
            self.arrow(slot, node)
        return Slot(node)

    def _network(self, steps: Steps, parts: Sequence[Part], source: Slot, frame: str) -> Slot:
        """Networks that look alike, such as experts, as one frame or box."""
        name, numbers = steps[-1][0], parts[0].numbers
        text = f"{name}[{index_ranges(numbers)}] × {len(numbers)}" if len(numbers) > 1 else show_steps(steps[-1:])
        if steps in self.entered:
            own = self.frames[steps] = self.build.frame(text, frame, stacked=len(numbers) > 1)
            point = self.build.add("point", frame=own, title="x")
            self.arrow(source, point, heads=False)
            self.slots[steps, "x"] = Slot(point)
            return self.parts(steps, None, parts, (Slot(point), Slot(point)), own)
        kind = "stack" if len(numbers) > 1 else "box"
        node = self.boxes[steps] = self.build.add(kind, text, frame=frame, title=show_steps(steps))
        self.arrow(source, node)
        self.slots[steps, "x"], self.slots[steps, "h"] = source, Slot(node)
        return self.slots[steps, "h"]

    def frame_at(self, tail: Steps, state: str) -> str:
        """The frame for what an edit adds at a site."""
        inside = state in INSIDE
        return next(
            (f for n in range(len(tail), -1, -1) if (inside or n < len(tail)) and (f := self.frames.get(tail[:n]))), ""
        )

    def finish(self) -> Content:
        """The content, with all edges: their sources are known now."""
        spine = {id(slot) for slot in self.spine}
        slots = {id(slot): slot for slot in [*self.slots.values(), *self._sources()]}
        for slot in slots.values():
            for i, node in enumerate(slot.joints):
                kind = "spine" if id(slot) in spine else "skip" if node in self.skipped else "flow"
                self.build.edges.append(Edge(slot.before(i), node, kind))
        for arrow in self.arrows:
            source = arrow.source
            source = source if isinstance(source, str) else source.tip if isinstance(source, Slot) else source.node
            self.build.edges.append(Edge(source, arrow.target, arrow.kind, arrow.change, arrow.label, arrow.heads))
        self.build.edges.sort(key=self._order)
        return self.build.content()

    def _order(self, edge: Edge) -> tuple[int, float, int]:
        """From the left: the stream, then each part with what is added at it behind it."""
        first = {"spine": 0, "skip": 1}.get(edge.kind, 2)
        own = int(edge.target[1:])
        return first, int(self.hosts[edge.target][1:]) if edge.target in self.hosts else own, own

    def _sources(self) -> Iterator[Slot]:
        for arrow in self.arrows:
            slot = arrow.source.slot if isinstance(arrow.source, Reading) else arrow.source
            while isinstance(slot, Slot):
                yield slot
                slot = slot.source

    def _merged(self, slots: Sequence[Slot], frame: str) -> Slot:
        if len(slots) == 1:
            return slots[0]
        node = self.build.add("join", "+", frame=frame)
        for slot in slots:
            self.arrow(slot, node)
        return Slot(node)


def value_of(site: Site, state: str) -> Value:
    """What tells whether two states are one value; None where nothing does."""
    if (known := site.states.get(state)) is None or known.activation is None:
        return None
    return known.activation.node, known.activation.rows, known.activation.key_path


def head_of(tail: Steps) -> Steps:
    """The steps of the sub-layer that a site is in: `attn.self`, `ffn`."""
    return tail[:2] if len(tail) > 1 and tail[1][0] in BRANCHES else tail[:1]


def nested_of(head: Steps, parts: Iterable[Part]) -> dict[Steps, list[Part]]:
    """The parts of networks inside of a sub-layer, such as experts, by the steps of the network."""
    own = {part.tail for part in parts}
    networks: dict[Steps, list[Part]] = {}
    for part in parts:
        steps = part.tail[: len(head) + 1]
        if len(part.tail) > len(head) + 1 and part.tail[: len(head)] == head and steps not in own:
            networks.setdefault(steps, []).append(part)
    return networks


def stage_of(part: Part, owner: Site | None, parts: Sequence[Part]) -> Literal["first", "core", "last"]:
    """Whether a part reads the input of its sub-layer, or computes its output, or is between."""
    if part.name in CORES:
        return "core"
    if part.name in FIRST:
        return "first"
    if part.name in LAST:
        return "last"
    inputs = () if owner is None else (value_of(owner, "x"), value_of(owner, "c"))
    if (own := value_of(part.site, "x")) is not None and own in inputs:
        return "first"
    is_end = owner is not None and value_of(part.site, "h") == value_of(owner, "h") != None  # noqa: E711
    return "last" if is_end else "first"


def title_of(part: Part) -> str:
    module, root = part.site.module, part.site.root
    return f"{show_steps(part.tail)}: {module[len(root) + 1 :] if module.startswith(f'{root}.') else 'the layer'}"


def parts_of(items: Iterable[TemplateSite], depth: int, groups: Sequence[tuple[int, ...]] = ()) -> list[Part]:
    """The parts of a layer. `groups`: the numbers of networks, where edits tell them apart."""
    parts: list[Part] = []
    for item in items:
        tail = item.site.steps[depth:]
        if item.numbers is None:
            parts.append(Part(tail, item.site))
            continue
        position, every = item.numbers.position - depth, tuple(item.all_numbers)
        rest = tuple(n for n in every if not any(n in group for group in groups))
        own = [group for group in groups if set(group) <= set(every)]
        for numbers in (*own, *((rest,) if rest else ())):
            steps = (*tail[:position], (tail[position][0], numbers[0]), *tail[position + 1 :])
            parts.append(Part(steps, item.site, numbers))
    return parts
