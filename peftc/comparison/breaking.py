"""Whether adapters that were saved under one spec load under another one, and mean the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from peftc.addressing.sites import Site, Slice
from peftc.comparison.findings import NEW_NAME, OWN_SPEC, SAME, Comparison, Edits, Finding, OnModel, compressed
from peftc.comparison.lost_tensors import load_of_texts, load_on_model
from peftc.comparison.meaning import CallMeaning, EditMeaning, meanings
from peftc.comparison.moves import Moves
from peftc.planning.ir import SiteEdit
from peftc.syntax import ast


def breaking(
    labels: tuple[str, str], specs: tuple[ast.Spec, ast.Spec], on_model: tuple[OnModel, OnModel] | None = None
) -> Comparison:
    """What breaks for adapters of the first spec under the second.

    Both are expanded, in the form of what is saved. Without a model, what selectors and sizes mean
    there is not known, and they differ where their texts do.
    """
    moves = Moves.of(specs[1])
    edits = (meanings(specs[0], moves), meanings(specs[1]))
    load = list(load_on_model(edits, moves, on_model) if on_model else load_of_texts(edits))
    lost = {finding.edit for finding in load}
    renamed = {finding.edit for finding in load if finding.help.startswith(SAME)}
    numeric = [one for one in _numeric(edits, on_model, lost) if one.edit not in renamed]
    numeric += _order(edits, on_model)
    fold = _fold(on_model, moves) if on_model else ()
    model = on_model[1].planned.plan.model.id if on_model else None
    return Comparison(old=labels[0], new=labels[1], model=model, findings=(*load, *numeric, *fold))


def _numeric(edits: Edits, on_model: tuple[OnModel, OnModel] | None, lost: set[str | None]) -> Iterator[Finding]:
    old, new = edits
    for name in (*new, *(name for name in old if name not in new)):
        before, after = old.get(name), new.get(name)
        one = after or before
        if before is None or after is None:
            if one is not None and not one.has_parameters:
                reason = "it acts, and did not" if before is None else "it does not act any more"
                yield Finding(category="NUMERIC", edit=name, reason=reason, help=NEW_NAME.format(name))
            continue
        reasons = list(_differences(before, after))
        if on_model is not None:
            reasons += _sites(name, before, on_model) if name not in lost else ()
        elif before.at != after.at and not before.has_parameters:
            reasons.append(f"it may be at other sites: `{' | '.join(before.at)}` is now `{' | '.join(after.at)}`")
        for reason in reasons:
            yield Finding(category="NUMERIC", edit=name, reason=reason, help=NEW_NAME.format(name))


def _differences(old: EditMeaning, new: EditMeaning) -> Iterator[str]:
    if old.lines != new.lines:
        removed, added = (
            [line for line in a if line not in b] or a for a, b in ((old.lines, new.lines), (new.lines, old.lines))
        )
        yield f"its equation is another: `{'`, `'.join(removed)}` is now `{'`, `'.join(added)}`"
    for key, after in new.calls.items():
        before = old.calls.get(key)
        if before is not None and before.value != after.value:
            yield f"`{key}` computes something else: {_of_call(before, after)}"


def _of_call(old: CallMeaning, new: CallMeaning) -> str:
    changed = [
        f"{name}={old.args[name]} is now {name}={value}"
        for name, value in new.args.items()
        if name in old.args and old.args[name] != value
    ]
    removed, added = (
        [line for line in a if line not in b] for a, b in ((old.value, new.value), (new.value, old.value))
    )
    lines = f"`{'`, `'.join(removed) or 'nothing'}` is now `{'`, `'.join(added) or 'nothing'}`"
    return f"{', '.join(changed)}: {lines}" if changed and len(lines) < 200 else ", ".join(changed) or lines


def _sites(name: str, old: EditMeaning, on_model: tuple[OnModel, OnModel]) -> Iterator[str]:
    before, after = (
        {site.path: site.module for edit in side.planned.plan.edits if edit.name == own for site in edit.sites}
        for side, own in zip(on_model, (old.name, name), strict=True)
    )
    if before != after:
        removed, added = ([path for path in a if a[path] != b.get(path)] for a, b in ((before, after), (after, before)))
        texts = (", ".join(compressed(paths)) or "nowhere else" for paths in (removed, added))
        yield "it is at other sites: {} before, and {} now".format(*texts)


def _order(edits: Edits, on_model: tuple[OnModel, OnModel] | None) -> Iterator[Finding]:
    """Edits that have changed places in the text, and act on each other."""
    old, new = ([name for name in one if name in other] for one, other in (edits, edits[::-1]))
    if old == new:
        return
    meets = _meeting_on(on_model[1].planned.site_edits) if on_model else _meeting(edits[1])
    for i, first in enumerate(new):
        for second in new[i + 1 :]:
            if old.index(first) > old.index(second) and meets(first, second):
                reason = f"it stands before `{second}` now, and both act on one state"
                help_ = f"put `{second}` before `{first}` again; {OWN_SPEC}"
                yield Finding(category="NUMERIC", edit=first, reason=reason, help=help_)


def _meeting(edits: Mapping[str, EditMeaning]) -> Callable[[str, str], bool]:
    """Whether two edits may act on one state, as far as their selectors say it."""
    return lambda first, second: not (edits[first].states or edits[second].states)


def _meeting_on(site_edits: Iterable[SiteEdit]) -> Callable[[str, str], bool]:
    """Whether one of two edits writes a state of the model that the other reads or writes."""
    writes: dict[str, set[_Place]] = defaultdict(set)
    uses: dict[str, set[_Place]] = defaultdict(set)
    for one in site_edits:
        written = {assign.state for assign in one.assigns}
        for name in {*one.reads(), *written}:
            places = set(_places(one.site, name))
            uses[one.edit] |= places
            writes[one.edit] |= places if name in written else set()

    def meet(first: str, second: str) -> bool:
        pairs = ((writes[first], uses[second]), (writes[second], uses[first]))
        return any(_overlap(a, b) for own, others in pairs for a in own for b in others if a[:2] == b[:2])

    return meet


_Place = tuple[str, str, Slice | None]  # a module and what of it; which of its features, if not all


def _places(site: Site, name: str) -> Iterator[_Place]:
    """Where a state is: in the module of its site, and in the graph of its layer."""
    state = site.states[name]
    if state.weight is not None:
        yield state.weight.module, state.weight.attribute, state.weight.rows
    if state.activation is not None:
        rows = state.activation.rows
        yield site.module, name, rows
        yield from (
            (site.root, f"node {node}", rows) for node in (state.activation.node, *state.activation.other_nodes)
        )


def _overlap(one: _Place, other: _Place) -> bool:
    """Whether two parts of a module have features in common."""
    a, b = one[2], other[2]
    if a is None or b is None or a.stride != b.stride:
        return True
    return a.start < b.stop and b.start < a.stop


def gone(old: str, new: str) -> Comparison:
    """A spec that is not there any more."""
    help_ = f"keep it; {OWN_SPEC}"
    finding = Finding(category="LOAD", edit=None, reason="the spec is not there any more", help=help_)
    return Comparison(old=old, new=new, findings=(finding,))


# FOLD


def _fold(on_model: tuple[OnModel, OnModel], moves: Moves) -> Iterator[Finding]:
    old, new = (side.planned.plan for side in on_model)
    before = {moves.names.get(edit.name, edit.name): edit for edit in old.edits}
    for edit in new.edits:
        if edit.name in before and before[edit.name].foldable and not edit.foldable:
            help_ = f"keep `{edit.name}` as it was, or serve the model with the edit beside the weights"
            sites = compressed(site.path for site in edit.sites)
            reason = f"it folded, and does not: {edit.reason}"
            yield Finding(category="FOLD", edit=edit.name, sites=sites, reason=reason, help=help_)
