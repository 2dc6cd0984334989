"""Changes of a few entries of weights and biases, chosen once for all sites of an edit; or of whole rows or columns of each."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, number
from peftc.forms.projected import SEED
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Vector, Weight, entries


def chosen(args: Args, total: int) -> int:
    """How many of all entries are trained; at least one."""
    return max(1, round(number(args, "density") * total))


def changes(args: Args, dims: Dims) -> int:
    """How many entries of the weights and biases of all sites are chosen."""
    return chosen(args, dims.spread[1] or entries(dims.target))


def _count(args: Args, dims: Dims) -> Count:
    count = changes(args, dims)
    return Count(count, count)


def lines(args: Args, dims: Dims) -> tuple[int, int]:
    """How many rows (columns) are trained, at least one, and how many entries each of them has."""
    assert isinstance(dims.target, Weight | Vector)
    d_out, d_in = (dims.target.d_out, dims.target.d_in) if isinstance(dims.target, Weight) else (dims.target.d, 1)
    count, length = (d_out, d_in) if args["by"] == "row" else (d_in, d_out)
    return max(1, round(number(args, "density") * count)), length


def of_weight(form: str, dims: Dims) -> Shape:
    """The weight or bias that a form changes. Raises: Illegal P310 for other states."""
    if not isinstance(dims.target, Weight | Vector):
        raise Illegal(
            "P310", f"`{form}` is a change of a weight or a bias, here {dims.target}", help="assign it to `w`"
        )
    return dims.target


def _lines_shape(args: Args, dims: Dims) -> Shape:
    if args["by"] == "column" and isinstance(dims.target, Vector):
        raise Illegal("P310", f"only a weight has columns, here {dims.target}", "by", help="leave `by` out")
    return of_weight("lines", dims)


def _lines_changes(args: Args, dims: Dims) -> int:
    count, length = lines(args, dims)
    return count * length


def _lines_count(args: Args, dims: Dims) -> Count:
    count = _lines_changes(args, dims)
    return Count(count, count)


WAYS = (
    "of the largest Fisher information (mean of squared gradients), of the largest change in a first fine-tuning, of the largest "
    "absolute value, or any"
)

CHOICES = ("fisher", "change", "magnitude", "random")


def density(what: str) -> Param:
    return Param(
        "density", "float", f"part of the {what} that is trained", required=True, low=0.0, high=1.0, open="low"
    )


SPARSE = register(
    Form(
        name="sparse",
        equation="f = D, zero but at the entries that `peftc.calibrate` has chosen among those of all sites of the edit",
        takes_input=False,
        params=(
            density("entries"),
            Param("select", "choice", f"which: {WAYS}", "fisher", choices=CHOICES),
            SEED,
            DTYPE,
        ),
        shape=lambda args, dims: of_weight("sparse", dims),
        count=lambda args, dims: Count(0, 0),
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.sparse_module:Sparse",
        paper="Sung et al. 2021, arXiv:2111.09839 (FishMask); Ansell et al. 2022, arXiv:2110.07560 (LT-SFT)",
        common=lambda args: "edit",
        common_count=_count,
        anywhere=True,
        changes=changes,
    )
)

register(
    Form(
        name="lines",
        equation="f = D, zero but in the rows (columns) that `peftc.calibrate` has chosen at each site; those of `b` are those of `w`",
        takes_input=False,
        params=(
            density("rows"),
            Param(
                "by",
                "choice",
                "what is chosen as one: rows are the outputs of a Linear",
                "row",
                choices=("row", "column"),
            ),
            Param("select", "choice", f"which: {WAYS}; summed over each", "change", choices=CHOICES),
            SEED,
            DTYPE,
        ),
        shape=_lines_shape,
        count=_lines_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.lines_module:Lines",
        paper="Vucetic et al. 2022, arXiv:2205.01541 (FAR)",
        changes=_lines_changes,
    )
)
