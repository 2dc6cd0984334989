"""The trained length of each row of a weight (DoRA)."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, describe
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, register
from peftc.forms.shapes import Shape, Weight


def _shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, Weight):
        raise Illegal("P310", f"`magnitude` gives a weight [out, in], here {dims.target}", help="assign it to `w`")
    if dims.input != dims.target:
        raise Illegal("P301", f"`magnitude` reads {describe(dims.input)} but writes {dims.target}", "input")
    return dims.target


def _count(args: Args, dims: Dims) -> Count:
    assert isinstance(dims.target, Weight)
    return Count(dims.target.d_out, dims.target.d_out)


register(
    Form(
        name="magnitude",
        equation="f(W) = m ⊙ W / ‖W‖ by output row, m starting as ‖w‖; no gradient through the norm",
        takes_input=True,
        params=(DTYPE,),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=lambda args: "the norm of its rows is not linear",
        module="peftc.forms.magnitude_module:Magnitude",
        paper="Liu et al. 2024, arXiv:2402.09353, Eq. 5 and section 4.3",
        passes=True,
    )
)
