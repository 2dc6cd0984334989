"""Frozen random projections of a few trained numbers."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, integer
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Vector, Weight

SEED = Param(
    "seed", "int", "of the values that are never trained; they are drawn again from it and not saved", 0, low=0
)


def _fastfood_shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, Weight | Vector):
        raise Illegal(
            "P310", f"`fastfood` is a change of a weight or a bias, here {dims.target}", help="assign it to `w`"
        )
    if args["scaled"] and integer(args, "d") <= len(layers(dims)):
        many = f"its sites are in {len(layers(dims))} layers, with a factor each"
        message = f"`fastfood` has {integer(args, 'd')} numbers in all, and none would be left for θ"
        raise Illegal("P316", message, "d", (many,), f"use d > {len(layers(dims))}")
    return dims.target


def layers(dims: Dims) -> list[str]:
    """The layers that the sites are in, and the modules outside of layers, each once."""
    return list(dict.fromkeys(spot.home or spot.layer or spot.part for spot in dims.spots)) or [""]


register(
    Form(
        name="fastfood",
        equation="f = P θ, P = H G Π H B random and frozen, θ common to all sites of the edit; f = λ P θ with `scaled`, λ one of each "
        "layer",
        takes_input=False,
        params=(
            Param("d", "int", "what is trained, the intrinsic dimension: entries of θ, and of λ", required=True, low=1),
            Param("scaled", "bool", "a factor λ for each layer, and for each module outside of layers", False),
            SEED,
            DTYPE,
        ),
        shape=_fastfood_shape,
        count=lambda args, dims: Count(0, 0),
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.projected_module:Fastfood",
        paper="Aghajanyan et al. 2021, arXiv:2012.13255 (SAID); Le et al. 2014, arXiv:1408.3060 (Fastfood)",
        common=lambda args: "edit",
        common_count=lambda args, dims: Count(integer(args, "d"), integer(args, "d")),
        anywhere=True,
    )
)
