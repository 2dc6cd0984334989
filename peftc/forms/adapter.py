"""Bottlenecks with an activation: the adapter, and its multi-head form."""

from __future__ import annotations

from dataclasses import replace

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, INIT, REDUCTION, WIDTH, describe, features, integer, over
from peftc.forms.registry import Args, AtInit, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Heads, Rows, Shape

NAMES = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}  # of activations, as papers write them


def width(args: Args, d_in: int, form: str = "adapter") -> int:
    """r, or d_in // reduction.

    Raises: Illegal P312 unless exactly one of the two is given, or where no feature is left.
    """
    r, reduction = args["r"], args["reduction"]
    if (r is None) == (reduction is None):
        said = "both" if r is not None else "neither"
        raise Illegal(
            "P312", f"`{form}` takes either `r` or `reduction`, here it has {said}", "reduction" if r else None
        )
    if r is not None:
        return integer(args, "r")
    by = integer(args, "reduction")
    if by > d_in:
        message = f"`reduction` of `{form}` is {by}, which leaves no feature of {d_in}"
        raise Illegal("P312", message, "reduction", help=f"use reduction <= {d_in}, or `r`")
    return d_in // by


def _shape(args: Args, dims: Dims) -> Shape:
    width(args, features("adapter", dims.input, "reads"))
    features("adapter", dims.target, "writes")
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    d_in, d_out = features("adapter", dims.input, "reads"), features("adapter", dims.target, "writes")
    r = width(args, d_in)
    total = r * (d_in + d_out) + (r + d_out if args["bias"] else 0)
    total += (2 * d_in if args["norm_in"] else 0) + (2 * d_out if args["norm_out"] else 0)
    return Count(total, total)


def _at_init(args: Args) -> AtInit:
    return 0.0 if args["init"] == "lora" else None


def affine(args: Args) -> str | None:
    """Why a bottleneck is not affine: its norms, its activation; None where it is."""
    if args.get("norm_in") or args.get("norm_out"):
        return "its layer norm is not linear"
    return None if args["act"] == "none" else f"its activation {args['act']} is not linear"


def activated(args: Args, inner: str) -> str:
    """`ReLU(h W_down)`, or `h W_down` without an activation."""
    return inner if args["act"] == "none" else f"{NAMES.get(str(args['act']), str(args['act']))}({inner})"


def _design(source: str, args: Args) -> str:
    return f"{activated(args, f'{source} W_down')} W_up"


def _rank(args: Args, dims: Dims) -> int | None:
    d_in, d_out = features("adapter", dims.input, "reads"), features("adapter", dims.target, "writes")
    return min(width(args, d_in), d_in, d_out)


register(
    Form(
        name="adapter",
        equation="f(x) = act(x W_down + b_down) W_up + b_up",
        takes_input=True,
        params=(
            WIDTH,
            REDUCTION,
            ACT,
            Param("bias", "bool", "whether the two projections have biases", True),
            DROPOUT,
            INIT,
            Param("norm_in", "bool", "a trained layer norm before the down projection", False),
            Param("norm_out", "bool", "a trained layer norm after the up projection", False),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=_at_init,
        affine=affine,
        module="peftc.forms.adapter_module:Adapter",
        paper="Houlsby et al. 2019, arXiv:1902.00751; He et al. 2022, arXiv:2110.04366, Eq. 4",
        rank=_rank,
        design=_design,
    )
)


def _head_shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, Heads | Rows):
        raise Illegal("P310", f"`bottleneck` writes attention heads, here {dims.target}", help="use it at `attn.heads`")
    if not isinstance(dims.input, Heads | Rows):
        raise Illegal("P310", f"`bottleneck` reads attention heads, here it has {describe(dims.input)}", "input")
    if (dims.input.heads, dims.input.d_head) != (dims.target.heads, dims.target.d_head):
        raise Illegal("P301", f"`bottleneck` reads {dims.input} but writes {dims.target}", "input")
    return dims.target


def _head_count(args: Args, dims: Dims) -> Count:
    assert isinstance(dims.target, Heads | Rows)
    total = 2 * integer(args, "r") * dims.target.heads * dims.target.d_head
    return Count(total, total)


register(
    Form(
        name="bottleneck",
        equation="f(q) = act(q P_kᵀ) P_v in each head; softmax(q P_kᵀ / √d_head) P_v with act=softmax",
        takes_input=True,
        params=(
            Param("r", "int", "rows of P_k and of P_v in each head", required=True, low=1),
            replace(ACT, choices=(*ACT.choices, "softmax")),
            DROPOUT,
            INIT,
            DTYPE,
        ),
        shape=_head_shape,
        count=_head_count,
        at_init=_at_init,
        affine=affine,
        module="peftc.forms.adapter_module:Bottleneck",
        paper="He et al. 2022, arXiv:2110.04366, section 3.3 (multi-head parallel adapter)",
        design=lambda source, args: f"{activated(args, f'{source} P_kᵀ')} P_v",
    )
)
