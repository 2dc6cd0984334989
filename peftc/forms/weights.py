"""Changes of a weight: products of entries, of matrices, rotations."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, bounded_rank, describe, divides, integer
from peftc.forms.lora import ALPHA, R
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Vector, Weight


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


def _hadamard_shape(args: Args, dims: Dims) -> Shape:
    target = weight("hadamard", dims)
    bounded_rank("hadamard", integer(args, "r"), target.d_out, target.d_in)
    return target


def _hadamard_count(args: Args, dims: Dims) -> Count:
    target = weight("hadamard", dims)
    total = 2 * integer(args, "r") * (target.d_out + target.d_in)
    return Count(total, total)


def _hadamard_rank(args: Args, dims: Dims) -> int:
    target = weight("hadamard", dims)
    return min(integer(args, "r") ** 2, target.d_out, target.d_in)


register(
    Form(
        name="hadamard",
        equation="f = (alpha / r) · (B A) ⊙ (D C)",
        takes_input=False,
        params=(R, ALPHA, DTYPE),
        shape=_hadamard_shape,
        count=_hadamard_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.weights_module:Hadamard",
        paper="Hyeon-Woo et al. 2022, arXiv:2108.06098, Proposition 1; Yeh et al. 2023, arXiv:2309.14859 (LoHa)",
        rank=_hadamard_rank,
    )
)


def _product_shape(args: Args, dims: Dims) -> Shape:
    source = read_weight("product", dims)
    bounded_rank("product", integer(args, "r"), source.d_in, source.d_in)
    return source


def _product_count(args: Args, dims: Dims) -> Count:
    total = 2 * integer(args, "r") * read_weight("product", dims).d_in
    return Count(total, total)


register(
    Form(
        name="product",
        equation="f(W) = (alpha / r) · W B A",
        takes_input=True,
        params=(R, ALPHA, DTYPE),
        shape=_product_shape,
        count=_product_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.weights_module:Product",
        paper="Chavan et al. 2023, arXiv:2306.07967, Eq. 7 (the W A of GLoRA)",
        rank=lambda args, dims: integer(args, "r"),
    )
)


def _image_shape(args: Args, dims: Dims) -> Shape:
    return Vector(read_weight("image", dims).d_out)


def _image_count(args: Args, dims: Dims) -> Count:
    d_in = read_weight("image", dims).d_in
    return Count(d_in, d_in)


register(
    Form(
        name="image",
        equation="f(W) = W c, c one trained entry for each input",
        takes_input=True,
        params=(DTYPE,),
        shape=_image_shape,
        count=_image_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.weights_module:Image",
        paper="Chavan et al. 2023, arXiv:2306.07967, Eq. 7 (the C W of GLoRA)",
    )
)


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
