"""Arguments that several forms take, and how forms read them."""

from __future__ import annotations

from peftc.forms.form import Args, Argument, Dims, FirstValue, PlacementError
from peftc.forms.shapes import Ids, Tokens, Vector, Weight

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "leaky_relu", "tanh", "sigmoid", "none")

ACT = Argument("act", "choice", "activation between the two projections", "relu", choices=ACTIVATIONS)
WIDTH = Argument("r", "int", "width of the bottleneck, in features", low=1)
REDUCTION = Argument("reduction", "int", "instead of r: r = d_in // reduction", low=1)
DROPOUT = Argument(
    "dropout", "float", "probability of zeroing a feature while training", 0.0, low=0.0, high=1.0, open="high"
)
DTYPE = Argument(
    "dtype",
    "choice",
    "dtype of the parameters; without it float32 where the base is float16 or bfloat16, else the base's",
    choices=("float32", "float64", "bfloat16", "float16"),
)
INIT = Argument(
    "init",
    "choice",
    "first values: bert N(0, 0.02), houlsby N(0, 0.01) cut at two deviations, lora Kaiming (a=√5) down and zero up",
    "bert",
    choices=("bert", "lora", "houlsby"),
)
SEED = Argument(
    "seed", "int", "of the values that are never trained; they are drawn again from it and not saved", 0, low=0
)


def integer(args: Args, name: str) -> int:
    value = args[name]
    assert isinstance(value, int), (name, value)
    return value


def number(args: Args, name: str) -> float:
    value = args[name]
    assert isinstance(value, int | float), (name, value)
    return float(value)


def over(dims: Dims) -> Tokens:
    """What a function of hidden states gives: the features of the target, at the tokens of the input."""
    assert isinstance(dims.target, Tokens)
    if isinstance(dims.input, Ids):
        return Tokens(dims.target.d)
    assert isinstance(dims.input, Tokens)
    return Tokens(dims.target.d, dims.input.of)


def changed_weight(form: str, dims: Dims) -> Weight | Vector:
    """The weight or bias that a form changes. Raises: PlacementError P310 for other states."""
    if isinstance(dims.target, Weight | Vector):
        return dims.target
    message = f"`{form}` is a change of a weight or a bias, here {dims.target}"
    raise PlacementError("P310", message, help="assign it to `w`")


def size_of(target: Weight | Vector) -> tuple[int, ...]:
    """(out, in) of a weight, (d,) of a bias."""
    return (target.d_out, target.d_in) if isinstance(target, Weight) else (target.d,)


# Bottlenecks


def width(args: Args, d_in: int, form: str) -> int:
    """r, or d_in // reduction.

    Raises: PlacementError P312 unless exactly one of the two is passed, or where no feature is left.
    """
    r, reduction = args["r"], args["reduction"]
    if (r is None) == (reduction is None):
        which = "both" if r is not None else "neither"
        message = f"`{form}` takes either `r` or `reduction`, here it has {which}"
        raise PlacementError("P312", message, "reduction" if r else None)
    if r is not None:
        return integer(args, "r")
    by = integer(args, "reduction")
    if by > d_in:
        message = f"`reduction` of `{form}` is {by}, which leaves no feature of {d_in}"
        raise PlacementError("P312", message, "reduction", help=f"use reduction <= {d_in}, or `r`")
    return d_in // by


def not_linear(args: Args) -> str | None:
    """Why a bottleneck is not affine: its activation; None where it has none."""
    return None if args["act"] == "none" else f"its activation {args['act']} is not linear"


def first_projections(args: Args) -> tuple[FirstValue, FirstValue]:
    """First values of the projections down and up of a bottleneck, by the argument `init`."""
    match args["init"]:
        case "lora":
            return "kaiming", 0.0
        case "houlsby":
            return ("truncated", 0.01), ("truncated", 0.01)
        case _:
            return ("normal", 0.02), ("normal", 0.02)
