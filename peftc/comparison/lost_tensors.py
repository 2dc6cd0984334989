"""Whether the tensors of an adapter are those of another spec, by their names and sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from peftc.comparison.findings import MOVED, NEW_NAME, OWN_SPEC, Edits, Finding, OnModel, compressed
from peftc.comparison.meaning import EditMeaning
from peftc.comparison.moves import Moves
from peftc.diagnostics.suggestions import join_names


class _Tensor(NamedTuple):
    """A tensor of an adapter, with its name taken apart."""

    edit: str
    site: str  # or the owner of parameters that sites have in common; a dotted name of the base
    parameter: str
    size: tuple[int, ...]

    @classmethod
    def of(cls, name: str, size: tuple[int, ...]) -> _Tensor:
        edit, _, rest = name.partition("/")
        site, _, parameter = rest.rpartition("/")
        return cls(edit, site or parameter, parameter if site else "", size)

    @property
    def shown(self) -> str:
        return f"{self.parameter} {list(self.size)}".strip()


def load_on_model(edits: Edits, moves: Moves, on_model: tuple[OnModel, OnModel]) -> Iterator[Finding]:
    old, new = on_model
    for diagnostic in new.failed:
        help_ = f"change the spec, or the expectation; {OWN_SPEC}"
        yield Finding(category="LOAD", edit=None, reason=f"the spec is refused: {diagnostic.message}", help=help_)
    names = moves.renamed(old.sizes, new.sizes)
    here = {names[name]: (name, size) for name, size in old.sizes.items()}
    missing = [_Tensor.of(name, size) for name, size in new.sizes.items() if name not in here]
    unknown = [_Tensor.of(old_name, size) for name, (old_name, size) in here.items() if name not in new.sizes]
    for edit in dict.fromkeys(one.edit for one in (*unknown, *missing)):
        lost, added = ([one for one in part if one.edit == edit] for part in (unknown, missing))
        gone, fresh = edit not in edits[1], edit not in edits[0]
        if lost:
            reason = "the spec has no such edit" if gone else "adapters have parameters that the spec does not have"
            yield _of_tensors(lost, reason, _moved_help(edit, lost, missing, unknown, edits))
        if added:
            reason = "adapters have no such edit" if fresh else "the spec has parameters that adapters do not have"
            yield _of_tensors(added, reason, _added_help(edit, fresh, added, unknown, edits))
    pairs = [(_Tensor.of(name, size), new.sizes[name]) for name, (_, size) in here.items() if name in new.sizes]
    for edit in dict.fromkeys(one.edit for one, size in pairs if _differ(one.size, size)):
        changed = [(one, size) for one, size in pairs if one.edit == edit and _differ(one.size, size)]
        shown = [
            one._replace(parameter=f"{one.parameter} {list(one.size)} → {list(size)}", size=()) for one, size in changed
        ]
        yield _of_tensors(shown, "parameters have other sizes", NEW_NAME.format(edit), with_sizes=False)


def _differ(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether `load` refuses a size: earlier versions have had others of one."""
    return [n for n in old if n != 1] != [n for n in new if n != 1]


def _of_tensors(tensors: Sequence[_Tensor], reason: str, help_: str, with_sizes: bool = True) -> Finding:
    parameters = dict.fromkeys(one.shown if with_sizes else one.parameter for one in tensors)
    sites = dict.fromkeys(one.site for one in tensors)
    return Finding(
        category="LOAD",
        edit=tensors[0].edit,
        parameters=tuple(filter(None, parameters)),
        sites=compressed(sites),
        reason=reason,
        help=help_,
    )


def _moved_help(
    edit: str, lost: Sequence[_Tensor], missing: Sequence[_Tensor], unknown: Sequence[_Tensor], edits: Edits
) -> str:
    """The way out for parameters that the spec does not have: a `moved`, where one fits."""
    statements = [*_renames(lost, missing, edit, edits)]
    if statements:
        return MOVED.format(" ".join(statements))
    return f"keep `{edit}`, or {OWN_SPEC}"


