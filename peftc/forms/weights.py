"""Rotations of what a weight reads (OFT)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import DTYPE, changed_weight, describe, divides
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import register
from peftc.forms.shapes import Shape, Weight


@register
class Orthogonal(Form):
    name = "orthogonal"
    equation = "f(W) = W Rᵀ, R = diag(R_1, …), R_i = (I − Q_i)(I + Q_i)⁻¹, Q_i skew-symmetric"
    paper = "Qiu et al. 2023, arXiv:2306.07280 (OFT), on the inputs as Qiu et al. 2025, arXiv:2506.19847, and PEFT"
    inputs = ("w",)
    module = "peftc.forms.weights_module:OrthogonalModule"
    arguments = (
        Argument("block", "int", "size of one block of the rotation, in inputs; it divides them", required=True, low=2),
        Argument(
            "neumann",
            "int",
            "terms of the Neumann series that PEFT puts in the place of the inverse; without it R is exact",
            low=4,
        ),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        self.parameters(args, dims)
        if dims.target != dims.input:
            raise PlacementError("P301", f"`orthogonal` reads {describe(dims.input)} but writes {dims.target}", "input")
        return changed_weight(self.name, dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        if not isinstance(dims.input, Weight):
            message = f"`orthogonal` reads a weight [out, in], here it has {describe(dims.input)}"
            raise PlacementError("P310", message, "input")
        size = divides(self.name, args, "block", dims.input.d_in)
        return (Parameter("Q", (dims.input.d_in // size, size * (size - 1) // 2)),)

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return None

    def keeps_base(self, args: Args, dims: Dims) -> bool:
        return True
