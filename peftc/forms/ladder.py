"""A small network beside the layers, which reads their states and changes only the last of them (ladder side-tuning)."""

from __future__ import annotations

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, INIT, REDUCTION, features, integer, over
from peftc.forms.bottleneck import width
from peftc.forms.handed import check_depth
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape


def sizes(args: Args, dims: Dims) -> tuple[int, int, int]:
    """d, r, and the hidden features of a block."""
    d = features("ladder", dims.input, "reads")
    r = width(args, d, "ladder")
    return d, r, r * integer(args, "expand")


def _shape(args: Args, dims: Dims) -> Shape:
    d, _, _ = sizes(args, dims)
    if dims.second is not None and dims.second != dims.input:
        message = f"`ladder` starts from {dims.second} and reads {dims.input}: they have the same features"
        raise Illegal("P301", message, "second")
    if features("ladder", dims.target, "writes") != d:
        raise Illegal("P301", f"`ladder` reads {dims.input} but writes {dims.target}", "input")
    check_depth("ladder", dims)
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    d, r, hidden = sizes(args, dims)
    biases = 2 * r + hidden if args["bias"] else 0
    total = d * r + 1 + 2 * r + 2 * r * hidden + biases
    return Count(total, total)


def _common_count(args: Args, dims: Dims) -> Count:
    d, r, _ = sizes(args, dims)
    start = (r * d + (r if args["bias"] else 0)) if dims.second is not None else 0
    total = start + 2 * r + r * d + (d if args["bias"] else 0)
    return Count(total, total)


register(
    Form(
        name="ladder",
        equation="s ← σ(a / t) s + (1 − σ(a / t)) (h W_down + b_down), s ← s + act(LN(s) U + c) V + e in every layer, from s = 0, or "
        "from s = x W_start + b_start with the x of the first layer, `ladder(h, x)`; f = LN(s) W_up + b_up in the last layer, and 0 in the "
        "others, or h where it replaces the last state; no gradient enters h and x",
        takes_input=True,
        second="what the side network starts from",
        params=(
            Param("r", "int", "width of the side network, in features", low=1),
            REDUCTION,
            Param("expand", "int", "hidden features of a block, in multiples of r", 4, low=1),
            ACT,
            Param("temperature", "float", "t: what a, which begins as 0, is divided by", 1.0, low=0.0, open="low"),
            Param("replace", "bool", "the value is h in all layers but the last: for `h = ladder(h, …)`", False),
            Param("bias", "bool", "whether the projections have biases", True),
            DROPOUT,
            INIT,
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: 0.0 if args["init"] == "lora" and not args["replace"] else None,
        affine=lambda args: "it depends on the states of all layers",
        module="peftc.forms.ladder_module:Ladder",
        paper="Sung et al. 2022, arXiv:2206.06522 (LST), with blocks that are applied token by token",
        common=lambda args: "group",
        common_count=_common_count,
    )
)
