"""Evaluates the equations of edits on observed values, with forms as opaque modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from operator import add, mul, sub, truediv
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Slice, WeightRef
from peftc.forms.member_module import Member
from peftc.forms.module import FormModule
from peftc.forms.shapes import Weight
from peftc.installation.record import Installation
from peftc.planning import ir
from peftc.task_modules.tasked_module import Tasked
from peftc.verification.reference.locations import ReferenceUnavailable

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul, "/": truediv}


class FormModules:
    """Looks up the form modules of a compiled model, or builds them around shared parameters."""

    def __init__(self, model: nn.Module, record: Installation) -> None:
        self.model, self.record = model, record
        self.owners = {name.split("/")[1]: module for name, module in record.form_modules.items()}
        self.cache: dict[tuple[str, str, str], FormModule] = {}

    def get(self, site_edit: ir.SiteEdit, instance: ir.FormInstance) -> FormModule:
        key = (site_edit.edit, site_edit.owner_path, instance.key)
        if key not in self.cache:
            self.cache[key] = self._module(site_edit, instance)
        form = self.cache[key]
        return form if form.training == self.model.training else form.train(self.model.training)

    def _module(self, site_edit: ir.SiteEdit, instance: ir.FormInstance) -> FormModule:
        if instance.has_site_parameters:
            name = self.record.form_modules[f"{site_edit.edit}/{site_edit.owner_path}/{instance.key}"]
            return cast(FormModule, self.model.get_submodule(name))
        if not instance.tasks:
            return self._member(instance, None)
        chosen = self.record.adapter if instance.are_adapters else self.record.task
        return Tasked(chosen, {task: self._member(instance, task) for task in instance.tasks})

    def _member(self, instance: ir.FormInstance, task: str | None) -> FormModule:
        owner = instance.owner_of(task)
        assert owner is not None
        module = cast(FormModule, self.model.get_submodule(self.owners[owner]))
        return Member(module, instance.index, instance.form.fill(instance.args))


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of an attention, and the rows that are concatenated to them."""

    key: Tensor  # (batch, heads, tokens, d_head)
    value: Tensor  # like the key
    rows: tuple[tuple[Tensor, Tensor], ...] = ()  # pairs of (batch, kv_heads, rows, d_head)

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValues:
        rows = tuple((function(k), function(v)) for k, v in self.rows)
        return KeyValues(function(self.key), function(self.value), rows)


class Interpreter:
    """Evaluates equations site by site. `base` has the frozen modules that they call."""

    def __init__(self, forms: FormModules, base: nn.Module) -> None:
        self.forms, self.base = forms, base
        self.values: dict[tuple[str, str, str], Any] = {}  # by layer, site path and state
        self.memo: dict[tuple[str, int, int], Any] = {}  # by layer, and the ids of a SiteEdit and a term

    def forget(self, root: str) -> None:
        """Drops the values of a layer before a new call of it."""
        self.values = {key: value for key, value in self.values.items() if key[0] != root}
        self.memo = {key: value for key, value in self.memo.items() if key[0] != root}

    def assign(self, site_edit: ir.SiteEdit, index: int, current: Any) -> Any:
        """The new value of the state that equation `index` writes, from its current value."""
        assign = site_edit.assigns[index]
        key = (site_edit.site.root, site_edit.site.path, assign.state)
        self.values[key] = current
        for i, term in site_edit.lets:
            if i == index:
                self.evaluate(site_edit, term, current)
        self.values[key] = value = self.evaluate(site_edit, assign.value, current)
        return value

    def evaluate(self, site_edit: ir.SiteEdit, term: ir.Term, current: Any) -> Any:
        key = (site_edit.site.root, id(site_edit), id(term))
        if key not in self.memo:
            self.memo[key] = self._evaluate(site_edit, term, current)
        return self.memo[key]

    def _evaluate(self, site_edit: ir.SiteEdit, term: ir.Term, current: Any) -> Any:
        match term:
            case ir.Read(state=state):
                key = (site_edit.site.root, site_edit.site.path, state)
                if key not in self.values:
                    raise ReferenceUnavailable(f"`{state}` is not computed before the state that is written")
                return self.values[key]
            case ir.Constant(value=value):
                return value
            case ir.FormCall(instance=instance, inputs=inputs):
                like = current.key if isinstance(current, KeyValues) else current
                arguments = [self.evaluate(site_edit, value, current) for value in inputs]
                return self.forms.get(site_edit, instance)(*(arguments or [like]))
            case ir.FrozenCall(module=module, input=value):
                return self.base.get_submodule(module)(self.evaluate(site_edit, value, current))
            case ir.Feature(input=value, index=index):
                return self.evaluate(site_edit, value, current)[..., [index]]
            case ir.Arithmetic(op=op, left=left, right=right):
                return calculate(op, *(self.evaluate(site_edit, side, current) for side in (left, right)))
            case ir.Concat(parts=parts):
                values = [self.evaluate(site_edit, part, current) for part in parts]
                if isinstance(term.shape, Weight):
                    return torch.cat(values)
                pair = next(value for value in values if isinstance(value, KeyValues))
                # Every query attends to every row, so the order of rows does not matter.
                return replace(pair, rows=(*pair.rows, *(value for value in values if value is not pair)))


