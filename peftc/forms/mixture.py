"""Bottlenecks of which one is chosen at random in training, and the mean of which is used afterwards (AdaMix)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import (
    ACT,
    DROPOUT,
    DTYPE,
    INIT,
    REDUCTION,
    WIDTH,
    first_projections,
    integer,
    not_linear,
    over,
    width,
)
from peftc.forms.form import Args, Argument, Dims, Form, Parameter
from peftc.forms.registry import register
from peftc.forms.shapes import Shape


def copies(args: Args) -> tuple[int, int]:
    """How many down projections there are, and how many up projections."""
    n = integer(args, "n")
    return (1 if args["share"] == "down" else n), (1 if args["share"] == "up" else n)


@register
class Mixture(Form):
    name = "mixture"
    equation = "f(x) = act(x W_down,i + b_i) W_up,j + b_j, i and j at random while training; then with the means of the W and b"
    paper = "Wang et al. 2022, arXiv:2205.12410 (AdaMix)"
    module = "peftc.forms.mixture_module:MixtureModule"
    arguments = (
        Argument("n", "int", "bottlenecks", 4, low=2),
        WIDTH,
        REDUCTION,
        Argument(
            "share",
            "choice",
            "a projection that all bottlenecks have in common",
            "none",
            choices=("none", "down", "up"),
        ),
        ACT,
        Argument("bias", "bool", "whether the projections have biases", True),
        DROPOUT,
        INIT,
        Argument(
            "keep", "bool", "save all bottlenecks, so that training can go on; else only their mean, an adapter", False
        ),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        width(args, self.read_features(dims), self.name)
        self.written_features(dims)
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        d_in, d_out = self.read_features(dims), self.written_features(dims)
        r, (downs, ups), (down, up) = width(args, d_in, self.name), copies(args), first_projections(args)
        biased, role = args["bias"], "trained" if args["keep"] else "training"
        yield Parameter("down", (downs, r, d_in), down, role=role)
        yield Parameter("up", (ups, d_out, r), up, role=role)
        yield Parameter("down_bias", (downs, r) if biased else None, role=role)
        yield Parameter("up_bias", (ups, d_out) if biased else None, role=role)
        if not args["keep"]:
            yield Parameter("down", (r, d_in), role="saved")
            yield Parameter("up", (d_out, r), role="saved")
            yield Parameter("down_bias", (r,) if biased else None, role="saved")
            yield Parameter("up_bias", (d_out,) if biased else None, role="saved")

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0 if args["init"] == "lora" else None

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return not_linear(args)

    def saved_as(self, args: Args) -> str | None:
        return None if args["keep"] else "adapter"
