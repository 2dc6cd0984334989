"""Which shapes go together in arithmetic, and what comes out."""

from __future__ import annotations

from peftc.forms.shapes import KeyValue, Scalar, Shape, Tokens, Vector, Weight


def combine(op: str, left: Shape, right: Shape) -> Shape | None:
    """The shape of `left op right`, None where they do not go together.

    A scalar goes with everything (one for each example: with hidden states; one for each row: with as many rows of keys and
    values); a vector [d] with hidden states [..., d];
    keys and values are pairs, which can only be scaled; all else only with its own shape.
    """
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        if left.rows and right.rows and left.rows != right.rows:
            return None
        return Scalar(left.per_example or right.per_example, left.rows or right.rows)
    if isinstance(left, Scalar):
        return right if _scales(op, left, right) and op != "/" else _divided(op, left, right)
    if isinstance(right, Scalar):
        return left if _scales(op, right, left) else None
    if left == right:
        return None if isinstance(left, KeyValue) else left
    return _along_features(left, right)


def _scales(op: str, scalar: Scalar, other: Shape) -> bool:
    if isinstance(other, KeyValue):
        return op in ("*", "/") and scalar.rows in (0, other.rows)
    if scalar.rows:
        return False
    if isinstance(other, Weight | Vector):
        return not scalar.per_example  # a weight is one for the whole batch
    return True


def _divided(op: str, left: Scalar, right: Shape) -> Shape | None:
    """`1 / h`: entry by entry."""
    return right if op == "/" and not isinstance(right, KeyValue) and _scales(op, left, right) else None


def _along_features(left: Shape, right: Shape) -> Shape | None:
    match left, right:
        case (Tokens(d=d) as tokens, Vector(e)) | (Vector(e), Tokens(d=d) as tokens) if d == e:
            return tokens
        case _:
            return None
