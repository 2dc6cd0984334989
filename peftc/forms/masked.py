"""Changes of all entries of weights under a mask that is learnt, of which few are kept in the end (Diff Pruning)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import DTYPE, changed_weight, number, size_of
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import Shape, entries


@register
class Masked(Form):
    name = "masked"
    equation = "f = z ⊙ Δ, z hard-concrete gates with learnt α; `peftc.calibrate` keeps the largest among all sites of the edit"
    paper = "Guo et al. 2021, arXiv:2012.07463 (Diff Pruning); gates of Louizos et al. 2018, arXiv:1712.01312"
    module = "peftc.forms.masked_module:MaskedModule"
    common_module = "peftc.forms.masked_module:MaskedSites"
    inputs = ()
    mixes_shapes = True
    separates_tasks = True
    arguments = (
        Argument(
            "density",
            "float",
            "part of the entries that is kept, and saved",
            required=True,
            low=0.0,
            high=1.0,
            open="low",
        ),
        Argument("penalty", "float", "weight of the expected number of entries among `peftc.losses`", 1.25e-7, low=0.0),
        Argument("structured", "bool", "a gate for each weight or bias as a whole, too", True),
        Argument("alpha", "float", "first value of α", 5.0),
        Argument(
            "lower",
            "float",
            "where the gates are cut: they are stretched to begin below 0",
            -1.5,
            high=0.0,
            open="high",
        ),
        Argument("upper", "float", "and to end above 1", 1.5, low=1.0, open="low"),
        Argument("keep", "bool", "save Δ and α, so that training can go on; else only what is kept, a `sparse`", False),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        return changed_weight(self.name, dims)

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return None

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        size, alpha = size_of(changed_weight(self.name, dims)), number(args, "alpha")
        role = "trained" if args["keep"] else "training"
        yield Parameter("delta", size, role=role)
        yield Parameter("alpha", size, alpha, role=role)
        yield Parameter("group", (1,) if args["structured"] else None, alpha, role=role)
        if not args["keep"]:
            yield Parameter("values", (self.changed_entries(args, dims),), scope="common", role="saved")

    def common(self, args: Args) -> Scope | None:
        return "edit"

    def saved_as(self, args: Args) -> str | None:
        return None if args["keep"] else "sparse"

    def changed_entries(self, args: Args, dims: Dims) -> int:
        return max(1, round(number(args, "density") * (dims.spread[1] or entries(dims.target))))
