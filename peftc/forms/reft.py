"""Interventions in a low-rank subspace of the hidden state (ReFT)."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, bounded_rank, features, integer, over
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Tokens


def _shape(args: Args, dims: Dims) -> Shape:
    d, d_out = features("reft", dims.input, "reads"), features("reft", dims.target, "writes")
    if args["subtract"] and d != d_out:
        raise Illegal(
            "P301",
            f"`reft` reads {dims.input} but writes {dims.target}",
            "input",
            ("R h is taken off, and R has the features that are written",),
            "write `subtract=false`, or read what is written",
        )
    bounded_rank("reft", integer(args, "r"), d_out, d)
    made = over(dims)
    if picks(args) and any(isinstance(shape, Tokens) and shape.of for shape in (dims.input, dims.target)):
        raise Illegal("P422", "the tokens here are not those of the stack, whose positions `first` and `last` count")
    return made


def picks(args: Args) -> bool:
    """Whether it acts on some of the tokens only."""
    return args["first"] is not None or args["last"] is not None


def _count(args: Args, dims: Dims) -> Count:
    d_in, d_out, r = features("reft", dims.input, "reads"), features("reft", dims.target, "writes"), integer(args, "r")
    total = r * (d_in + d_out) + r
    return Count(total, total)


register(
    Form(
        name="reft",
        equation="f(h) = Rᵀ (W h + b − R h), at the positions chosen",
        takes_input=True,
        params=(
            Param("r", "int", "rank of the subspace", required=True, low=1),
            Param("orthogonal", "bool", "whether the rows of R are kept orthonormal", True),
            Param("subtract", "bool", "whether R h is taken off; without it f(h) = Rᵀ (W h + b)", True),
            Param(
                "first",
                "int",
                "acts on so many tokens at the start of each sequence; without it and `last`, on all",
                low=1,
            ),
            Param(
                "last",
                "int",
                "acts on so many tokens at the end of each input, which a call with a cache has not",
                low=1,
            ),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=lambda args: "it acts on some positions only" if picks(args) else None,
        picks=picks,
        module="peftc.forms.reft_module:ReFT",
        paper="Wu et al. 2024, arXiv:2404.03592, Eq. 2 (LoReFT) and 3 (DiReFT)",
        rank=lambda args, dims: integer(args, "r"),
    )
)
