"""Evaluates `expect`: budgets and facts about a plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.report.plan import Plan, percent
from peftc.semantics.checks.spec import check_expect
from peftc.syntax import ast
from peftc.syntax.numbers import ARITHMETIC, COMPARISONS, numeric_value
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import PLAN_COUNTS

_WHOLE = 100  # percent


@dataclass(frozen=True)
class Quantity:
    value: float
    unit: Literal["number", "count", "percent", "truth"]  # a count is of parameters or sites; a truth is 0 or 1


def evaluate(
    statement: ast.Expect, plan: Plan, changes: Callable[[str], str | None] = lambda edit: None
) -> tuple[str, Diagnostic | None]:
    """An expectation as the formatter prints it, and P304 if it does not hold.

    `changes`: what of an edit changes the model before training.

    Raises: P116 (an unknown fact, units that do not compare), P117 (an unknown edit), P120 (x / 0).
    """
    if errors := list(check_expect(statement, [edit.name for edit in plan.edits])):
        raise PeftcError(errors)
    evaluator = _Evaluator(plan)
    left = evaluator.value(statement.left)
    holds, text = bool(left.value), print_expression(statement.left)
    if statement.op is not None and statement.right is not None:
        one, other = evaluator.comparable(left, evaluator.value(statement.right))
        holds = COMPARISONS[statement.op](one.value, other.value)
        text = f"{text} {statement.op} {print_expression(statement.right)}"
    return text, None if holds else _failure(statement, text, left, plan, changes)


class _Evaluator:
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
                return Quantity(getattr(self.totals, name), "count")
            case _:
                raise AssertionError(source)  # refused by check_expect

    def _arithmetic(self, source: ast.Binary, op: str, left: Quantity, right: Quantity) -> Quantity:
        if op == "/" and right.value == 0:
            raise PeftcError(Diagnostic("P120", f"`{print_expression(source)}` divides by zero", source.span))
        left, right = self.comparable(left, right, as_factor=op in "*/")
        return Quantity(ARITHMETIC[op](left.value, right.value), _unit(op, left, right))

    def comparable(self, left: Quantity, right: Quantity, as_factor: bool = False) -> tuple[Quantity, Quantity]:
        """Both in one unit: a percentage beside a count is of the base, any other is a ratio."""
        units = {left.unit, right.unit}
        if "percent" not in units or len(units) == 1:
            return left, right
        of_base = "count" in units and not as_factor
        whole, unit = (self.totals.base, "count") if of_base else (1, "number")
        one, other = (Quantity(q.value / 100 * whole, unit) if q.unit == "percent" else q for q in (left, right))
        return one, other


def _unit(op: str, left: Quantity, right: Quantity) -> Literal["number", "count", "percent"]:
    units = (left.unit, right.unit)
    if op == "/" and units in (("percent", "percent"), ("count", "count")):
        return "number"
    if units == ("percent", "percent"):
        return "percent"
    return "count" if "count" in units else "number"


def _failure(
    statement: ast.Expect, text: str, left: Quantity, plan: Plan, changes: Callable[[str], str | None]
) -> Diagnostic:
    subject = print_expression(statement.left)
    if left.unit == "truth":
        label = f"`{subject}` is {'true' if left.value else 'false'}"
    else:
        label = f"`{subject}` is {left.value:,.0f}" if left.unit == "count" else f"`{subject}` is {left.value:,g}"
        if isinstance(statement.left, ast.Name) and left.unit == "count":
            label += f", {percent(int(left.value), plan.totals.base)} of the base"
    span = statement.left.span if statement.right is None else statement.left.span.until(statement.right.span)
    notes = list[str]()
    match statement.left:
        case ast.Name(name) if name in PLAN_COUNTS and len(plan.edits) > 1:
            notes = [f"`{edit.name}` has {count:,}" for edit in plan.edits if (count := getattr(edit, name))]
        case ast.Call("foldable", (ast.Name(name),)):
            notes = [f"`{name}` does not fold: {e.reason}" for e in plan.edits if e.name == name and not e.foldable]
        case ast.Call("identity", (ast.Name(name),)):
            notes = [
                f"before training, `{name}` already changes what the model computes",
                *filter(None, [changes(name)]),
            ]
        case _:
            pass
    message = f"expected `{text}`, which does not hold"
    return Diagnostic("P304", message, span, label=label, notes=tuple(notes), help=_percentage(statement, left))


def _percentage(statement: ast.Expect, left: Quantity) -> str | None:
    """What to write for `stored <= 2`, which is two parameters."""
    is_budget = left.unit == "count" and isinstance(statement.left, ast.Name) and statement.op in {"<", "<="}
    match statement.right:
        case ast.Number(value, "") if is_budget and value <= _WHOLE:
            return f"this is a number of parameters; a part of the base is `{value:g}%`"
        case _:
            return None
