"""What a merge computes: which edits fold, and into which tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from peftc.addressing.sites import WeightRef, parameter_name
from peftc.folding.computed_weight import is_computed, stored_values
from peftc.folding.ffn_width import HiddenUnits, WiderFfn
from peftc.folding.memory import next_round
from peftc.folding.module_folds import combine
from peftc.folding.report import Change
from peftc.folding.rounding import rounded_change
from peftc.folding.unrounded_parameters import NEW_KEY, CannotFold, Fold
from peftc.folding.weights import Folding
from peftc.merging.base_model import BaseModel
from peftc.merging.keys import KeyGroup, split
from peftc.merging.report import MergedTensor
from peftc.planning.foldability.affine import FoldTarget, NotAffine, affine_structure, is_table, linear_states


class Write(Protocol):
    def __call__(self, key: str, tensor: Tensor, at: int = 0, /) -> object:
        """Writes a tensor, or a part of one from byte `at` on. The parts of one come in order."""


@dataclass(eq=False)
class Task:
    """Parameters that are computed and written together: those of a module, or of several whose
    tensors lie in one tensor of the checkpoint.

    Attributes:
        folds: by the module into which they go.
        names: the parameters that have to be in memory.
        trained: those of them that `train` statements have changed, with the edit.
        units: new hidden units, by the path of their ffn.
        groups: the tensors of the checkpoint that hold them.
        unedited: keys of tensors that are computed as they are read, and change no further.
        expert: the number of the one expert whose slices of the parameters these are.
        experts: the folds of each expert, where all experts lie in one tensor.
    """

    folds: dict[str, list[Fold]] = field(default_factory=dict[str, list[Fold]])
    names: dict[str, None] = field(default_factory=dict[str, None])
    trained: dict[str, str] = field(default_factory=dict[str, str])
    units: dict[str, list[HiddenUnits]] = field(default_factory=dict[str, list[HiddenUnits]])
    groups: dict[KeyGroup, None] = field(default_factory=dict[KeyGroup, None])
    unedited: tuple[str, ...] = ()
    expert: int | None = None
    experts: list[list[Fold]] = field(default_factory=list[list[Fold]])

    @property
    def keys(self) -> tuple[str, ...]:
        return (*(key for group in self.groups for key in group.keys), *self.unedited)


def tasks_of(
    base: BaseModel, folding: Folding, folded: Collection[str], units: Mapping[str, list[HiddenUnits]]
) -> list[Task]:
    """In the order of the files. Raises: CannotFold where a tensor cannot be made of parameters."""
    tasks = list[Task]()
    for module, folds in folding.folds(folded).items():
        names = dict.fromkeys(name for fold in folds for name in _parameters(base, fold))
        tasks.append(Task({module: folds}, names))
    for name, edit in folding.trained.items():
        if edit in folded:
            tasks.append(Task(names={name: None}, trained={name: edit}))
    for path, own in units.items():
        modules = (own[0].up.module, own[0].down.module)
        names = [name for name in base.parameters if name.rpartition(".")[0] in modules]
        tasks.append(Task(names=dict.fromkeys(names), units={path: own}))
    for task in tasks:
        _complete(base, task)
    tasks = [part for task in _joined(tasks) for part in _split(base, task)]
    edited = {key for task in tasks for key in task.keys}
    tasks += [Task(unedited=(key,)) for key in base.checkpoint.computed() if key not in edited]
    return sorted(tasks, key=lambda task: _position(base, task))


def lacking_biases(folding: Folding) -> dict[str, str]:
    """The edits that add a constant where the base has no bias, with the reason why they stay."""
    reasons = dict[str, str]()
    for site_edit in folding.record.site_edits:
        target = folding.target(site_edit)
        if target is None or target.side == "weight" or target.bias is not None or is_table(target.site):
            continue
        with suppress(NotAffine):
            if affine_structure(site_edit, linear_states(target, site_edit.site)).constant:
                reasons.setdefault(site_edit.edit, NEW_KEY.format(target.site.module))
    return reasons


def _parameters(base: BaseModel, fold: Fold) -> Iterable[str]:
    """The parameters that a fold reads; of a computed weight, those that it is computed from."""
    for ref in fold.target.refs:
        if (name := parameter_name(ref)) in base.parameters:
            yield name
        else:
            yield from (other for other in base.parameters if other.startswith(f"{ref.module}."))


def _complete(base: BaseModel, task: Task) -> None:
    """Adds the groups of a task's parameters, and the other parameters of these."""
    for name in tuple(task.names):
        for own, group in base.keys(name).items():
            task.groups[group] = None
            if group.converter is not None:
                task.names |= dict.fromkeys(group.names)
                if not base.reversible(own):
                    edit = next((f.site_edit.edit for folds in task.folds.values() for f in folds), "")
                    edit = edit or next(iter(task.trained.values()))
                    raise CannotFold(edit, f"no tensors of the checkpoint can be made of a new `{own}`")


