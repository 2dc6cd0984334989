"""Arguments that several forms take, and how their rows read them."""

from __future__ import annotations

from peftc.forms.registry import Args, Dims, Illegal, Param
from peftc.forms.shapes import Ids, Shape, Tokens

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "leaky_relu", "tanh", "sigmoid", "none")

ACT = Param("act", "choice", "activation between the two projections", "relu", choices=ACTIVATIONS)
WIDTH = Param("r", "int", "width of the bottleneck, in features", low=1)
REDUCTION = Param("reduction", "int", "instead of r: r = d_in // reduction", low=1)
DROPOUT = Param(
    "dropout", "float", "probability of zeroing a feature while training", 0.0, low=0.0, high=1.0, open="high"
)
R = Param("r", "int", "rank of the product B A", required=True, low=1)
ALPHA = Param(
    "alpha", "float", "numerator of the scale; without it alpha = r, so that the scale is 1", low=0.0, open="low"
)
DTYPE = Param(
    "dtype",
    "choice",
    "dtype of the parameters; without it float32 where the base is float16 or bfloat16, else the base's",
    choices=("float32", "float64", "bfloat16", "float16"),
)
INIT = Param(
    "init",
    "choice",
    "first values: bert N(0, 0.02), houlsby N(0, 0.01) cut at two deviations, lora Kaiming (a=√5) down and zero up",
    "bert",
    choices=("bert", "lora", "houlsby"),
)


def integer(args: Args, name: str) -> int:
    value = args[name]
    assert isinstance(value, int), (name, value)
    return value


def number(args: Args, name: str) -> float:
    value = args[name]
    assert isinstance(value, int | float), (name, value)
    return float(value)


def features(form: str, shape: Shape | None, role: str) -> int:
    """d of a hidden state (batch, tokens, d); `role` is "reads" or "writes".

    Raises: Illegal P310 for any other shape.
    """
    if isinstance(shape, Tokens):
        return shape.d
    raise Illegal(
        "P310", f"`{form}` {role} hidden states [batch, tokens, d], here it has {describe(shape)}", input_of(role)
    )


def over(dims: Dims) -> Tokens:
    """What a function of hidden states gives: the features of the target, at the tokens of the input."""
    assert isinstance(dims.target, Tokens)
    if isinstance(dims.input, Ids):
        return Tokens(dims.target.d)
    assert isinstance(dims.input, Tokens)
    return Tokens(dims.target.d, dims.input.of)


def describe(shape: Shape | None) -> str:
    return "nothing" if shape is None else f"{shape}"


def input_of(role: str) -> str | None:
    return "input" if role == "reads" else None


def bounded_rank(form: str, r: int, d_out: int, d_in: int) -> None:
    """Raises: Illegal P311 where r exceeds min(d_out, d_in): such a product has no more rank than that."""
    if r > min(d_out, d_in):
        raise Illegal(
            "P311",
            f"`{form}` has rank {r}, above min(d_in, d_out) = {min(d_out, d_in)}",
            "r",
            (f"it maps {d_in} features to {d_out}: the change cannot have a higher rank than {min(d_out, d_in)}",),
            f"use r <= {min(d_out, d_in)}",
        )


def divides(form: str, args: Args, name: str, whole: int) -> int:
    """The argument `name`, which must divide `whole` features.

    Raises: Illegal P313 where it does not.
    """
    part = integer(args, name)
    if whole % part:
        near = [n for n in range(1, whole + 1) if whole % n == 0]
        below = max((n for n in near if n < part), default=1)
        above = min((n for n in near if n > part), default=whole)
        raise Illegal(
            "P313",
            f"`{name}` of `{form}` is {part}, which does not divide {whole} features",
            name,
            help=f"the nearest that do are {below} and {above}" if below != above else f"use {below}",
        )
    return part


def hidden_width(args: Args) -> int | None:
    """m of `reparam=mlp(m)`, None for direct rows."""
    reparam = args["reparam"]
    if reparam is None:
        return None
    assert isinstance(reparam, tuple)
    return reparam[1]
