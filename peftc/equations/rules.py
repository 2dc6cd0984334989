"""Primitives, and their rules: the type, the rank and the cost of a value. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from peftc.diagnostics.record import record
from peftc.equations.values import VECTORS, Batch, Number, Type, Value

Operand = Value | Number
Types = Sequence[Type | Number]
Affinity = Literal["linear", "sum", "product", "quotient", "nonlinear"]
_ON_ENTRIES = "`*` and `+` act on entries, a vector on each row, and `column(v)` on each column; a product is `@`"
_LEFT = "a matrix is left of what it maps, as in papers: `B @ A @ x`"
_SIZES = "a matrix has the sizes [results, inputs], and the last one acts first: `B @ A @ x`"


@record()
class Primitive:
    """One operation.

    Attributes:
        name: as it is written.
        signature: how it is called.
        doc: what it computes.
        type: the type of the value, of the types of its operands (numbers stay numbers).
        torch: the function that computes it, by its dotted name; empty: it is its first operand.
        initial: its value of the initial values of its operands, if all are numbers.
        affinity: "linear" in its first operand, a "sum", a "product" or a "quotient" of its two,
            or "nonlinear".
        rank: the most rank of its value, of the ranks and types of its operands.
        flops: for one token, of the types of operands and value.
        operands: how many it takes, at least and at most.
        only_first: whether it is its first operand in evaluation, whatever the others are.
        entries: whether it acts on each entry alone, of operands aligned from the right.
        by_rows: whether operands may have a first dimension of rows, aligned from the right.
    """

    name: str
    signature: str
    doc: str
    type: Callable[[Types], Type]
    torch: str
    initial: Callable[..., float | None] | None = None
    affinity: Affinity = "nonlinear"
    rank: Callable[[Sequence[Operand]], int | None] | None = None
    flops: Callable[[Types, Type], int] | None = None
    operands: tuple[int, int] = (1, 1)
    entries: bool = False
    by_rows: bool = False
    only_first: bool = False


class Mismatch(Exception):
    """Operands that do not fit together. `operand`: the number of the one to blame."""

    def __init__(self, message: str, operand: int | None = None, code: str = "P301", help_: str | None = None) -> None:
        super().__init__(message)
        self.message, self.operand, self.code, self.help = message, operand, code, help_


# Types


def tensor(operands: Types, at: int = 0) -> Type:
    """An operand that is a tensor. Raises: Mismatch."""
    operand = operands[at]
    if not isinstance(operand, Type):
        raise Mismatch(f"expected a tensor, found the number {operand}", at, "P105")
    return operand


def plain(operands: Types, at: int = 0) -> Type:
    """A tensor that is not ids. Raises: Mismatch."""
    type_ = tensor(operands, at)
    if type_.batch == "ids":
        raise Mismatch(f"a matrix maps ids, nothing else reads them, here {type_}", at)
    return type_


def matrix(operands: Types, at: int = 0) -> Type:
    """A matrix that is the same for all tokens. Raises: Mismatch."""
    type_ = tensor(operands, at)
    if type_.batch or len(type_.size) != 2:
        raise Mismatch(f"expected a matrix, found {type_}", at, help_=_LEFT if type_.batch else VECTORS)
    return type_


def same(operands: Types) -> Type:
    return plain(operands)


_BATCHES: tuple[Batch, ...] = ("", "examples", "tokens")


def broadcast(operands: Types) -> Type:
    """The type of an operation on the entries of two tensors, as torch broadcasts."""
    if not isinstance(operands[0], Type):
        return plain(operands, 1)
    if not isinstance(operands[1], Type):
        return plain(operands, 0)
    left, right = plain(operands, 0), plain(operands, 1)
    batch: Batch = max((left.batch, right.batch), key=_BATCHES.index)
    if left.batch and right.batch and len(left.size) != len(right.size):
        raise Mismatch(f"{left} and {right} have different dimensions")
    for side, other in ((left, right), (right, left)):
        if not side.batch and other.batch and len(side.size) > len(other.size):
            raise Mismatch(f"{side} has more dimensions than {other}")
    count = max(len(left.size), len(right.size))
    size: list[int] = []
    for a, b in zip(_padded(left.size, count), _padded(right.size, count), strict=True):
        if a != b and 1 not in (a, b):
            raise Mismatch(f"{left} and {right} do not fit together", help_=_ON_ENTRIES)
        size.append(b if a == 1 else a)
    return Type(tuple(size), batch)


def _padded(size: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (*[1] * (count - len(size)), *size)


def product(operands: Types) -> Type:
    left, right = tensor(operands), tensor(operands, 1)
    if left.batch == "tokens" and len(left.size) == 2 and right.batch in ("", "tokens") and len(right.size) == 1:
        if left.size[1:] != right.size:  # a matrix for each token
            raise Mismatch(f"{left} maps {left.size[1]} features, and {right} has others", help_=_SIZES)
        return Type(left.size[:1], "tokens")
    if len(left.size) == 3 and not left.batch and right.batch == "tokens" and len(right.size) == 2:
        heads, rows, columns = left.size  # a matrix for each head
        if right.size != (heads, columns):
            raise Mismatch(f"{left} maps {columns} features of {heads} heads, and {right} has others")
        return Type((heads, rows), "tokens")
    left = matrix(operands)
    inner = right.size[-1:] if right.batch or len(right.size) == 1 else right.size[:1]
    if not right.batch and len(right.size) > 2:
        raise Mismatch(f"expected a vector or a matrix, found {right}", 1)
    if inner != left.size[1:]:
        own = inner[0] if inner else "none"
        raise Mismatch(f"{left} maps {left.size[1]} features, and {right} has {own}", help_=_SIZES)
    if right.batch:
        return Type((*right.size[:-1], left.size[0]), "tokens" if right.batch == "ids" else right.batch)
    return Type((left.size[0], *right.size[1:]))


def transpose(operands: Types) -> Type:
    type_ = tensor(operands)
    if type_.batch not in ("", "tokens") or len(type_.size) not in (2, 3):
        raise Mismatch(f"expected a matrix, or one for each head, found {type_}", 0, help_=VECTORS)
    *heads, rows, columns = type_.size
    return Type((*heads, columns, rows), type_.batch)


def corner(operands: Types) -> Type:
    rows, columns = matrix(operands).size
    for at, most in ((1, rows), (2, columns)):
        size = operands[at]
        if not isinstance(size, int) or not 0 < size <= most:
            raise Mismatch(f"the matrix is {matrix(operands)}, and has no corner with {size}", at, "P106")
    return Type((int(str(operands[1])), int(str(operands[2]))))


def reshaped(operands: Types) -> Type:
    """A tensor of the same entries with other dimensions."""
    type_, sizes = tensor(operands), operands[1:]
    numbers = tuple(n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 0)
    if type_.batch == "ids" or len(numbers) < len(sizes) or math.prod(numbers) != type_.entries:
        raise Mismatch(f"{type_} cannot have the dimensions {', '.join(map(str, sizes))}", 0)
    return Type(numbers, type_.batch)


def one(operands: Types) -> Type:
    """One number of a tensor that is the same for all tokens."""
    type_ = tensor(operands)
    if type_.batch:
        raise Mismatch(f"{type_} has values for each token; expected a parameter", 0)
    return Type(())


def narrowed(operands: Types) -> Type:
    """Some of the first dimension of a parameter, or of the features of each token."""
    type_, (start, count) = plain(operands), operands[1:]
    most = type_.size[0] if len(type_.size) == 1 or (type_.size and not type_.batch) else 0
    if not isinstance(start, int) or not isinstance(count, int) or not 0 <= start < start + count <= most:
        what = "features" if type_.batch else "rows"
        raise Mismatch(f"{type_} has {most} {what}, and not {count} of them from {start} on", 0)
    return Type((count, *type_.size[1:]), type_.batch)


def vector(operands: Types, at: int = 0) -> Type:
    """A vector that is the same for all tokens. Raises: Mismatch."""
    type_ = tensor(operands, at)
    if type_.batch or len(type_.size) != 1:
        raise Mismatch(f"expected a vector, found {type_}", at)
    return type_


def clamped(operands: Types) -> Type:
    """A tensor between two numbers."""
    low, high = operands[1:]
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low >= high:
        raise Mismatch(f"expected two numbers, the first less than the second, found {low} and {high}", 1, "P106")
    return plain(operands)


def normalized(operands: Types) -> Type:
    """A tensor, and what is added to its variance."""
    if len(operands) > 1 and (not isinstance(operands[1], int | float) or operands[1] <= 0):
        raise Mismatch(f"what is added to the variance is a number above 0, found {operands[1]}", 1, "P106")
    return plain(operands)


def last_of_each(operands: Types) -> Type:
    """One value for each row, or for the features of each token."""
    type_ = plain(operands)
    if not type_.size:
        raise Mismatch("a scalar has no features", 0)
    return Type((*type_.size[:-1], 1), type_.batch)


def over_tokens(operands: Types) -> Type:
    type_ = plain(operands)
    if type_.batch != "tokens":
        raise Mismatch(f"{type_} has no tokens", 0)
    return Type(type_.size, "examples")


def dropout(operands: Types) -> Type:
    p = operands[1]
    if not isinstance(p, int | float) or not 0 <= p < 1:
        raise Mismatch(f"a probability is a number in [0, 1), found {p}", 1, "P106")
    return tensor(operands)


def kronecker(operands: Types) -> Type:
    (a, b), (c, d) = matrix(operands).size, matrix(operands, 1).size
    return Type((a * c, b * d))


def block_diagonal(operands: Types) -> Type:
    type_ = tensor(operands)
    if type_.batch or len(type_.size) != 3:
        raise Mismatch(f"expected blocks [count, rows, columns], found {type_}", 0)
    count, rows, columns = type_.size
    return Type((count * rows, count * columns))


def square(operands: Types) -> Type:
    type_ = tensor(operands)
    if type_.batch or len(type_.size) < 2 or type_.size[-1] != type_.size[-2]:
        raise Mismatch(f"expected square matrices, found {type_}", 0)
    return type_


def among_features(operands: Types) -> Type:
    """The features of each token, or entries of a vector, of which a number is chosen."""
    type_ = plain(operands)
    if len(operands) > 1:
        k, most = operands[1], type_.size[-1] if type_.size else 1
        if not isinstance(k, int) or isinstance(k, bool) or not 0 < k <= most:
            raise Mismatch(f"there are {most} features, and {k} cannot be chosen of them", 1, "P106")
    return type_


def at_positions(operands: Types) -> Type:
    type_ = plain(operands)
    if type_.batch != "tokens":
        raise Mismatch(f"{type_} has no tokens", 0)
    for at, end in enumerate(operands[1:], 1):
        least, what = (0, "the id of a token") if at == 3 else (1, "a number of tokens")
        if end != "none" and (not isinstance(end, int) or isinstance(end, bool) or end < least):
            raise Mismatch(f"expected {what}, or `none`, found {end}", at, "P106")
    return type_


def history(operands: Types) -> Type:
    """Features of each token, for this site and for those below."""
    type_, sites = tensor(operands), operands[1]
    if type_.batch != "tokens" or len(type_.size) != 1:
        raise Mismatch(f"expected features of each token, found {type_}", 0)
    return Type((int(str(sites)), *type_.size), "tokens")


def wide_matrix(operands: Types) -> Type:
    type_ = matrix(operands)
    if type_.size[0] > type_.size[1]:
        raise Mismatch(f"{type_} has more rows than can be orthonormal", 0)
    return type_


def skew(operands: Types) -> Type:
    type_ = tensor(operands)
    count = type_.size[-1] if type_.size else 0
    n = (1 + math.isqrt(1 + 8 * count)) // 2
    if type_.batch or not type_.size or n * (n - 1) // 2 != count:
        raise Mismatch(f"expected n (n - 1) / 2 entries of each matrix, found {type_}", 0)
    return Type((*type_.size[:-1], n, n))


def power(operands: Types) -> Type:
    exponent = operands[1]
    if not isinstance(exponent, int) or isinstance(exponent, bool) or exponent < 0:
        raise Mismatch(f"a power is a whole number from 0 on, found {exponent}", 1, "P106")
    return square(operands)


def solution(operands: Types) -> Type:
    left, right = square(operands), tensor(operands, 1)
    if right.batch or len(right.size) != len(left.size) or right.size[:-1] != left.size[:-1]:
        raise Mismatch(f"{left} has as many columns as {right} has rows, for each block", 1)
    return right


def left_vectors(operands: Types) -> Type:
    return Type((matrix(operands).size[0], *singular_values(operands).size))


def right_vectors(operands: Types) -> Type:
    return Type((matrix(operands).size[1], *singular_values(operands).size))


def singular_values(operands: Types) -> Type:
    r, most = operands[1], min(matrix(operands).size)
    if not isinstance(r, int) or isinstance(r, bool) or not 0 < r <= most:
        raise Mismatch(f"the matrix has {most} singular values, and {r} are asked for", 1, "P106")
    return Type((r,))


def orthonormal_factor(operands: Types) -> Type:
    rows, columns = matrix(operands).size
    return Type((rows, min(rows, columns)))


def triangular_factor(operands: Types) -> Type:
    rows, columns = matrix(operands).size
    return Type((min(rows, columns), columns))


# Ranks


def _rank(operand: Operand) -> int | None:
    if not isinstance(operand, Value):
        return None
    size = operand.type.size
    bound = min(size) if not operand.type.batch and len(size) == 2 else None
    ranks = [rank for rank in (operand.rank, bound) if rank is not None]
    return min(ranks, default=None)


def least_rank(operands: Sequence[Operand]) -> int | None:
    ranks = [rank for operand in operands if (rank := _rank(operand)) is not None]
    return min(ranks, default=None)


def sum_of_ranks(operands: Sequence[Operand]) -> int | None:
    varying = [operand for operand in operands if isinstance(operand, Value) and operand.varies]
    if len(varying) == 1 and varying[0].type.batch:  # a bias does not change the map
        return _rank(varying[0])
    ranks = [_rank(operand) for operand in operands]
    return None if any(rank is None for rank in ranks) else sum(rank for rank in ranks if rank is not None)


def product_of_ranks(operands: Sequence[Operand]) -> int | None:
    """Of a number, or a vector of factors, times a matrix or a map; or of two matrices."""
    left, right = operands
    for side, other in ((left, right), (right, left)):
        if not isinstance(side, Value) or (not side.varies and len(side.type.size) < 2):
            return _rank(other)
        if not side.varies and not isinstance(other, Value):
            return _rank(side)
    ranks = _rank(left), _rank(right)
    if None in ranks or left.varies or right.varies:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return math.prod(rank for rank in ranks if rank is not None)


def quotient_rank(operands: Sequence[Operand]) -> int | None:
    divisor = operands[1]
    is_factor = not isinstance(divisor, Value) or divisor.type.entries in {1, max(divisor.type.size, default=1)}
    return _rank(operands[0]) if is_factor else None


def own_rank(operands: Sequence[Operand]) -> int | None:
    return _rank(operands[0])


# Costs


def entries(operands: Types, result: Type) -> int:
    return result.entries


def matmul_flops(operands: Types, result: Type) -> int:
    right = operands[1]
    if isinstance(right, Type) and right.batch == "ids":
        return 0
    return 2 * result.entries * tensor(operands).size[-1]
