"""Kronecker products of two small matrices, as a function of a hidden state."""

from __future__ import annotations

from peftc.forms.arguments import DROPOUT, DTYPE, divides, features, integer, number, over
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape


def factors(args: Args, dims: Dims) -> tuple[int, int, int, int]:
    """(rows, columns) of A, then of B.

    Raises: Illegal P313 where A does not divide the map.
    """
    d_in, d_out = features("kron", dims.input, "reads"), features("kron", dims.target, "writes")
    rows = divides("kron", args, "rows", d_out) if args["rows"] is not None else nearest_divisor(d_out)
    columns = divides("kron", args, "columns", d_in) if args["columns"] is not None else nearest_divisor(d_in)
    return rows, columns, d_out // rows, d_in // columns


def nearest_divisor(d: int) -> int:
    """The largest divisor of d that is at most √d."""
    return max(n for n in range(1, int(d**0.5) + 1) if d % n == 0)


def scale(args: Args) -> float:
    """alpha / r, or alpha where B is whole; 1 without alpha."""
    if args["alpha"] is None:
        return 1.0
    return number(args, "alpha") / (1 if args["r"] is None else integer(args, "r"))


def _shape(args: Args, dims: Dims) -> Shape:
    _, _, rows, columns = factors(args, dims)
    if args["r"] is not None and integer(args, "r") > min(rows, columns):
        raise Illegal(
            "P311",
            f"the factor B of `kron` is {rows} × {columns}, and cannot have rank {integer(args, 'r')}",
            "r",
            help=f"use r <= {min(rows, columns)}, or leave it out: then B is whole",
        )
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    rows, columns, b_rows, b_columns = factors(args, dims)
    b = b_rows * b_columns if args["r"] is None else integer(args, "r") * (b_rows + b_columns)
    return Count(rows * columns + b, rows * columns + b)


def _rank(args: Args, dims: Dims) -> int:
    rows, columns, b_rows, b_columns = factors(args, dims)
    return min(rows, columns) * min(b_rows, b_columns, integer(args, "r") if args["r"] is not None else b_rows)


register(
    Form(
        name="kron",
        equation="f(x) = s · (A ⊗ B) x, B = B_up B_down where r is given; s = alpha / r",
        takes_input=True,
        params=(
            Param(
                "rows", "int", "rows of A, a divisor of the features written; without it the one nearest to √", low=1
            ),
            Param(
                "columns", "int", "columns of A, a divisor of the features read; without it the one nearest to √", low=1
            ),
            Param("r", "int", "rank of B; without it B is whole", low=1),
            Param("alpha", "float", "numerator of the scale; without it the scale is 1", low=0.0, open="low"),
            DROPOUT,
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.kron_module:Kron",
        paper="Edalati et al. 2022, arXiv:2212.10650 (KronA); Yeh et al. 2023, arXiv:2309.14859 (LoKr)",
        rank=_rank,
    )
)
