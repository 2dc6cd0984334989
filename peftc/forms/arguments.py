"""Arguments that several forms take, and how forms read them."""

from __future__ import annotations

from peftc.forms.form import Args, Argument, Dims, PlacementError
from peftc.forms.shapes import Vector, Weight

DTYPE = Argument(
    "dtype",
    "choice",
    "dtype of the parameters; without it float32 where the base is float16 or bfloat16, else the base's",
    choices=("float32", "float64", "bfloat16", "float16"),
)
SEED = Argument(
    "seed", "int", "of the values that are never trained; they are drawn again from it and not saved", 0, low=0
)


def number(args: Args, name: str) -> float:
    value = args[name]
    assert isinstance(value, int | float), (name, value)
    return float(value)


def changed_weight(form: str, dims: Dims) -> Weight | Vector:
    """The weight or bias that a form changes. Raises: PlacementError P310 for other states."""
    if isinstance(dims.target, Weight | Vector):
        return dims.target
    message = f"`{form}` is a change of a weight or a bias, here {dims.target}"
    raise PlacementError("P310", message, help="assign it to `w`")


def size_of(target: Weight | Vector) -> tuple[int, ...]:
    """(out, in) of a weight, (d,) of a bias."""
    return (target.d_out, target.d_in) if isinstance(target, Weight) else (target.d,)
