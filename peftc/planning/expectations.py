"""`expect`: budgets and facts about a plan, evaluated on its numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean
from peftc.planning.model import Plan, PlanEdit, PlanTotals
from peftc.semantics.constants import amount
from peftc.syntax import ast
from peftc.syntax.print_expressions import expression

COUNTS = ("trained", "stored", "changed", "served")
FACTS = ("foldable", "identity", "sites")
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
    text: str
    holds: bool
    failure: Diagnostic | None


def text_of(statement: ast.Expect) -> str:
    """`stored <= 6.8%`, as the formatter prints it."""
    left = expression(statement.left)
    return (
        left
        if statement.op is None or statement.right is None
        else f"{left} {statement.op} {expression(statement.right)}"
    )


def evaluate(statement: ast.Expect, plan: Plan) -> Outcome:
    """Whether the plan is as expected.

    Raises: P320 for an expression that means nothing here (an unknown name or edit, a comparison of unlike things).
    """
    facts = _Facts(plan)
    left = facts.value(statement.left)
    if statement.op is None or statement.right is None:
        if left.kind != "truth":
            raise _error(
                "an expectation is true or false", statement.left.span, "this is a number", "compare it: `<= 6.8%`"
            )
        holds = bool(left.value)
    else:
        right = facts.value(statement.right)
        a, b = facts.comparable(left, right, statement)
        holds = COMPARISONS[statement.op](a, b)
    text = text_of(statement)
    return Outcome(text, holds, None if holds else _failure(statement, text, left, plan))


class _Facts:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def value(self, source: ast.Expr) -> Quantity:
        match source:
            case ast.Number(value, "%"):
                return Quantity(value, "percent")
            case ast.Number():
                return Quantity(amount(source), "number")
            case ast.Boolean(truth):
                return Quantity(truth, "truth")
            case ast.Negative(operand):
                inner = self.value(operand)
                return Quantity(-inner.value, inner.kind)
            case ast.Name(name):
                return self.total(source, name)
            case ast.Binary(op, left, right):
                return self.arithmetic(source, op, self.value(left), self.value(right))
            case ast.Call():
                return self.fact(source)
            case ast.String():
                raise _error("a text is nothing to expect", source.span)

    def total(self, source: ast.Name, name: str) -> Quantity:
        if name in (*COUNTS, "base"):
            return Quantity(_count(self.plan.totals, name), "count")
        raise _error(
            f"`{name}` is no number of a plan",
            source.span,
            "expected one of " + ", ".join((*COUNTS, "base")),
            did_you_mean(name, (*COUNTS, "base")),
        )

    def fact(self, call: ast.Call) -> Quantity:
        known = (*FACTS, *COUNTS)
        if call.function not in known:
            raise _error(
                f"`{call.function}` is no fact of a plan", call.function_span, help=did_you_mean(call.function, known)
            )
        if len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], ast.Name):
            raise _error(f"`{call.function}` takes the name of one edit", call.span)
        edit = self.edit(call.args[0])
        if call.function == "sites":
            return Quantity(len(edit.sites), "count")
        if call.function in FACTS:
            return Quantity(edit.foldable if call.function == "foldable" else edit.identity, "truth")
        return Quantity(_count(edit, call.function), "count")

    def edit(self, name: ast.Name) -> PlanEdit:
        found = {edit.name: edit for edit in self.plan.edits}
        if name.id not in found:
            raise _error(f"there is no edit `{name.id}`", name.span, help=did_you_mean(name.id, found))
        return found[name.id]

    def arithmetic(self, source: ast.Binary, op: str, left: Quantity, right: Quantity) -> Quantity:
        if "truth" in (left.kind, right.kind):
            raise _error("true and false are not numbers", source.span)
        if op == "/" and right.value == 0:
            raise _error("this divides by zero", source.span)
        if op in "+-" and left.kind != right.kind and "percent" in (left.kind, right.kind):
            left, right = self.plain(left), self.plain(right)
        elif op in "*/" and "percent" in (left.kind, right.kind):
            left, right = _ratio(left), _ratio(right)
        kind = _kind(op, left, right)
        return Quantity(ARITHMETIC[op](left.value, right.value), kind)

    def plain(self, quantity: Quantity) -> Quantity:
        if quantity.kind != "percent":
            return quantity
        return Quantity(quantity.value / 100 * self.plan.totals.base, "count")

    def comparable(self, left: Quantity, right: Quantity, statement: ast.Expect) -> tuple[float, float]:
        kinds = {left.kind, right.kind}
        if "truth" in kinds and (len(kinds) > 1 or statement.op not in ("==", "!=")):
            raise _error("true or false can only be compared with `true` or `false`", statement.span, "unlike things")
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
        return "percent"
    if op == "/" and kinds == ("count", "count"):
        return "number"
    return "count" if "count" in kinds else "number"


def _failure(statement: ast.Expect, text: str, left: Quantity, plan: Plan) -> Diagnostic:
    return Diagnostic(
        "P304",
        f"expected `{text}`, which does not hold",
        statement.span,
        label=_found(statement, left, plan),
        notes=tuple(_notes(statement, plan)),
    )


def _found(statement: ast.Expect, left: Quantity, plan: Plan) -> str:
    subject = expression(statement.left)
    match left.kind:
        case "truth":
            return f"`{subject}` is {'true' if left.value else 'false'}"
        case "count" if plan.totals.base and not subject.startswith("sites"):
            return f"`{subject}` is {left.value:,.0f} ({left.value / plan.totals.base:.3%} of the base)"
        case _:
            return f"`{subject}` is {left.value:,g}"


def _notes(statement: ast.Expect, plan: Plan) -> list[str]:
    match statement.left:
        case ast.Name(name) if name in COUNTS and len(plan.edits) > 1:
            return [f"`{edit.name}`: {_count(edit, name):,}" for edit in plan.edits if _count(edit, name)]
        case ast.Call("foldable", (ast.Name(name),)):
            return [
                f"`{name}` does not fold: {edit.reason}"
                for edit in plan.edits
                if edit.name == name and not edit.foldable
            ]
        case _:
            return []


def _error(message: str, span: Span, label: str = "", help: str | None = None) -> PeftcError:
    return PeftcError(Diagnostic("P320", message, span, label=label, help=help))