def calculate(op: str, left: Any, right: Any) -> Any:
    function = OPERATORS[op]
    for many, single, reflected in ((left, right, False), (right, left, True)):
        if isinstance(many, KeyValues | tuple) and not isinstance(single, KeyValues | tuple):
            operand = single.unsqueeze(1) if isinstance(single, Tensor) and single.ndim == 3 else single

            def each(value: Tensor, operand: Any = operand, reflected: bool = reflected) -> Tensor:
                return function(operand, value) if reflected else function(value, operand)

            return many.map(each) if isinstance(many, KeyValues) else tuple(each(part) for part in many)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return tuple(function(a, b) for a, b in zip(left, right, strict=True))
    return function(left, right)


def features(rows: Slice | None, value: Tensor, dim: int = -1) -> Tensor:
    return value if rows is None else value.index_select(dim, _index(rows, value.device))


def with_features(rows: Slice | None, value: Tensor, new: Tensor, dim: int = -1) -> Tensor:
    return new if rows is None else value.index_copy(dim, _index(rows, value.device), new.to(value.dtype))


def _index(rows: Slice, device: torch.device) -> Tensor:
    return torch.tensor([i for start, stop in rows.blocks() for i in range(start, stop)], device=device)


def weight_of(parameter: Tensor, ref: WeightRef) -> Tensor:
    """The rows of a site in a parameter, (out, in), at least in float32."""
    value = _stacked(parameter, ref)[ref.stacked_slice.index] if ref.stacked_slice is not None else parameter
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return features(ref.rows, _matrix(value, ref), 0)


def with_weight(parameter: Tensor, ref: WeightRef, new: Tensor) -> Tensor:
    """The parameter, in its stored layout, with the rows of a site replaced."""
    if ref.stacked_slice is None:
        return _with_rows(parameter, ref, new)
    matrices = list(_stacked(parameter, ref).unbind(0))
    matrices[ref.stacked_slice.index] = _with_rows(matrices[ref.stacked_slice.index], ref, new)
    return torch.stack(matrices).view(parameter.shape)


def _with_rows(matrix: Tensor, ref: WeightRef, new: Tensor) -> Tensor:
    value = with_features(ref.rows, _matrix(matrix, ref), new.to(matrix.dtype), 0)
    if ref.layout is not None:
        sizes = [matrix.shape[dim] for dim in ref.layout.order]
        return torch.movedim(value.reshape(sizes), tuple(range(matrix.ndim)), ref.layout.order)
    return value.t() if ref.transposed else value


def _matrix(parameter: Tensor, ref: WeightRef) -> Tensor:
    """A parameter of any shape as (out, in)."""
    if ref.layout is None:
        return parameter.t() if ref.transposed else parameter
    moved = torch.movedim(parameter, ref.layout.order, tuple(range(parameter.ndim)))
    rows = prod(moved.shape[: ref.layout.rows])
    return moved.reshape(rows, -1) if ref.layout.rows < parameter.ndim else moved.reshape(rows)


def _stacked(parameter: Tensor, ref: WeightRef) -> Tensor:
    """A parameter of several matrices, such as those of experts, with one matrix per index."""
    assert ref.stacked_slice is not None
    count = ref.stacked_slice.count
    return parameter if len(parameter) == count else parameter.unflatten(0, (count, -1))
