"""Arithmetic on constants, done exactly where decimal fractions allow it."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

_UNITS = {"": Decimal(1), "%": Decimal("0.01"), "K": Decimal(1000), "M": Decimal(10**6), "B": Decimal(10**9)}
_LARGEST = Decimal(10) ** 300


def numeric_value(number: ast.Number) -> int | float:
    """What a number says: `27.4M` is 27400000, `6.8%` is 0.068; an int where it is a whole number."""
    return _plain(_exact(number) * _UNITS[number.unit])


def constant(value: ast.Expr) -> int | float | None:
    """The number that `value` is, with its sign; None where it is no constant number."""
    match value:
        case ast.Number():
            return numeric_value(value)
        case ast.Negative(ast.Number() as number):
            return -numeric_value(number)
        case _:
            return None


def fold(value: ast.Binary | ast.Negative) -> ast.Expr:
    """`value` computed, where its operands are constant numbers; else as it is.

    Raises: PeftcError P120 for a division by zero, or a number that is too large.
    """
    if isinstance(value, ast.Negative):
        return (
            value.operand.operand if _is_constant(value.operand) and isinstance(value.operand, ast.Negative) else value
        )
    left, right = _signed(value.left), _signed(value.right)
    if left is None or right is None:
        return value
    (a, unit_a), (b, unit_b) = left, right
    unit, scale = _unit(value.op, unit_a, unit_b)
    if scale:
        a, b = a * _UNITS[unit_a], b * _UNITS[unit_b]
    with localcontext() as context:
        context.prec = 60
        try:
            result = {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[value.op](b)
        except (DivisionByZero, InvalidOperation, Overflow):
            raise _failed(value, "divides by zero" if value.op == "/" else "cannot be computed") from None
    if abs(result) > _LARGEST:
        raise _failed(value, "is too large a number")
    number = ast.Number(_plain(abs(result)), "%" if unit == "%" else "", span=value.span)
    return ast.Negative(number, span=value.span) if result < 0 else number


def _unit(op: str, left: str, right: str) -> tuple[str, bool]:
    """The unit of a result, and whether the operands are taken in their plain amounts first.

    A percentage stays one when it is added to another, or scaled by a plain number.
    """
    if op in "+-" and left == right == "%":
        return "%", False
    if op in "*/" and left == "%" and not right:
        return "%", False
    if op == "*" and right == "%" and not left:
        return "%", False
    return "", True


def _signed(value: ast.Expr) -> tuple[Decimal, str] | None:
    match value:
        case ast.Number(_, unit):
            return _exact(value), unit
        case ast.Negative(ast.Number() as number):
            return -_exact(number), number.unit
        case _:
            return None


def _is_constant(value: ast.Expr) -> bool:
    return constant(value) is not None


def _exact(number: ast.Number) -> Decimal:
    return Decimal(repr(number.value))


def _plain(value: Decimal) -> int | float:
    whole = value == value.to_integral_value() if abs(value) < Decimal(10) ** 25 else False
    return int(value) if whole else float(value)


def _failed(value: ast.Expr, what: str) -> PeftcError:
    return PeftcError(Diagnostic("P120", f"`{print_expression(value)}` {what}", value.span))


def placed(value: ast.Expr, at: ast.Expr) -> ast.Expr:
    """`value` as if it had been written where `at` stands: all its spans are that of `at`."""
    span = at.span
    match value:
        case ast.Call(function, args, kwargs):
            return ast.Call(
                function,
                tuple(placed(arg, at) for arg in args),
                tuple(replace(keyword, value=placed(keyword.value, at), span=span) for keyword in kwargs),
                function_span=span,
                span=span,
            )
        case ast.Negative(operand):
            return ast.Negative(placed(operand, at), span=span)
        case ast.Binary(op, left, right):
            return ast.Binary(op, placed(left, at), placed(right, at), span=span)
        case _:
            return replace(value, span=span)
