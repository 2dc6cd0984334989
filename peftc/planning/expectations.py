"""`expect`: budgets and facts about a plan, evaluated on its numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.counts import percent
from peftc.planning.report.plan import Plan, PlanEdit, PlanTotals
from peftc.semantics.checks.expects import check_expect
from peftc.semantics.constants import numeric_value
from peftc.semantics.vocabulary import PLAN_COUNTS
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
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
    """`count`: parameters or sites; `percent`: of the base, where compared with parameters; `truth`: 0 or 1."""

    value: float
    kind: Literal["number", "count", "percent", "truth"]


@dataclass(frozen=True)
class Outcome:
    """`text`: the expectation as the formatter prints it; `failure`: P304 where it does not hold."""

    text: str
    holds: bool
    failure: Diagnostic | None


def evaluate(statement: ast.Expect, plan: Plan) -> Outcome:
    """Whether the plan is as expected.

    Raises: P116 for an unknown fact or a comparison of unlike things, P117 for an unknown edit, P120 for a division by zero.
    """
    if wrong := list(check_expect(statement, [edit.name for edit in plan.edits])):
        raise PeftcError(wrong)
    facts = _Facts(plan)
    left = facts.value(statement.left)
    holds, text = bool(left.value), print_expression(statement.left)
    if statement.op is not None and statement.right is not None:
        holds = COMPARISONS[statement.op](*facts.comparable(left, facts.value(statement.right)))
        text = f"{text} {statement.op} {print_expression(statement.right)}"
    return Outcome(text, holds, None if holds else _failure(statement, text, left, plan))


class _Facts:
    """Expressions of an expectation that has been checked."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
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
                return Quantity(-inner.value, inner.kind)
            case ast.Binary(op, left, right):
                return self.arithmetic(source, op, self.value(left), self.value(right))
            case ast.Call(function, (ast.Name(name),)):
                return self.fact(function, self.edits[name])
            case ast.Name(name):
                return Quantity(_count(self.plan.totals, name), "count")
            case _:
                raise AssertionError(source)  # refused by check_expect

    def fact(self, function: str, edit: PlanEdit) -> Quantity:
        if function == "sites":
            return Quantity(len(edit.sites), "count")
        return Quantity(edit.foldable if function == "foldable" else edit.identity, "truth")

    def arithmetic(self, source: ast.Binary, op: str, left: Quantity, right: Quantity) -> Quantity:
        if op == "/" and right.value == 0:
            raise PeftcError(Diagnostic("P120", f"`{print_expression(source)}` divides by zero", source.span))
        kinds = {left.kind, right.kind}
        if "percent" in kinds and len(kinds) > 1:
            both_add = op in "+-" and "count" in kinds
            left, right = (self.plain(side) if both_add else _ratio(side) for side in (left, right))
        return Quantity(ARITHMETIC[op](left.value, right.value), _kind(op, left, right))

    def plain(self, quantity: Quantity) -> Quantity:
        """A percentage as parameters."""
        if quantity.kind != "percent":
            return quantity
        return Quantity(quantity.value / 100 * self.plan.totals.base, "count")

    def comparable(self, left: Quantity, right: Quantity) -> tuple[float, float]:
        kinds = {left.kind, right.kind}
        if kinds == {"count", "percent"}:
            left, right = self.plain(left), self.plain(right)
        elif kinds == {"number", "percent"}:
            left, right = _ratio(left), _ratio(right)
        return left.value, right.value


def _count(numbers: PlanTotals | PlanEdit, name: str) -> int:
    found: int = getattr(numbers, name)
    return found


def _ratio(quantity: Quantity) -> Quantity:
    return Quantity(quantity.value / 100, "number") if quantity.kind == "percent" else quantity


def _kind(op: str, left: Quantity, right: Quantity) -> Literal["number", "count", "percent"]:
    kinds = (left.kind, right.kind)
    if kinds == ("percent", "percent"):
        return "number" if op == "/" else "percent"
    if op == "/" and kinds == ("count", "count"):
        return "number"
    return "count" if "count" in kinds else "number"


def _failure(statement: ast.Expect, text: str, left: Quantity, plan: Plan) -> Diagnostic:
    return Diagnostic(
        "P304",
        f"expected `{text}`, which does not hold",
        statement.left.span if statement.right is None else statement.left.span.until(statement.right.span),
        label=_found(statement, left, plan),
        notes=tuple(_notes(statement, plan)),
    )


def _found(statement: ast.Expect, left: Quantity, plan: Plan) -> str:
    subject = print_expression(statement.left)
    if left.kind == "truth":
        return f"`{subject}` is {'true' if left.value else 'false'}"
    value = f"{left.value:,.0f}" if left.kind == "count" else f"{left.value:,g}"
    of_base = isinstance(statement.left, ast.Name) and left.kind == "count"
    return f"`{subject}` is {value}" + (
        f", {percent(int(left.value), plan.totals.base)} of the base" if of_base else ""
    )


def _notes(statement: ast.Expect, plan: Plan) -> list[str]:
    match statement.left:
        case ast.Name(name) if name in PLAN_COUNTS and len(plan.edits) > 1:
            return [f"`{edit.name}` has {_count(edit, name):,}" for edit in plan.edits if _count(edit, name)]
        case ast.Call("foldable", (ast.Name(name),)):
            return [
                f"`{name}` does not fold: {edit.reason}"
                for edit in plan.edits
                if edit.name == name and not edit.foldable
            ]
        case _:
            return []