def _joined(tasks: Sequence[Task]) -> list[Task]:
    """Tasks with common groups as one."""
    by_group: dict[KeyGroup, Task] = {}
    result = dict[int, Task]()
    for task in tasks:
        others = {id(by_group[group]): by_group[group] for group in task.groups if group in by_group}
        for other in others.values():
            for module, folds in other.folds.items():
                task.folds.setdefault(module, []).extend(folds)
            task.names, task.trained = other.names | task.names, other.trained | task.trained
            task.groups, task.units = other.groups | task.groups, other.units | task.units
            del result[id(other)]
        result[id(task)] = task
        by_group |= dict.fromkeys(task.groups, task)
    return list(result.values())


def _split(base: BaseModel, task: Task) -> list[Task]:
    """A task for each expert, where each has tensors of its own that are stacked as a parameter:
    those of all experts at once may be a hundred times as large as any tensor of the checkpoint.
    Of tensors that hold all experts it is one task, which goes through their slices.
    """
    if len(task.folds) != 1 or task.trained or task.units:
        return [task]
    ((module, folds),) = task.folds.items()
    if experts := _stacked(base, task, folds):
        return [replace(task, experts=experts)]
    tasks: dict[tuple[KeyGroup, int], Task] = {}
    parts: dict[KeyGroup, list[KeyGroup] | None] = {}
    for fold in folds:
        slices = {ref.stacked_slice for ref in fold.target.refs}
        groups = {g for ref in fold.target.refs for g in base.keys(parameter_name(ref)).values()}
        if len(groups) != 1 or len(slices) != 1:
            return [task]
        (group,), (expert,) = groups, slices
        if expert is not None and group.converter is not None and group not in parts:
            parts[group] = split(group, expert.count, base.shapes)
        if expert is None or (own := parts.get(group)) is None:
            return [task]
        names, groups = dict.fromkeys(group.names), dict.fromkeys([own[expert.index]])
        new = tasks.setdefault((group, expert.index), Task({module: []}, names, groups=groups, expert=expert.index))
        new.folds[module].append(replace(fold, target=_alone(fold.target)))
    return list(tasks.values())


def _stacked(base: BaseModel, task: Task, folds: Collection[Fold]) -> list[list[Fold]]:
    """The folds by expert, where all tensors of the task hold the slices of all experts."""
    slices = [ref.stacked_slice for fold in folds for ref in fold.target.refs]
    counts = {0 if one is None else one.count for one in slices}
    count = counts.pop() if len(counts) == 1 else 0
    entries = [base.checkpoint.entries[key] for key in task.keys]
    is_plain = all(group.converter is None for group in task.groups)
    is_plain = is_plain and not any(entry.key in base.checkpoint.computed() for entry in entries)
    if not count or not is_plain or any(not e.shape or e.shape[0] % count for e in entries):
        return []
    experts: list[list[Fold]] = [[] for _ in range(count)]
    for fold in folds:
        indices = {ref.stacked_slice.index for ref in fold.target.refs if ref.stacked_slice is not None}
        if len(indices) != 1:
            return []
        experts[indices.pop()].append(replace(fold, target=_alone(fold.target)))
    return experts


def _alone(target: FoldTarget) -> FoldTarget:
    """A target in the slice of its expert."""

    def alone(ref: WeightRef | None) -> WeightRef | None:
        if ref is None or ref.stacked_slice is None:
            return ref
        return replace(ref, stacked_slice=replace(ref.stacked_slice, count=1, index=0))

    return replace(target, weight=alone(target.weight), bias=alone(target.bias))


def _position(base: BaseModel, task: Task) -> tuple[str, int]:
    entries = (base.checkpoint.entries[key] for key in task.keys)
    return min((entry.file, entry.start) for entry in entries)


