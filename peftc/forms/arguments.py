"""Arguments that several forms take, and how forms read them."""

from __future__ import annotations

from peftc.forms.form import Args, Argument

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
