"""A whole Linear: full fine-tuning of a map, as an edit that can be taken out, or had once for each task."""

from __future__ import annotations

from peftc.forms.arguments import DROPOUT, DTYPE, features, linear_features, over
from peftc.forms.registry import Args, Count, Dims, Form, Param, register
from peftc.forms.shapes import Shape


def _shape(args: Args, dims: Dims) -> Shape:
    linear_features("linear", dims.input)
    features("linear", dims.target, "writes")
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    d_in, d_out = linear_features("linear", dims.input), features("linear", dims.target, "writes")
    total = d_in * d_out + (d_out if args["bias"] else 0)
    return Count(total, total)


register(
    Form(
        name="linear",
        equation="f(x) = W x + b",
        takes_input=True,
        params=(Param("bias", "bool", "whether there is a b", True), DROPOUT, DTYPE),
        shape=_shape,
        count=_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.linear_module:Linear",
        paper="full fine-tuning of a Linear, as the W in W₀ + W",
    )
)
