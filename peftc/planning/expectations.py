"""Evaluates `expect`: budgets and facts about a plan."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.arithmetic import ARITHMETIC
from peftc.planning.counts import percent
from peftc.planning.report.plan import Plan, PlanEdit, PlanTotals
from peftc.semantics.checks.spec import check_expect
from peftc.semantics.constants import numeric_value
from peftc.semantics.vocabulary import PLAN_COUNTS
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Quantity:
    """A value with its unit.

    `count` is parameters or sites. `percent` is of the base if compared with parameters. `truth` is
    0 or 1.
    """

    value: float
    unit: Literal["number", "count", "percent", "truth"]


@dataclass(frozen=True)
class Outcome:
    text: str  # the expectation as the formatter prints it
    holds: bool
    failure: Diagnostic | None  # P304


def evaluate(statement: ast.Expect, plan: Plan) -> Outcome:
    """Whether an expectation holds.

    Raises:
        P116: an unknown fact, or units that do not compare. P117: an unknown edit. P120: a division
        by zero.
    """
    if errors := list(check_expect(statement, [edit.name for edit in plan.edits])):
        raise PeftcError(errors)
    evaluator = _Evaluator(plan)
    left = evaluator.value(statement.left)
    holds, text = bool(left.value), print_expression(statement.left)
    if statement.op is not None and statement.right is not None:
        holds = COMPARISONS[statement.op](*evaluator.comparable(left, evaluator.value(statement.right)))
        text = f"{text} {statement.op} {print_expression(statement.right)}"
    return Outcome(text, holds, None if holds else _failure(statement, text, left, plan))


class _Evaluator:
    """Evaluates expressions that `check_expect` accepts."""

    def __init__(self, plan: Plan) -> None:
        self.totals = plan.totals
        self.edits = {edit.name: edit for edit in plan.edits}

    def value(self, source: ast.Expr) -> Quantity:
        match source:
            case ast.Number(value, "%"):
                return Quantity(value, "percent")
            case ast.Number():
                return Quantity(numeric_value(source), "number")
            case ast.Boolean(truth):
                return Quantity(truth, "truth")
            case ast.Negative(operand):
                inner = self.value(operand)
                return Quantity(-inner.value, inner.unit)
            case ast.Binary(op, left, right):
                return self._arithmetic(source, op, self.value(left), self.value(right))
            case ast.Call("sites", (ast.Name(name),)):
                return Quantity(len(self.edits[name].sites), "count")
            case ast.Call(function, (ast.Name(name),)):
                edit = self.edits[name]
                return Quantity(edit.foldable if function == "foldable" else edit.identity, "truth")
            case ast.Name(name):
                return Quantity(_count(self.totals, name), "count")
            case _:
                raise AssertionError(source)  # refused by check_expect

    def _arithmetic(self, source: ast.Binary, op: str, left: Quantity, right: Quantity) -> Quantity:
        if op == "/" and right.value == 0:
            raise PeftcError(Diagnostic("P120", f"`{print_expression(source)}` divides by zero", source.span))
        units = {left.unit, right.unit}
        if "percent" in units and len(units) > 1:
            convert = self._as_parameters if op in "+-" and "count" in units else _as_ratio
            left, right = convert(left), convert(right)
        return Quantity(ARITHMETIC[op](left.value, right.value), _unit(op, left, right))

    def comparable(self, left: Quantity, right: Quantity) -> tuple[float, float]:
        units = {left.unit, right.unit}
        if units == {"count", "percent"}:
            left, right = self._as_parameters(left), self._as_parameters(right)
        elif units == {"number", "percent"}:
            left, right = _as_ratio(left), _as_ratio(right)
        return left.value, right.value

    def _as_parameters(self, quantity: Quantity) -> Quantity:
        if quantity.unit != "percent":
            return quantity
        return Quantity(quantity.value / 100 * self.totals.base, "count")


def _as_ratio(quantity: Quantity) -> Quantity:
    return Quantity(quantity.value / 100, "number") if quantity.unit == "percent" else quantity


def _count(numbers: PlanTotals | PlanEdit, name: str) -> int:
    count: int = getattr(numbers, name)
    return count


def _unit(op: str, left: Quantity, right: Quantity) -> Literal["number", "count", "percent"]:
    units = (left.unit, right.unit)
    if op == "/" and units in (("percent", "percent"), ("count", "count")):
        return "number"
    if units == ("percent", "percent"):
        return "percent"
    return "count" if "count" in units else "number"


def _failure(statement: ast.Expect, text: str, left: Quantity, plan: Plan) -> Diagnostic:
    subject = print_expression(statement.left)
    if left.unit == "truth":
        label = f"`{subject}` is {'true' if left.value else 'false'}"
    else:
        label = f"`{subject}` is {left.value:,.0f}" if left.unit == "count" else f"`{subject}` is {left.value:,g}"
        if isinstance(statement.left, ast.Name) and left.unit == "count":
            label += f", {percent(int(left.value), plan.totals.base)} of the base"
    span = statement.left.span if statement.right is None else statement.left.span.until(statement.right.span)
    notes = tuple(_notes(statement, plan))
    return Diagnostic("P304", f"expected `{text}`, which does not hold", span, label=label, notes=notes)


def _notes(statement: ast.Expect, plan: Plan) -> list[str]:
    match statement.left:
        case ast.Name(name) if name in PLAN_COUNTS and len(plan.edits) > 1:
            return [f"`{edit.name}` has {_count(edit, name):,}" for edit in plan.edits if _count(edit, name)]
        case ast.Call("foldable", (ast.Name(name),)):
            edits = [edit for edit in plan.edits if edit.name == name and not edit.foldable]
            return [f"`{name}` does not fold: {edit.reason}" for edit in edits]
        case _:
            return []
