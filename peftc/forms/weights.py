"""Changes of a weight: products of entries, of matrices, rotations."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, describe, divides
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Weight


def weight(form: str, dims: Dims) -> Weight:
    """The weight that a form writes. Raises: Illegal P310 for anything else."""
    if isinstance(dims.target, Weight):
        return dims.target
    raise Illegal("P310", f"`{form}` is a change of a weight [out, in], here {dims.target}", help="assign it to `w`")


def read_weight(form: str, dims: Dims) -> Weight:
    """The weight that a form reads. Raises: Illegal P310 for anything else."""
    if isinstance(dims.input, Weight):
        return dims.input
    raise Illegal("P310", f"`{form}` reads a weight [out, in], here it has {describe(dims.input)}", "input")


def blocks(args: Args, dims: Dims) -> tuple[int, int]:
    """How many blocks the rotation has, and their size. Raises: Illegal P313 where they do not fill the inputs."""
    d_in = read_weight("orthogonal", dims).d_in
    size = divides("orthogonal", args, "block", d_in)
    return d_in // size, size


def _orthogonal_shape(args: Args, dims: Dims) -> Shape:
    blocks(args, dims)
    if dims.target != dims.input:
        raise Illegal("P301", f"`orthogonal` reads {describe(dims.input)} but writes {dims.target}", "input")
    return dims.target


def _orthogonal_count(args: Args, dims: Dims) -> Count:
    number, size = blocks(args, dims)
    total = number * size * (size - 1) // 2
    return Count(total, total)


register(
    Form(
        name="orthogonal",
        equation="f(W) = W Rᵀ, R = diag(R_1, …), R_i = (I − Q_i)(I + Q_i)⁻¹, Q_i skew-symmetric",
        takes_input=True,
        params=(
            Param(
                "block", "int", "size of one block of the rotation, in inputs; it divides them", required=True, low=2
            ),
            Param(
                "neumann",
                "int",
                "terms of the Neumann series that PEFT puts in the place of the inverse; without it R is exact",
                low=4,
            ),
            DTYPE,
        ),
        shape=_orthogonal_shape,
        count=_orthogonal_count,
        at_init=lambda args: None,
        affine=lambda args: None,
        module="peftc.forms.weights_module:Orthogonal",
        paper="Qiu et al. 2023, arXiv:2306.07280 (OFT), on the inputs as Qiu et al. 2025, arXiv:2506.19847, and PEFT",
        passes=True,
    )
)
