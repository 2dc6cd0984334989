"""A plan as panels: one layer for all that look alike, and what is outside of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from peftc.addressing.paths import compress_paths, index_ranges
from peftc.addressing.site_list import Block, Place, SiteList, show_steps, site_list
from peftc.addressing.sites import SiteTable, Steps
from peftc.diagnostics import Diagnostic
from peftc.pictures.changes import Placement, add_changes
from peftc.pictures.graph import Content, Diagram, EditFacts, Panel
from peftc.pictures.labels import full_equation
from peftc.pictures.layer import Sketch, head_of, parts_of
from peftc.pictures.outside import outside_panel
from peftc.planning.report.plan import Plan, PlanEdit
from peftc.planning.representatives import SiteEdits
from peftc.syntax import ast
from peftc.syntax.printer import print_statement


def diagram_of(
    table: SiteTable,
    plan: Plan | None = None,
    site_edits: SiteEdits | None = None,
    spec: ast.Spec | None = None,
    warnings: Iterable[Diagnostic] = (),
) -> Diagram:
    """The picture of a plan; of a model without edits if there is none."""
    places = Places.of(table, plan, site_edits, spec)
    panels = [*_layers(places)]
    if places.others:
        panels = [*outside_panel(places.sites, places.others), *panels]
    about = f"{table.model_id} ({table.model_type}, {table.parameters:,} parameters)"
    if plan is None:
        return Diagram(table.model_id, f"The layers of {about}.", tuple(panels), (), 0, table.parameters)
    title = f"{plan.spec.path} on {table.model_id}"
    facts = tuple(_facts(entry, site_edits) for entry in plan.edits)
    lines = [f"{one.name}: {one.at}; stores {one.stored:,} parameters; folds: {one.reason}." for one in facts]
    description = f"{len(facts)} edit{'s' * (len(facts) != 1)} of {about}. " + " ".join(lines)
    texts = tuple(one.message for one in warnings)
    return Diagram(title, description, tuple(panels), facts, plan.totals.stored, plan.totals.base, texts)


def _facts(entry: PlanEdit, site_edits: SiteEdits | None) -> EditFacts:
    own = [] if site_edits is None else [one for one in site_edits.representatives if one.edit == entry.name]
    equations = dict.fromkeys(full_equation(assign.text or assign.source) for one in own for assign in one.assigns)
    patterns = entry.sites.patterns()
    pairs = compress_paths([one.path for one in patterns], [one.total for one in patterns])
    at = ", ".join(f"{path} × {count}" if count > 1 else path for path, count in pairs)
    return EditFacts(
        entry.name,
        tuple(equations) or ("train",),
        at,
        len(entry.sites),
        entry.stored,
        entry.foldable,
        entry.reason,
        entry.identity,
    )


@dataclass(frozen=True)
class Places:
    """Where the edits of a plan are: of each block of sites, in the order of the spec."""

    sites: SiteList
    layers: Mapping[int, Sequence[tuple[int, Placement]]]  # by block
    others: Sequence[tuple[str, int, Placement]]  # outside of layers: path, times

    @classmethod
    def of(cls, table: SiteTable, plan: Plan | None, site_edits: SiteEdits | None, spec: ast.Spec | None) -> Places:
        sites = site_list(table)
        layers: dict[int, list[tuple[int, Placement]]] = {}
        others: list[tuple[str, int, Placement]] = []
        order = {entry.name: i for i, entry in enumerate(plan.edits)} if plan is not None else {}
        for entry, placement, path, times, places in _placements(plan, site_edits, spec, sites):
            inside = [place for place in places if sites.blocks[place.block].layer is not None]
            for block, numbers in _by_block(inside).items():
                item = next(place.item for place in inside if place.block == block)
                tail, own = _tail(sites.blocks[block], item, numbers)
                one = replace(placement, tail=tail, numbers=own)
                layers.setdefault(block, []).append((order[entry.name], one))
            if not inside:
                others.append((path, times, placement))
        return cls(sites, {block: sorted(own, key=lambda one: one[0]) for block, own in layers.items()}, others)


def _placements(
    plan: Plan | None, site_edits: SiteEdits | None, spec: ast.Spec | None, sites: SiteList
) -> Iterator[tuple[PlanEdit, Placement, str, int, list[Place]]]:
    if plan is None or site_edits is None:
        return
    entries = {entry.name: entry for entry in plan.edits}
    for one in site_edits.representatives:
        for use in one.uses():
            entry = entries[one.edit]
            placement = Placement((), entry, use)
            yield entry, placement, use.site.path, one.count, site_edits.places(use.site)
    texts = {s.name: s for s in (spec.statements if spec is not None else ()) if isinstance(s, ast.Train)}
    for name, statement in texts.items():
        entry, text = entries[name], print_statement(statement).strip()
        short = f"train {', '.join(statement.states)}"
        for part in entry.sites.ranges:
            for _, path, _ in part.each_layer():
                first = path.replace("{number}", str((part.numbers or (0, 0))[0]))
                place = sites.find(first)
                places = [] if place is None else [place._replace(number=n) for n in _span(part.numbers, place)]
                yield entry, Placement((), entry, None, text, short), path, 1, places


def _span(numbers: tuple[int, int] | None, place: Place) -> range:
    return range(place.number, place.number + 1) if numbers is None else range(numbers[0], numbers[1] + 1)


def _by_block(places: Iterable[Place]) -> dict[int, list[int]]:
    blocks: dict[int, list[int]] = {}
    for place in places:
        blocks.setdefault(place.block, []).append(place.number)
    return blocks


def _tail(block: Block, item: int, numbers: Sequence[int]) -> tuple[Steps, tuple[int, ...]]:
    assert block.layer is not None
    one, depth = block.template.items[item], len(block.layer.steps)
    tail = one.site.steps[depth:]
    if one.numbers is None:
        return tail, ()
    position = one.numbers.position - depth
    return (*tail[:position], (tail[position][0], numbers[0]), *tail[position + 1 :]), tuple(numbers)


def _layers(places: Places) -> Iterator[Panel]:
    """Layers of one stack with the same picture, in model order."""
    members: dict[tuple[Steps, Content], list[int]] = {}
    contents: dict[object, Content] = {}
    for number, block in enumerate(places.sites.blocks):
        if block.layer is None:
            continue
        placements = [one for _, one in places.layers.get(number, ())]
        key = (
            id(block.template),
            tuple((one.tail, one.entry.name, id(one.site_edit), one.numbers) for one in placements),
        )
        if key not in contents:
            contents[key] = _content(block, placements)
        stack, index = block.layer.steps[:-1], block.layer.steps[-1][1]
        members.setdefault((stack, contents[key]), []).append(0 if index is None else index)
    for (stack, content), numbers in members.items():
        name = show_steps((*stack, ("layer", None)))
        yield Panel(f"{name}[{index_ranges(sorted(numbers))}]", len(numbers), content)


def _content(block: Block, placements: Sequence[Placement]) -> Content:
    assert block.layer is not None
    groups = list(dict.fromkeys(one.numbers for one in placements if one.numbers))
    parts = parts_of(block.template.items, len(block.layer.steps), groups)
    touched = {one.tail for one in placements if one.reads & {"x", "c"}}
    sketch = Sketch(
        entered={steps for one in placements for steps in _entered(one)},
        touched=touched,
        touched_states={(head_of(one.tail), state) for one in placements for state in one.written},
    )
    sketch.draw(parts)
    add_changes(sketch, placements)
    return sketch.finish()


def _entered(placement: Placement) -> Iterator[Steps]:
    """The steps of what is drawn with its parts, since an edit is in it."""
    tail = placement.tail
    head = head_of(tail)
    if len(tail) > len(head) and tail[len(head)][0] not in ("norm", "add"):
        yield from (tail[:depth] for depth in range(len(head), len(tail)))
