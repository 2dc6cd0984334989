"""Edits in a sketch of a layer: where they read, where they join, and by what they are scaled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peftc.addressing.sites import Steps
from peftc.pictures.graph import Change
from peftc.pictures.labels import arguments, factor_text, full_equation, short_equation
from peftc.pictures.layer import INSIDE, Arrow, Sketch
from peftc.pictures.slots import Reading, Slot
from peftc.planning.ir import Arithmetic, Assign, Concat, Constant, FormCall, Read, SiteEdit, Term, subterms
from peftc.planning.report.design import FACTORS, insertion_of
from peftc.planning.report.plan import PlanEdit

SYMBOLS = {"+": "+", "-": "+", "*": "×", "/": "×"}


@dataclass(frozen=True)
class Placement:
    """An edit at a site of a layer, or at sites of several networks in it.

    Attributes:
        tail: the steps of the site below the layer.
        entry: of the plan.
        site_edit: of an edit; None for `train`.
        text: what `train` says.
        short: the same without the selector.
        numbers: of the networks.
    """

    tail: Steps
    entry: PlanEdit
    site_edit: SiteEdit | None
    text: str = ""
    short: str = ""
    numbers: tuple[int, ...] = ()

    @property
    def reads(self) -> set[str]:
        return set() if self.site_edit is None else self.site_edit.reads()

    @property
    def written(self) -> tuple[str, ...]:
        return () if self.site_edit is None else tuple(assign.state for assign in self.site_edit.assigns)


def add_changes(sketch: Sketch, placements: Sequence[Placement]) -> None:
    """Adds edits in the order in which they act: that of the spec."""
    for placement in placements:
        if placement.site_edit is None:
            _add_training(sketch, placement)
        else:
            counted: set[str] = set()
            for assign in placement.site_edit.assigns:
                _Joiner(sketch, placement, placement.site_edit, assign, counted).add()


def _change(placement: Placement, state: str, **own: object) -> Change:
    sites = max(len(placement.numbers), 1)
    change = Change(placement.entry.name, "", "", "weight", 0, sites, False, placement.entry.foldable, state, ())
    return replace(change, **own)  # type: ignore[arg-type]


def _add_training(sketch: Sketch, placement: Placement) -> None:
    change = _change(
        placement,
        "w",
        equation=placement.text,
        short=placement.short,
        stored=placement.entry.stored,
        shared=len(placement.entry.sites) > 1,
    )
    node = sketch.build.add("edit", placement.entry.name, "train", change=change, title=placement.text)
    target = sketch.hosts[node] = box_of(sketch, placement.tail)
    if (source := sketch.slots.get((placement.tail, "x"))) is not None:
        sketch.arrows.append(Arrow(source, node, "order"))
    sketch.arrows.append(Arrow(node, target, "weight", change, label=True))


def box_of(sketch: Sketch, tail: Steps) -> str:
    """The node of a site; that of what it is in, if it has none of its own."""
    for depth in range(len(tail), -1, -1):
        if (node := sketch.boxes.get(tail[:depth])) is not None:
            return node
        if (slot := sketch.slots.get((tail[:depth], "h"))) is not None:
            return slot.before(0)
    return sketch.slots[(), "h"].before(0)


def slot_of(sketch: Sketch, tail: Steps, state: str) -> Slot:
    """Where a state is; the output of what the site is in, if nothing says more."""
    for depth in range(len(tail), -1, -1):
        for name in (state, "h"):
            if (slot := sketch.slots.get((tail[:depth], name))) is not None:
                return slot
    raise KeyError(state)


@dataclass
class _Joiner:
    """One equation of an edit."""

    sketch: Sketch
    placement: Placement
    site_edit: SiteEdit
    assign: Assign
    counted: set[str]  # keys of instances whose parameters are at a node already

    def add(self) -> None:
        state, tail = self.assign.state, self.placement.tail
        mains = main_calls(self.assign.value)
        inside = state in INSIDE and tail in self.sketch.boxes
        if state in ("w", "b") or inside:
            target = box_of(self.sketch, tail)
            for call, change in self._nodes(mains):
                node = self._node(call, change, target)
                for factor in factors(self.assign.value, call) if call is not None else ():
                    node = self._gate(node, factor, change, target)
                self.sketch.arrows.append(Arrow(node, target, "weight", change, label=True))
            return
        slot = slot_of(self.sketch, tail, state)
        symbol = symbol_of(self.assign)
        now = Reading.now(slot)
        changes = self._nodes(mains)
        if not symbol and len(changes) == 1:  # `h = f(h)`
            call, change = changes[0]
            node = self._node(call, change, slot.before(0), read=False)
            slot.joints.append(node)
            return
        first, host = changes[0][1], slot.before(0)
        join = self.sketch.build.add("join", symbol or "=", frame=self._frame, change=first, title=first.equation)
        self.sketch.hosts[join] = host
        for i, (call, change) in enumerate(changes):
            node = self._node(call, change, host, now)
            for factor in factors(self.assign.value, call) if call is not None else ():
                node = self._gate(node, factor, change, host)
            self.sketch.arrows.append(
                Arrow(node, join, "change", change, label=i == len(changes) - 1 or change.stored > 0)
            )
        slot.joints.append(join)
        if any(change.insertion == "sequential" for _, change in changes):
            self.sketch.skipped.add(join)

    def _nodes(self, mains: Sequence[FormCall]) -> list[tuple[FormCall | None, Change]]:
        """What gets a box, with its count: every form that does not only scale."""
        calls = [term for term in subterms(self.assign.value) if isinstance(term, FormCall)]
        groups: list[tuple[FormCall | None, list[FormCall]]] = [(main, forms_in(main)) for main in mains]
        if not groups:
            groups = [(calls[0] if len(calls) == 1 else None, calls)]
        else:
            inside = {id(call) for _, group in groups for call in group}
            groups[0][1].extend(call for call in calls if id(call) not in inside)
        if self.assign is self.site_edit.assigns[-1]:  # parameters that no equation shows
            shown = {call.instance.key for one in self.site_edit.assigns for call in forms_in(one.value)}
            rest = [instance for instance in self.site_edit.instances if instance.key not in shown]
        else:
            rest = []
        result: list[tuple[FormCall | None, Change]] = []
        for i, (main, group) in enumerate(groups):
            instances = {call.instance.key: call.instance for call in group}
            instances |= {one.key: one for one in rest} if i == 0 else {}
            new = [one for key, one in instances.items() if key not in self.counted]
            self.counted |= instances.keys()
            shared = any(one.owners() for one in new)
            tasks = [len(one.task_suffixes()) for one in new]
            stored = sum(
                times * one.form.count(one.args, one.dims).stored for times, one in zip(tasks, new, strict=True)
            )
            result.append((main, self._of(self.placement.entry.stored if shared else stored, shared)))
        return result

    def _of(self, stored: int, shared: bool) -> Change:
        source = self.assign.source
        return _change(
            self.placement,
            self.assign.state,
            equation=full_equation(source),
            short=short_equation(source),
            insertion=insertion_of(self.assign),
            stored=stored,
            shared=shared,
        )

    def _node(
        self, call: FormCall | None, change: Change, host: str, now: Reading | None = None, read: bool = True
    ) -> str:
        lines = (change.edit, call.instance.form.name, *arguments(call.source)) if call is not None else (change.edit,)
        node = self.sketch.build.add("edit", *lines, frame=self._frame, change=change, title=change.equation)
        self.sketch.hosts[node] = host
        reads = [] if call is None else states_in(call)
        if not reads and (source := self.sketch.slots.get((self.placement.tail, "x"))) is not None:
            self.sketch.arrows.append(Arrow(Reading.now(source), node, "order"))  # beside its host
        for state in reads:
            if state == self.assign.state:
                if read and now is not None:
                    self.sketch.arrows.append(Arrow(now, node, "change", change))
            else:
                source = Reading.now(slot_of(self.sketch, self.placement.tail, state))
                self.sketch.arrows.append(Arrow(source, node, "change", change))
        return node

    def _gate(self, node: str, factor: str, change: Change, host: str) -> str:
        """Puts a factor behind a node."""
        gate = self.sketch.build.add("gate", factor, frame=self._frame, change=change, title=change.equation)
        self.sketch.hosts[gate] = host
        self.sketch.arrows.append(Arrow(node, gate, "change", change))
        return gate

    @property
    def _frame(self) -> str:
        return self.sketch.frame_at(self.placement.tail, self.assign.state)


def states_in(call: FormCall) -> list[str]:
    terms = (term for one in call.inputs for term in subterms(one))
    return list(dict.fromkeys(term.state for term in terms if isinstance(term, Read)))


def forms_in(term: Term) -> list[FormCall]:
    return [one for one in subterms(term) if isinstance(one, FormCall)]


def main_calls(value: Term) -> list[FormCall]:
    """The outermost forms that do more than scale, each once."""
    calls: dict[int, FormCall] = {}

    def visit(term: Term) -> None:
        if isinstance(term, FormCall) and term.instance.form.name not in FACTORS:
            calls.setdefault(id(term), term)
            return
        for child in children(term):
            visit(child)

    visit(value)
    return list(calls.values())


def children(term: Term) -> tuple[Term, ...]:
    match term:
        case FormCall(inputs=own) | Concat(parts=own):
            return own
        case Arithmetic(left=left, right=right):
            return left, right
        case Read() | Constant():
            return ()
        case _:
            return (term.input,)


def symbol_of(assign: Assign) -> str:
    """How a change joins the state: `+`, `×`, `‖`; "" where it takes its place."""
    value = assign.value
    if isinstance(value, Concat):
        return "‖"
    if isinstance(value, Arithmetic) and any(
        isinstance(term, Read) and term.state == assign.state for term in terms_of(value, value.op)
    ):
        return SYMBOLS[value.op]
    alone = main_calls(value)
    return "" if len(alone) <= 1 and value in alone else "="


def terms_of(value: Term, op: str) -> Iterable[Term]:
    """The terms of a sum, or the factors of a product."""
    same = ("+", "-") if op in ("+", "-") else ("*", "/")
    if isinstance(value, Arithmetic) and value.op in same:
        yield from terms_of(value.left, op)
        yield from terms_of(value.right, op)
    else:
        yield value


def factors(value: Term, call: FormCall) -> list[str]:
    """What a form is multiplied by on the way to its state: `× 4`, `× gate(x)`, `α = 16`."""
    texts: list[str] = []

    def visit(term: Term) -> bool:
        if term is call:
            return True
        if isinstance(term, Arithmetic):
            left, right = visit(term.left), visit(term.right)
            if left != right and term.op in ("*", "/"):
                other = term.right if left else term.left
                if not (isinstance(other, Constant) and other.value == 1) and not reads_only(other):
                    texts.append(("÷ " if term.op == "/" else "× ") + factor_text(other))
            return left or right
        sides = [visit(child) for child in children(term)]
        return any(sides)

    visit(value)
    alpha = call.instance.args.get("alpha")
    return [*([f"α = {alpha:g}"] if isinstance(alpha, int | float) else []), *texts]


def reads_only(term: Term) -> bool:
    return isinstance(term, Read)
