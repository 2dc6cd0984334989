"""Arithmetic on numbers, and on shapes: which go together, and what results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from peftc.forms.shapes import KeyValue, Scalar, Shape, Tokens, Vector, Weight

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def combine_shapes(op: str, left: Shape, right: Shape) -> Shape | None:
    """The shape of `left op right`; None where they do not go together.

    A scalar goes with every shape: one for each example only with hidden states, one for each row
    only with as many rows of keys and values. A vector [d] goes with hidden states [..., d]. Keys
    and values are pairs and can only be scaled. Any other shape goes with itself.
    """
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        if left.rows and right.rows and left.rows != right.rows:
            return None
        return Scalar(left.per_example or right.per_example, left.rows or right.rows)
    if isinstance(left, Scalar):
        divides_pair = op == "/" and isinstance(right, KeyValue)
        return right if _scales(op, left, right) and not divides_pair else None
    if isinstance(right, Scalar):
        return left if _scales(op, right, left) else None
    match left, right:
        case (Tokens(d=d) as tokens, Vector(e)) | (Vector(e), Tokens(d=d) as tokens) if d == e:
            return tokens
        case _:
            return left if left == right and not isinstance(left, KeyValue) else None


def _scales(op: str, scalar: Scalar, other: Shape) -> bool:
    if isinstance(other, KeyValue):
        return op in ("*", "/") and scalar.rows in (0, other.rows)
    # A weight serves the whole batch, so it has no value for each example.
    return not scalar.rows and not (scalar.per_example and isinstance(other, Weight | Vector))
