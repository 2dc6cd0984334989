"""Arguments that several forms take."""

from __future__ import annotations

from peftc.forms.form import Argument

DTYPE = Argument(
    "dtype",
    "choice",
    "dtype of the parameters; without it float32 where the base is float16 or bfloat16, else the base's",
    choices=("float32", "float64", "bfloat16", "float16"),
)
SEED = Argument(
    "seed", "int", "of the values that are never trained; they are drawn again from it and not saved", 0, low=0
)
