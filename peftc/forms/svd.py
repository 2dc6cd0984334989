"""Singular value decompositions of a change, whose singular values are given up one by one (AdaLoRA)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import ALPHA, DROPOUT, DTYPE, bounded_rank, integer, over
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import register
from peftc.forms.shapes import Shape

_SCHEDULE = (
    Argument("warmup", "int", "steps before the first rank is given up", 0, low=0),
    Argument("cooldown", "int", "steps after the last one", 0, low=0),
    Argument("every", "int", "steps between two rounds", 1, low=1),
    Argument("total", "int", "steps of the whole training", low=1),
)


@register
class SVD(Form):
    name = "svd"
    equation = "f(x) = (alpha / r) · P (λ ⊙ Q x); the least important λ of all sites become zero while training"
    paper = "Zhang et al. 2023, arXiv:2303.10512 (AdaLoRA)"
    module = "peftc.forms.svd_module:SVDModule"
    arguments = (
        Argument("r", "int", "rank at first", required=True, low=1),
        ALPHA,
        DROPOUT,
        Argument("target", "int", "mean rank of a site in the end; without it no rank is given up", low=1),
        *_SCHEDULE,
        Argument("beta1", "float", "smoothing of the importance", 0.85, low=0.0, high=1.0, open="both"),
        Argument("beta2", "float", "smoothing of its uncertainty", 0.85, low=0.0, high=1.0, open="both"),
        Argument("orthogonality", "float", "weight of ‖PᵀP − I‖ and ‖QQᵀ − I‖ among `peftc.losses`", 0.5, low=0.0),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        bounded_rank(self.name, integer(args, "r"), self.written_features(dims), self.read_features(dims))
        if args["target"] is None:
            passed = next((a.name for a in _SCHEDULE if args[a.name] != a.default), None)
            if passed is not None:
                message = f"`{passed}` says when ranks are given up, and no `target` says down to what"
                raise PlacementError("P312", message, passed)
        elif integer(args, "target") > integer(args, "r"):
            raise PlacementError("P312", f"`target` is {args['target']}, above r = {args['r']}", "target")
        elif args["total"] is None:
            message = "`target` needs `total`, the number of training steps"
            raise PlacementError("P312", message, "target", help="add `total=…`")
        elif integer(args, "warmup") + integer(args, "cooldown") >= integer(args, "total"):
            message = f"`warmup` and `cooldown` leave no step of the {args['total']} of `total`"
            raise PlacementError("P312", message, "total")
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        r = integer(args, "r")
        yield Parameter("P", (self.written_features(dims), r), ("normal", 0.02))
        yield Parameter("Q", (r, self.read_features(dims)), ("normal", 0.02))
        yield Parameter("values", (r,))

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return None

    def rank(self, args: Args, dims: Dims) -> int | None:
        return integer(args, "r")
