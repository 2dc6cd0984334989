"""Bottlenecks of which one is chosen at random in training, and the mean of which is used afterwards (AdaMix)."""

from __future__ import annotations

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, INIT, REDUCTION, WIDTH, features, integer, over
from peftc.forms.bottleneck import affine, width
from peftc.forms.registry import Args, Count, Dims, Form, Param, register
from peftc.forms.shapes import Shape


def sizes(args: Args, dims: Dims) -> tuple[int, int, int]:
    """d_in, r, d_out"""
    d_in, d_out = features("mixture", dims.input, "reads"), features("mixture", dims.target, "writes")
    return d_in, width(args, d_in, "mixture"), d_out


def copies(args: Args) -> tuple[int, int]:
    """How many down projections there are, and how many up projections."""
    n = integer(args, "n")
    return (1 if args["share"] == "down" else n), (1 if args["share"] == "up" else n)


def _shape(args: Args, dims: Dims) -> Shape:
    sizes(args, dims)
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    d_in, r, d_out = sizes(args, dims)
    down, up = d_in * r + (r if args["bias"] else 0), r * d_out + (d_out if args["bias"] else 0)
    downs, ups = copies(args)
    trained = downs * down + ups * up
    return Count(trained, trained if args["keep"] else down + up)


register(
    Form(
        name="mixture",
        equation="f(x) = act(x W_down,i + b_i) W_up,j + b_j, i and j at random while training; then with the means of the W and b",
        takes_input=True,
        params=(
            Param("n", "int", "bottlenecks", 4, low=2),
            WIDTH,
            REDUCTION,
            Param(
                "share",
                "choice",
                "a projection that all bottlenecks have in common",
                "none",
                choices=("none", "down", "up"),
            ),
            ACT,
            Param("bias", "bool", "whether the projections have biases", True),
            DROPOUT,
            INIT,
            Param(
                "keep",
                "bool",
                "save all bottlenecks, so that training can go on; else only their mean, an adapter",
                False,
            ),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: 0.0 if args["init"] == "lora" else None,
        affine=affine,
        module="peftc.forms.mixture_module:Mixture",
        paper="Wang et al. 2022, arXiv:2205.12410 (AdaMix)",
        collapses=lambda args: None if args["keep"] else "adapter",
    )
)
