"""What bottlenecks with an activation have in common."""

from __future__ import annotations

from peftc.forms.arguments import integer
from peftc.forms.registry import Args, Illegal

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


def affine(args: Args) -> str | None:
    """Why a bottleneck is not affine: its norms, its activation; None where it is."""
    if args.get("norm_in") or args.get("norm_out"):
        return "its layer norm is not linear"
    return None if args["act"] == "none" else f"its activation {args['act']} is not linear"


def activated(args: Args, inner: str) -> str:
    """`ReLU(h W_down)`, or `h W_down` without an activation."""
    return inner if args["act"] == "none" else f"{NAMES.get(str(args['act']), str(args['act']))}({inner})"
