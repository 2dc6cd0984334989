"""Changes of a few entries of weights and biases, chosen once for all sites of an edit."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, number
from peftc.forms.projected import SEED, entries
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Vector, Weight


def chosen_count(args: Args, dims: Dims) -> int:
    """How many entries are trained, over all sites; at least one."""
    total = dims.spread[1] or entries(dims.target)
    return max(1, round(number(args, "density") * total))


def _shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, Weight | Vector):
        raise Illegal(
            "P310", f"`sparse` is a change of a weight or a bias, here {dims.target}", help="assign it to `w`"
        )
    return dims.target


register(
    Form(
        name="sparse",
        equation="f = D, zero but at the entries that `peftc.calibrate` has chosen among those of all sites of the edit",
        takes_input=False,
        params=(
            Param(
                "density", "float", "part of the entries that is trained", required=True, low=0.0, high=1.0, open="low"
            ),
            Param(
                "select",
                "choice",
                "which: of the largest Fisher information (mean of squared gradients), of the largest change in a first "
                "fine-tuning, of the largest absolute value, or any",
                "fisher",
                choices=("fisher", "change", "magnitude", "random"),
            ),
            SEED,
            DTYPE,
        ),
        shape=_shape,
        count=lambda args, dims: Count(0, 0),
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.sparse_module:Sparse",
        paper="Sung et al. 2021, arXiv:2111.09839 (FishMask); Ansell et al. 2022, arXiv:2110.07560 (LT-SFT)",
        common=lambda args: "edit",
        common_count=lambda args, dims: Count(chosen_count(args, dims), chosen_count(args, dims)),
        anywhere=True,
    )
)
