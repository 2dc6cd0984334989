"""Products of two thin matrices: as a function of a hidden state, and as a change of a weight."""

from __future__ import annotations

from math import sqrt

from peftc.forms.arguments import DROPOUT, DTYPE, bounded_rank, features, integer, linear_features, number, over
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Weight

R = Param("r", "int", "rank of the product B A", required=True, low=1)
ALPHA = Param(
    "alpha", "float", "numerator of the scale; without it alpha = r, so that the scale is 1", low=0.0, open="low"
)
RSLORA = Param("rslora", "bool", "scale by alpha / √r instead of alpha / r (Kalajdzievski 2023)", False)


def scale(args: Args) -> float:
    """alpha / r, or alpha / √r with `rslora`; 1 where no alpha is given (√r with `rslora`)."""
    r = integer(args, "r")
    alpha = r if args["alpha"] is None else number(args, "alpha")
    return alpha / (sqrt(r) if args["rslora"] else r)


def _shape(args: Args, dims: Dims) -> Shape:
    d_in, d_out = linear_features("lora", dims.input), features("lora", dims.target, "writes")
    bounded_rank("lora", integer(args, "r"), d_out, d_in)
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    total = integer(args, "r") * (linear_features("lora", dims.input) + features("lora", dims.target, "writes"))
    return Count(total, total)


register(
    Form(
        name="lora",
        equation="f(x) = (alpha / r) · B A x",
        takes_input=True,
        params=(R, ALPHA, DROPOUT, RSLORA, DTYPE),
        shape=_shape,
        count=_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.lora_module:LoRA",
        paper="Hu et al. 2021, arXiv:2106.09685, Eq. 3",
        rank=lambda args, dims: integer(args, "r"),
        design=lambda source, args: f"{source} W_down W_up",
        adds=True,
    )
)


def _weight_shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, Weight):
        raise Illegal(
            "P310",
            f"`lowrank` is a change of a weight [out, in], here {dims.target}",
            help="write `w = w + lowrank(…)`, or use `lora(x, …)` for a hidden state",
        )
    bounded_rank("lowrank", integer(args, "r"), dims.target.d_out, dims.target.d_in)
    return dims.target


def _weight_count(args: Args, dims: Dims) -> Count:
    assert isinstance(dims.target, Weight)
    total = integer(args, "r") * (dims.target.d_out + dims.target.d_in)
    return Count(total, total)


register(
    Form(
        name="lowrank",
        equation="f = (alpha / r) · B A",
        takes_input=False,
        params=(R, ALPHA, RSLORA, DTYPE),
        shape=_weight_shape,
        count=_weight_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.lora_module:LowRank",
        paper="Hu et al. 2021, arXiv:2106.09685, Eq. 3",
        rank=lambda args, dims: integer(args, "r"),
    )
)
