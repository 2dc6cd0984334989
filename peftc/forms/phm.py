"""Bottlenecks whose weights are sums of Kronecker products (Compacter)."""

from __future__ import annotations

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, REDUCTION, divides, features, integer, over
from peftc.forms.bottleneck import affine, width
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape


def sizes(args: Args, dims: Dims) -> tuple[int, int, int]:
    """d_in, r, d_out. Raises: Illegal P313 where n does not divide one of them."""
    d_in, d_out = features("phm", dims.input, "reads"), features("phm", dims.target, "writes")
    r, n = width(args, d_in, "phm"), integer(args, "n")
    for whole in (d_in, d_out):
        divides("phm", args, "n", whole)
    if r % n:
        named = "r" if args["r"] is not None else "reduction"
        raise Illegal(
            "P313", f"`n` of `phm` is {n}, which does not divide r = {r}", named, help=f"use r={r // n * n + n}"
        )
    return d_in, r, d_out


def _shape(args: Args, dims: Dims) -> Shape:
    d_in, r, d_out = sizes(args, dims)
    most, rank = min(d_in, r, d_out) // integer(args, "n"), integer(args, "rank")
    if args["factorised"] and rank > most:
        raise Illegal("P311", f"the smaller factors of `phm` have at most rank {most}, not {rank}", "rank")
    return over(dims)


def _factor(args: Args, d_in: int, d_out: int) -> int:
    """Parameters of the smaller factors of one projection."""
    if not args["factorised"]:
        return d_in * d_out // integer(args, "n")
    return integer(args, "rank") * (d_in + d_out)


def _count(args: Args, dims: Dims) -> Count:
    d_in, r, d_out = sizes(args, dims)
    total = _factor(args, d_in, r) + _factor(args, r, d_out) + (r + d_out if args["bias"] else 0)
    total += 0 if args["shared"] else 2 * integer(args, "n") ** 3
    return Count(total, total)


def _common_count(args: Args, dims: Dims) -> Count:
    return Count(integer(args, "n") ** 3, integer(args, "n") ** 3)


register(
    Form(
        name="phm",
        equation="f(x) = act(x W_down + b_down) W_up + b_up, each W = Σᵢ Aᵢ ⊗ (Lᵢ Rᵢ), the Aᵢ common to all sites of the edit",
        takes_input=True,
        params=(
            Param("r", "int", "width of the bottleneck, in features; n divides it", low=1),
            REDUCTION,
            Param("n", "int", "number and size of the Aᵢ; it divides all features", 4, low=1),
            Param("rank", "int", "rank of Lᵢ Rᵢ", 1, low=1),
            Param("factorised", "bool", "whether Lᵢ Rᵢ is such a product, else one matrix", True),
            Param("shared", "bool", "whether the Aᵢ are common to all projections, else each has its own", True),
            ACT,
            Param("bias", "bool", "whether the two projections have biases", True),
            DROPOUT,
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=affine,
        module="peftc.forms.phm_module:PHM",
        paper="Mahabadi et al. 2021, arXiv:2106.04647 (Compacter); Zhang et al. 2021, arXiv:2102.08597 (PHM)",
        common=lambda args: "edit" if args["shared"] else None,
        common_count=_common_count,
        anywhere=True,
    )
)
