"""Interventions in a low-rank subspace of the hidden state (ReFT)."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, bounded_rank, features, integer, over
from peftc.forms.registry import Args, Count, Dims, Form, Param, register
from peftc.forms.shapes import Shape


def _shape(args: Args, dims: Dims) -> Shape:
    d, d_out = features("reft", dims.input, "reads"), features("reft", dims.target, "writes")
    bounded_rank("reft", integer(args, "r"), d_out, d)
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    d_in, d_out, r = features("reft", dims.input, "reads"), features("reft", dims.target, "writes"), integer(args, "r")
    total = r * (d_in + d_out) + r
    return Count(total, total)


register(
    Form(
        name="reft",
        equation="f(h) = Rᵀ (W h + b − R h)",
        takes_input=True,
        params=(
            Param("r", "int", "rank of the subspace", required=True, low=1),
            Param("orthogonal", "bool", "whether the rows of R are kept orthonormal", True),
            Param("subtract", "bool", "whether R h is taken off; without it f(h) = Rᵀ (W h + b)", True),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=lambda args: None,
        module="peftc.forms.reft_module:ReFT",
        paper="Wu et al. 2024, arXiv:2404.03592, Eq. 2 (LoReFT) and 3 (DiReFT)",
        rank=lambda args, dims: integer(args, "r"),
    )
)
