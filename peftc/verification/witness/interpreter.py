"""The equations of edits, computed on values that were observed. A form is a black box: a module that is called."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Slice, WeightRef
from peftc.planning import ir
from peftc.verification.witness.forms import Forms
from peftc.verification.witness.locations import Unreachable

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@dataclass(frozen=True)
class Pair:
    """Keys and values, and the rows that were joined to them.

    Shapes: key, value (batch, heads, tokens, d_head); each of `rows` a pair (batch, kv_heads, rows, d_head).
    """

    key: Tensor
    value: Tensor
    rows: tuple[tuple[Tensor, Tensor], ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        rows = tuple((function(k), function(v)) for k, v in self.rows)
        return Pair(function(self.key), function(self.value), rows)


class Interpreter:
    """Evaluates equations site by site. `modules`: the base, whose frozen modules equations may call."""

    def __init__(self, forms: Forms, modules: nn.Module) -> None:
        self.forms, self.modules = forms, modules
        self.values: dict[tuple[str, str], Any] = {}
        self.memo: dict[tuple[int, int], Any] = {}

    def forget(self, sites: Collection[str], edits: Collection[int]) -> None:
        """Begins a new call of the layer that these sites are in, and these edits, given by their `id`."""
        self.values = {key: value for key, value in self.values.items() if key[0] not in sites}
        self.memo = {key: value for key, value in self.memo.items() if key[0] not in edits}

    def assign(self, placed: ir.SiteEdit, index: int, present: Any) -> Any:
        """The value that equation `index` of an edit gives a state, from its present value."""
        assign = placed.assigns[index]
        key = (placed.site.path, assign.state)
        self.values[key] = present
        for at, term in placed.lets:
            if at == index:
                self.term(placed, term, present)
        self.values[key] = value = self.term(placed, assign.value, present)
        return value

    def term(self, placed: ir.SiteEdit, term: ir.Term, present: Any) -> Any:
        """A term is computed once in a call, wherever it stands."""
        key = (id(placed), id(term))
        if key not in self.memo:
            self.memo[key] = self._term(placed, term, present)
        return self.memo[key]

    def _term(self, placed: ir.SiteEdit, term: ir.Term, present: Any) -> Any:
        match term:
            case ir.Read(state=state):
                if (placed.site.path, state) not in self.values:
                    raise Unreachable(f"`{state}` is not computed before the state that is written")
                return self.values[placed.site.path, state]
            case ir.Constant(value=value):
                return value
            case ir.FormCall(instance=instance, inputs=values):
                like = present.key if isinstance(present, Pair) else present
                arguments = [self.term(placed, value, present) for value in values]
                return self.forms.of(placed, instance)(*(arguments or [like]))
            case ir.FrozenCall(module=module, input=value):
                return self.modules.get_submodule(module)(self.term(placed, value, present))
            case ir.Arithmetic(op=op, left=left, right=right):
                return calculate(op, self.term(placed, left, present), self.term(placed, right, present))
            case ir.Concat(parts=parts):
                return joined([self.term(placed, part, present) for part in parts])


def calculate(op: str, left: Any, right: Any) -> Any:
    """A sum, difference, product or quotient; of keys and values with a number, for both."""
    function = OPERATORS[op]
    for one, other, swapped in ((left, right, False), (right, left, True)):
        if isinstance(one, Pair | tuple) and not isinstance(other, Pair | tuple):
            by = other.unsqueeze(1) if isinstance(other, Tensor) and other.ndim == 3 else other

            def each(value: Tensor, by: Any = by, swapped: bool = swapped) -> Tensor:
                return function(by, value) if swapped else function(value, by)

            return one.map(each) if isinstance(one, Pair) else tuple(each(part) for part in one)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return tuple(function(a, b) for a, b in zip(left, right, strict=True))
    return function(left, right)


def joined(parts: Sequence[Any]) -> Pair:
    """Rows joined to keys and values. All rows are visible, so that their order has no meaning."""
    own = next(part for part in parts if isinstance(part, Pair))
    return replace(own, rows=(*own.rows, *(part for part in parts if part is not own)))


# Parts of values -----------------------------------------------------------------------------------------------------


def features(rows: Slice | None, value: Tensor, dim: int = -1) -> Tensor:
    """The rows of a site along a dimension."""
    return value if rows is None else value.index_select(dim, _index(rows, value.device))


def with_features(rows: Slice | None, value: Tensor, new: Tensor, dim: int = -1) -> Tensor:
    """The value with the rows of a site replaced."""
    return new if rows is None else value.index_copy(dim, _index(rows, value.device), new.to(value.dtype))


def _index(rows: Slice, device: torch.device) -> Tensor:
    return torch.tensor([i for start, stop in rows.blocks() for i in range(start, stop)], device=device)


def weight_of(parameter: Tensor, ref: WeightRef) -> Tensor:
    """A parameter as an equation sees it: (out, in), the rows of the site, at least in float32."""
    value = _piece(parameter, ref)
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return features(ref.rows, value.t() if ref.transposed else value, 0)


def with_weight(parameter: Tensor, ref: WeightRef, new: Tensor) -> Tensor:
    """The parameter as it is stored, with the site's part replaced."""
    piece = _piece(parameter, ref)
    piece = piece.t() if ref.transposed else piece
    piece = with_features(ref.rows, piece, new.to(parameter.dtype), 0)
    piece = piece.t() if ref.transposed else piece
    if ref.stacked_slice is None:
        return piece
    pieces = list(_pieces(parameter, ref.stacked_slice.count).unbind(0))
    pieces[ref.stacked_slice.index] = piece
    return torch.stack(pieces).view(parameter.shape)


def _piece(parameter: Tensor, ref: WeightRef) -> Tensor:
    return (
        parameter if ref.stacked_slice is None else _pieces(parameter, ref.stacked_slice.count)[ref.stacked_slice.index]
    )


def _pieces(parameter: Tensor, count: int) -> Tensor:
    """Equal pieces of a parameter along its first dimension, such as those of experts."""
    return parameter if len(parameter) == count else parameter.unflatten(0, (count, -1))
