"""Forms of several tasks, computed at once on a batch whose rows are of different tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from peftc.concurrency.context import Rows
from peftc.forms.member_module import Member
from peftc.forms.module import FormModule, Pair
from peftc.modules.form_hooks import HOOKED_FORMS, is_hooked

Where = slice | Tensor
FUNCTION = "_function"  # the attribute of a `StackedForms` with the function of a sum

# As many parameters as can be copied in the time that one more call of a form takes.
COPIED = {"cpu": 1 << 16}
COPIED_ON_ACCELERATORS = 1 << 22
_parameters_of = attrgetter("_parameters")  # faster than `getattr` of a module for each
LEAST_COPIED = min(COPIED_ON_ACCELERATORS, *COPIED.values())


class Groups:
    """The rows of each task, or adapter, of a batch.

    Args:
        names: of each row's.
        own: those that an edit has; it does not act on `others`, which are computed with its first
            one.
    """

    def __init__(self, names: Sequence[str], own: Sequence[str]) -> None:
        is_own = set(own).__contains__
        first = next(filter(is_own, names), own[0])
        self.names = [name if is_own(name) else first for name in names]
        self.others = [row for row, name in enumerate(names) if not is_own(name)]
        self.by_task: dict[str, list[int]] = {}
        for row, name in enumerate(self.names):
            self.by_task.setdefault(name, []).append(row)
        self.calls = len(self.by_task)
        self.order = [row for rows in self.by_task.values() for row in rows]
        self.indices: dict[torch.device, tuple[tuple[Where, ...], Tensor | None]] = {}
        self.masks: dict[torch.device, Tensor] = {}

    def acts_on(self, like: Tensor) -> Tensor | None:
        """Which rows the edit acts on, (rows, 1, …); None where it acts on all."""
        if not self.others:
            return None
        mask = self.masks.get(like.device)
        if mask is None:
            with torch.inference_mode(False):
                rows = set(self.others)
                mask = torch.tensor([row not in rows for row in range(len(self.names))], device=like.device)
            if type(mask) is Tensor:  # not of a mode that makes fake tensors
                self.masks[like.device] = mask
        return mask.view(-1, *[1] * (like.ndim - 1))

    def on(self, like: Tensor) -> tuple[tuple[Where, ...], Tensor | None]:
        """Indices of the rows of each task, and of all rows in what is joined of these; None where
        they are in order.
        """
        if like.device not in self.indices:
            indices = self.new_indices(like.device)
            if indices[1] is not None and type(indices[1]) is not Tensor:  # of a mode that makes fake tensors
                return indices
            self.indices[like.device] = indices
        return self.indices[like.device]

    def new_indices(self, device: torch.device) -> tuple[tuple[Where, ...], Tensor | None]:
        if self.order == sorted(self.order):
            return tuple(slice(rows[0], rows[-1] + 1) for rows in self.by_task.values()), None
        with torch.inference_mode(False):  # they may be used again in a forward that has gradients
            where = tuple(torch.tensor(rows, device=device) for rows in self.by_task.values())
            places = sorted(range(len(self.order)), key=self.order.__getitem__)
            return where, torch.tensor(places, device=device)


def groups_of(rows: Rows, repeats: int, own: tuple[str, ...]) -> Groups:
    """The groups of a batch that has each row as often, for edits with these tasks or adapters."""
    return Groups([rows.names[number] for number in rows.numbers.tolist() for _ in range(repeats)], own)


@dataclass(frozen=True)
class StackedForms:
    """What forms that differ in nothing but the values of their parameters have in common.

    Args:
        owner_class: of what has the parameters.
        names: of the parameters.
        most_dimensions: of a parameter.
        size: of all parameters of one form.
    """

    owner_class: type[FormModule]
    names: tuple[str, ...]
    most_dimensions: int
    size: int

    @staticmethod
    def of(forms: Mapping[str, FormModule]) -> StackedForms | None:
        """None where the forms cannot be stacked: their equation does not take rows, or they differ
        in more than values.
        """
        first, *others = map(owner_of_values, forms.values())
        shapes = {name: parameter.shape for name, parameter in first.named_parameters()}
        if not first.takes_rows() or not all(map(is_like(first, shapes), others)):
            return None
        most_dimensions, size = max(map(len, shapes.values())), sum(shape.numel() for shape in shapes.values())
        return StackedForms(type(first), tuple(shapes), most_dimensions, size)

    def is_cheap(self, groups: Groups, like: Tensor) -> bool:
        """Whether copying parameters for each row costs less time, and less memory, than a call for
        each task.
        """
        copied, calls = len(groups.names) * self.size, groups.calls
        if copied <= calls * LEAST_COPIED or copied <= like.numel():
            return True
        return copied <= calls * COPIED.get(like.device.type, COPIED_ON_ACCELERATORS)

    def applies(self, owners: Sequence[FormModule], like: Tensor) -> bool:
        """Whether the state has room for a dimension of rows, and the forms compute as those of
        their class (not parametrized).
        """
        return like.ndim > self.most_dimensions and set(map(type, owners)) == {self.owner_class}

    def values(self, owners: Sequence[FormModule], like: Tensor) -> list[Tensor]:
        """The parameters of each row's own form, stacked, as `names` has them."""
        ndim, tables = like.ndim, list(map(_parameters_of, owners))
        try:
            return [stack(list(map(itemgetter(name), tables)), ndim) for name in self.names]
        except KeyError:  # of a replica (`nn.DataParallel`): tensors in place of parameters
            return [stack([getattr(owner, name) for owner in owners], ndim) for name in self.names]

    def joined(self, forms: Sequence[FormModule], like: Tensor) -> FormModule | None:
        """A form with the parameters of each row's own form; None where this does not apply, or one
        has hooks of its own.
        """
        owners = owners_of_values(forms)
        if not self.applies(owners, like) or (HOOKED_FORMS and any(map(is_hooked, (*forms, *owners)))):
            return None
        return owners[0].with_values(dict(zip(self.names, self.values(owners, like), strict=True)))

    def sum(self, forms: Sequence[FormModule], h: Tensor, *inputs: Tensor) -> Tensor | None:
        """h plus the value of that form, in fewer steps; None where there is only `joined`."""
        if HOOKED_FORMS or not self.applies(forms, inputs[0]):
            return None
        own = self.__dict__
        if FUNCTION not in own:
            own[FUNCTION] = forms[0].sum_of_rows(self.names)
        function = own[FUNCTION]
        return None if function is None else function(forms[0], h, *inputs, *self.values(forms, inputs[0]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != FUNCTION}

    def gather(self, forms: Sequence[FormModule], numbers: Tensor, like: Tensor) -> Tensor | Pair:
        """Their value for rows that are known by a tensor of numbers only, in a graph that serves
        all batches.
        """
        owners: list[Any] = owners_of_values(forms)
        values: dict[str, Tensor] = {}
        for name in self.names:
            stacked = torch.stack([getattr(owner, name) for owner in owners])
            values[name] = spread(stacked.index_select(0, numbers), like.ndim)
        return functional_call(owners[0], values, (like,))


def owner_of_values(form: FormModule) -> FormModule:
    """The module that has the parameters which a form computes with."""
    return form.shared_form if isinstance(form, Member) else form


def owners_of_values(forms: Sequence[FormModule]) -> list[FormModule]:
    """The same for forms of one site, which are all members or none."""
    return [owner_of_values(form) for form in forms] if isinstance(forms[0], Member) else list(forms)


def is_like(first: FormModule, shapes: Mapping[str, torch.Size]) -> Any:
    def is_alike(other: FormModule) -> bool:
        own = {name: parameter.shape for name, parameter in other.named_parameters()}
        settings = (type(other), other.form_args, other.form_dims, other.owner_module, own)
        return settings == (type(first), first.form_args, first.form_dims, first.owner_module, shapes)

    return is_alike


def stack(values: list[Tensor], ndim: int) -> Tensor:
    """One value for each row, (rows, 1, …, *size): it broadcasts with a state of `ndim` dimensions
    as one value does.
    """
    stacked = torch.stack(values)
    return stacked if stacked.ndim == ndim else spread(stacked, ndim)


def spread(stacked: Tensor, ndim: int) -> Tensor:
    """Values (rows, *size) as `stack` has them."""
    missing = ndim - stacked.ndim
    return stacked.view(len(stacked), *[1] * missing, *stacked.shape[1:]) if missing > 0 else stacked