def run(base: BaseModel, task: Task, write: Write) -> list[MergedTensor]:
    """Computes the tensors of a task and writes each, by key. Raises: CannotFold, P530."""
    if task.experts:
        numbers = range(len(task.experts))
        return [one for expert in numbers for one in _run_expert(base, task, expert, write)]
    next_round()
    new = set[str]()
    with base.loaded(task.names, None if task.expert is None else next(iter(task.groups))) as read:
        values, changes = _values(base, task, read)
        written = set[str]()
        for group in task.groups:
            for key, tensor in _tensors(base, group, values, read).items():
                stored = tensor.to(read[key].dtype).cpu().contiguous()
                if group.converter is None or not same_bits(stored, read[key]):
                    new.add(key)
                write(key, stored)
                written.add(key)
        for key in read:
            if key not in written:
                write(key, read[key])
    for key in task.unedited:
        write(key, base.checkpoint.read(key))
    if task.expert is not None:
        return [MergedTensor.of(change, tuple(k for k in task.keys if k in new), task.expert) for change in changes]
    keys = {c.parameter: [k for g in base.keys(c.parameter).values() for k in g.keys if k in new] for c in changes}
    return [MergedTensor.of(change, tuple(keys[change.parameter])) for change in changes]


def _run_expert(base: BaseModel, task: Task, expert: int, write: Write) -> list[MergedTensor]:
    """The slices of one expert in the tensors of all."""
    next_round()
    count, (module,), merged = len(task.experts), task.folds, list[MergedTensor]()
    with base.loaded_slices(task.names, expert, count) as read:
        values = dict[str, tuple[Tensor, Change]]()
        if task.experts[expert]:
            values = combine(base.model, module, task.experts[expert], new_biases=False)
        for group in task.groups:
            (key,), before = group.keys, read[group.keys[0]]
            pairs = [pair for name in base.aliases(group.names[0]) if (pair := values.get(name)) is not None]
            stored = pairs[0][0].cpu().contiguous() if pairs else before
            write(key, stored, expert * before.nbytes)
            for _, change in pairs:
                keys = () if same_bits(stored, before) else (key,)
                merged.append(MergedTensor.of(change, keys, expert))
    return merged


def _values(base: BaseModel, task: Task, read: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Change]]:
    """New values by the names of parameters, and what became of each."""
    values, changes = dict[str, Tensor](), list[Change]()
    for module, folds in task.folds.items():
        for name, (value, change) in combine(base.model, module, folds, new_biases=False).items():
            owner, _, attribute = name.rpartition(".")
            parts: Mapping[str, Tensor] = {attribute: value}
            if is_computed(base.model.get_submodule(owner), attribute):
                parts = stored_values(base.model.get_submodule(owner), attribute, value) or {}
            values |= {f"{owner}.{part}".lstrip("."): new for part, new in parts.items()}
            changes.append(change)
    for units in task.units.values():
        for name, value in values.items():
            base.parameters[name].data = value  # rounded, as the weights of a folded model are
        ffn = WiderFfn(base.model, units)
        for site, own in zip((units[0].up, units[0].down), ffn.values, strict=True):
            values |= {f"{site.module}.{attribute}": value for attribute, value in own.items()}
        changes += ffn.changes
    seen = {change.parameter for change in changes}
    for name, edit in task.trained.items():
        if name not in values:
            values[name] = base.parameters[name].data
        if name not in seen:
            before = _before(base, name, read).to(values[name].device)
            changes.append(rounded_change(name, before, values[name], (edit,))[1])
    return values, changes


def _before(base: BaseModel, name: str, read: Mapping[str, Tensor]) -> Tensor:
    first = base.first(name)
    assert first is not None
    return base.groups[first].values(read)[first]


def _tensors(
    base: BaseModel, group: KeyGroup, values: Mapping[str, Tensor], read: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The new tensors of a group, by key; none if no parameter of it has a new value."""
    new = {n: value for n in group.names for name in base.aliases(n) if (value := values.get(name)) is not None}
    if not new:
        return {}
    if group.converter is not None:
        _require_inverse(group, read)
    return group.tensors({name: base.parameters[name].data for name in group.names if name in base.parameters} | new)


def _require_inverse(group: KeyGroup, read: Mapping[str, Tensor]) -> None:
    """Raises: ValueError where a conversion back does not give the same bits."""
    back = group.tensors(group.values(read))
    for key in group.keys:
        if not same_bits(back[key].contiguous(), read[key]):
            raise ValueError(f"`{key}` is another tensor after it was converted and converted back")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors of a dtype have the same bytes, NaN included."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
