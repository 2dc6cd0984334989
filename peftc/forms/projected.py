"""Frozen random projections of a few trained numbers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from peftc.forms.arguments import DTYPE, SEED, changed_weight, integer, size_of
from peftc.forms.form import Args, Argument, Dims, Parameter, PlacementError, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import Shape
from peftc.forms.sparse import WeightChange


def layers_of(dims: Dims) -> list[str]:
    """The layers that the sites are in, and the modules outside of layers, each once."""
    return list(dict.fromkeys(spot.home or spot.layer or spot.part for spot in dims.spots)) or [""]


@register
class Fastfood(WeightChange):
    name = "fastfood"
    equation = "f = P θ, P = H G Π H B random and frozen, θ common to all sites of the edit; f = λ P θ with `scaled`, λ one of each layer"
    paper = "Aghajanyan et al. 2021, arXiv:2012.13255 (SAID); Le et al. 2014, arXiv:1408.3060 (Fastfood)"
    module = "peftc.forms.projected_module:FastfoodModule"
    common_module = "peftc.forms.projected_module:Theta"
    mixes_shapes = True
    arguments = (
        Argument("d", "int", "what is trained, the intrinsic dimension: entries of θ, and of λ", required=True, low=1),
        Argument("scaled", "bool", "a factor λ for each layer, and for each module outside of layers", False),
        SEED,
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        shape, many = super().shape(args, dims), len(layers_of(dims))
        if args["scaled"] and integer(args, "d") <= many:
            note = f"its sites are in {many} layers, with a factor each"
            message = f"`fastfood` has {integer(args, 'd')} numbers in all, and none would be left for θ"
            raise PlacementError("P316", message, "d", (note,), f"use d > {many}")
        return shape

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        d, m = integer(args, "d"), len(layers_of(dims)) if args["scaled"] else 0
        n = 1 << (max(prod(size_of(changed_weight(self.name, dims))), d) - 1).bit_length()
        yield Parameter("theta", (d - m,), scope="common")
        yield Parameter("scale", (m,) if m else None, 1.0, scope="common")
        yield Parameter("G", (n,), ("normal", 1.0), role="fixed")
        yield Parameter("B", (n,), role="fixed")
        yield Parameter("order", (n,), role="fixed", dtype="int64")

    def common(self, args: Args) -> Scope | None:
        return "edit"
