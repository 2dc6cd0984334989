"""The values of numbers in a text, exact for decimal fractions."""

import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from peftc.syntax import ast

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

UNITS = {"": Decimal(1), "%": Decimal("0.01"), "K": Decimal(1000), "M": Decimal(10**6), "B": Decimal(10**9)}


def numeric_value(number: ast.Number) -> int | float:
    """The value of a literal: `27.4M` is 27400000, `6.8%` is 0.068. Whole numbers are ints."""
    return to_python(Decimal(repr(number.value)) * UNITS[number.unit])


def is_number(text: str) -> bool:
    """Whether a text is a literal of a number."""
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?[%KMB]?", text) is not None


def to_python(value: Decimal) -> int | float:
    return int(value) if abs(value) < Decimal(10) ** 25 and value == value.to_integral_value() else float(value)
