"""Changes of a few entries of weights and biases, chosen once for all sites of an edit; or of whole rows or columns of each."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import DTYPE, SEED, changed_weight, number, size_of
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, PlacementError, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import Shape, Vector, entries

_WAYS = (
    "of the largest Fisher information (mean of squared gradients), of the largest change in a first fine-tuning, of the largest "
    "absolute value, or any"
)
_CHOICES = ("fisher", "change", "magnitude", "random")


def chosen(args: Args, total: int) -> int:
    """How many of all entries are trained; at least one."""
    return max(1, round(number(args, "density") * total))


def density(what: str) -> Argument:
    doc = f"part of the {what} that is trained"
    return Argument("density", "float", doc, required=True, low=0.0, high=1.0, open="low")


class WeightChange(Form):
    """A form that is a change of a weight or a bias, zero at first."""

    inputs = ()

    def shape(self, args: Args, dims: Dims) -> Shape:
        return changed_weight(self.name, dims)

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return None


@register
class Sparse(WeightChange):
    name = "sparse"
    equation = "f = D, zero but at the entries that `peftc.calibrate` has chosen among those of all sites of the edit"
    paper = "Sung et al. 2021, arXiv:2111.09839 (FishMask); Ansell et al. 2022, arXiv:2110.07560 (LT-SFT)"
    module = "peftc.forms.sparse_module:SparseModule"
    common_module = "peftc.forms.sparse_module:SparseValues"
    mixes_shapes = True
    arguments = (
        density("entries"),
        Argument("select", "choice", f"which: {_WAYS}", "fisher", choices=_CHOICES),
        SEED,
        DTYPE,
    )

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        yield Parameter("values", (self.changed_entries(args, dims),), scope="common")

    def common(self, args: Args) -> Scope | None:
        return "edit"

    def changed_entries(self, args: Args, dims: Dims) -> int:
        return chosen(args, dims.spread[1] or entries(dims.target))


@register
class Lines(WeightChange):
    name = "lines"
    equation = "f = D, zero but in the rows (columns) that `peftc.calibrate` has chosen at each site; those of `b` are those of `w`"
    paper = "Vucetic et al. 2022, arXiv:2205.01541 (FAR)"
    module = "peftc.forms.lines_module:LinesModule"
    arguments = (
        density("rows"),
        Argument(
            "by", "choice", "what is chosen as one: rows are the outputs of a Linear", "row", choices=("row", "column")
        ),
        Argument("select", "choice", f"which: {_WAYS}; summed over each", "change", choices=_CHOICES),
        SEED,
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        if args["by"] == "column" and isinstance(dims.target, Vector):
            message = f"only a weight has columns, here {dims.target}"
            raise PlacementError("P310", message, "by", help="leave `by` out")
        return super().shape(args, dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        size = list(size_of(changed_weight(self.name, dims)))
        dim = 0 if args["by"] == "row" else 1
        size[dim] = chosen(args, size[dim])
        yield Parameter("values", tuple(size))

    def changed_entries(self, args: Args, dims: Dims) -> int:
        return self.count(args, dims).trained