def _added_help(edit: str, fresh: bool, added: Sequence[_Tensor], unknown: Sequence[_Tensor], edits: Edits) -> str:
    if fresh:
        for old in dict.fromkeys(one.edit for one in unknown):
            lost = [one for one in unknown if one.edit == old]
            if statements := [*_renames(lost, added, old, edits)]:
                return MOVED.format(" ".join(statements))
        return f"state `{edit}` in a spec of its own, and compile both; or {OWN_SPEC}"
    lost = [one for one in unknown if one.edit == edit]
    if statements := [*_renames(lost, added, edit, edits)]:
        return MOVED.format(" ".join(statements))
    return f"give the edit another name where it is new; {OWN_SPEC}"


def _renames(lost: Sequence[_Tensor], missing: Sequence[_Tensor], edit: str, edits: Edits) -> Iterator[str]:
    """The statements `moved` by which adapters have the names of the spec, if there are any."""

    def places(tensors: Iterable[_Tensor]) -> set[tuple[str, str, tuple[int, ...]]]:
        return {(one.site.removeprefix(f"{one.edit}."), one.parameter, one.size) for one in tensors}

    if edit not in edits[1]:
        for new in dict.fromkeys(one.edit for one in missing):
            if new not in edits[0] and places(lost) == places(one for one in missing if one.edit == new):
                yield f"moved {edit} -> {new}"
                return
        return
    own = [one for one in missing if one.edit == edit]
    before, after = _by_parameter(lost), _by_parameter(own)
    pairs = [(old, new) for old in before for new in after if before[old] == after[new]]
    if len(pairs) != len(before) or len(pairs) != len(after) or len({*dict(pairs)}) != len(pairs):
        return
    forms = {(old.partition(".")[0], new.partition(".")[0]) for old, new in pairs}
    for old, new in pairs:
        (old_form, _, old_name), (new_form, _, new_name) = old.partition("."), new.partition(".")
        if old_form == new_form and old_name != new_name:
            yield f"moved {old} -> {new}"
        elif old_name != new_name:
            return
    yield from (f"moved {old} -> {new}" for old, new in sorted(forms) if old != new)


def _by_parameter(tensors: Iterable[_Tensor]) -> dict[str, set[tuple[str, tuple[int, ...]]]]:
    result: dict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for one in tensors:
        result[one.parameter].add((one.site, one.size))
    return result


def load_of_texts(edits: Edits) -> Iterator[Finding]:
    """What does not load, as far as the texts say it."""
    old, new = edits
    for name, edit in old.items():
        if name not in new and edit.has_parameters:
            same = [n for n, other in new.items() if n not in old and _declared(other) == _declared(edit)]
            keep = f"keep `{name}`, or {OWN_SPEC}"
            help_ = MOVED.format(f"moved {name} -> {same[0]}") if len(same) == 1 else keep
            yield Finding(category="LOAD", edit=name, reason="the spec has no such edit", help=help_)
    for name, edit in new.items():
        if name not in old and edit.has_parameters:
            same = [n for n, other in old.items() if n not in new and _declared(other) == _declared(edit)]
            own = f"state `{name}` in a spec of its own, and compile both; or {OWN_SPEC}"
            help_ = MOVED.format(f"moved {same[0]} -> {name}") if len(same) == 1 else own
            yield Finding(category="LOAD", edit=name, reason="adapters have no such edit", help=help_)
        elif name in old and edit.has_parameters | old[name].has_parameters and _declared(edit) != _declared(old[name]):
            reason, parameters = _declarations(old[name], edit)
            help_ = NEW_NAME.format(name)
            yield Finding(category="LOAD", edit=name, parameters=parameters, reason=reason, help=help_)


def _declared(edit: EditMeaning) -> object:
    """What decides the tensors of an edit."""
    own = [(key, call.parameters) for key, call in edit.calls.items() if call.parameters]
    return edit.at, edit.per_task, edit.states, sorted(own)


def _declarations(old: EditMeaning, new: EditMeaning) -> tuple[str, tuple[str, ...]]:
    if old.at != new.at:
        return f"it may be at other sites: `{' | '.join(old.at)}` is now `{' | '.join(new.at)}`", ()
    if old.per_task != new.per_task:
        return "tasks have parameters of their own in one of the specs", ()
    if old.states != new.states:
        return f"it trains {join_names(new.states)}, and adapters have {join_names(old.states)}", ()
    before, after = (
        {f"{key}.{line}" for key, call in edit.calls.items() for line in call.parameters} for edit in (old, new)
    )
    lines = (*(f"- {line}" for line in sorted(before - after)), *(f"+ {line}" for line in sorted(after - before)))
    return "parameters have other names or sizes", lines
