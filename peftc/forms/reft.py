"""Interventions in a low-rank subspace of the hidden state (ReFT)."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from peftc.forms.arguments import DTYPE, bounded_rank, integer, over
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import register
from peftc.forms.shapes import Shape, Tokens


@register
class ReFT(Form):
    name = "reft"
    equation = "f(h) = Rᵀ (W h + b − R h), at the positions chosen"
    paper = "Wu et al. 2024, arXiv:2404.03592, Eq. 2 (LoReFT) and 3 (DiReFT)"
    module = "peftc.forms.reft_module:ReFTModule"
    arguments = (
        Argument("r", "int", "rank of the subspace", required=True, low=1),
        Argument("orthogonal", "bool", "whether the rows of R are kept orthonormal", True),
        Argument("subtract", "bool", "whether R h is taken off; without it f(h) = Rᵀ (W h + b)", True),
        Argument(
            "first",
            "int",
            "acts on so many tokens at the start of each sequence; without it and `last`, on all",
            low=1,
        ),
        Argument(
            "last",
            "int",
            "acts on so many tokens at the end of each input, which a call with a cache has not",
            low=1,
        ),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        d, d_out = self.read_features(dims), self.written_features(dims)
        if args["subtract"] and d != d_out:
            raise PlacementError(
                "P301",
                f"`reft` reads {dims.input} but writes {dims.target}",
                "input",
                ("R h is taken off, and R has the features that are written",),
                "write `subtract=false`, or read what is written",
            )
        bounded_rank(self.name, integer(args, "r"), d_out, d)
        shape = over(dims)
        of_others = any(isinstance(shape, Tokens) and shape.of for shape in (dims.input, dims.target))
        if self.selects_positions(args) and of_others:
            message = "the tokens here are not those of the stack, whose positions `first` and `last` count"
            raise PlacementError("P422", message)
        return shape

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        r, d, d_out = integer(args, "r"), self.read_features(dims), self.written_features(dims)
        bound = ("uniform", 1 / sqrt(d))
        yield Parameter("R", (r, d_out), "orthogonal" if args["orthogonal"] else bound)
        yield Parameter("W", (r, d), bound)
        yield Parameter("b", (r,), bound)

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it acts on some positions only" if self.selects_positions(args) else None

    def shifts(self, args: Args, dims: Dims) -> bool:
        return True

    def rank(self, args: Args, dims: Dims) -> int | None:
        return integer(args, "r")

    def selects_positions(self, args: Args) -> bool:
        return args["first"] is not None or args["last"] is not None
