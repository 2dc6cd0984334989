"""Singular value decompositions of a change, whose singular values are given up one by one (AdaLoRA)."""

from __future__ import annotations

from peftc.forms.arguments import ALPHA, DROPOUT, DTYPE, bounded_rank, features, integer, over
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape

SCHEDULE = ("warmup", "cooldown", "every", "total")


def _shape(args: Args, dims: Dims) -> Shape:
    d_in, d_out = features("svd", dims.input, "reads"), features("svd", dims.target, "writes")
    bounded_rank("svd", integer(args, "r"), d_out, d_in)
    if args["target"] is None:
        given = next((name for name in SCHEDULE if args[name] != DEFAULTS[name]), None)
        if given is not None:
            raise Illegal("P312", f"`{given}` says when ranks are given up, and no `target` says down to what", given)
    elif integer(args, "target") > integer(args, "r"):
        raise Illegal("P312", f"`target` is {args['target']}, above r = {args['r']}", "target")
    elif args["total"] is None:
        raise Illegal("P312", "`target` needs `total`, the number of training steps", "target", help="add `total=…`")
    elif integer(args, "warmup") + integer(args, "cooldown") >= integer(args, "total"):
        message = f"`warmup` and `cooldown` leave no step of the {args['total']} of `total`"
        raise Illegal("P312", message, "total")
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    d_in, d_out = features("svd", dims.input, "reads"), features("svd", dims.target, "writes")
    total = integer(args, "r") * (d_in + d_out + 1)
    return Count(total, total)


PARAMS = (
    Param("r", "int", "rank at first", required=True, low=1),
    ALPHA,
    DROPOUT,
    Param("target", "int", "mean rank of a site in the end; without it no rank is given up", low=1),
    Param("warmup", "int", "steps before the first rank is given up", 0, low=0),
    Param("cooldown", "int", "steps after the last one", 0, low=0),
    Param("every", "int", "steps between two rounds", 1, low=1),
    Param("total", "int", "steps of the whole training", low=1),
    Param("beta1", "float", "smoothing of the importance", 0.85, low=0.0, high=1.0, open="both"),
    Param("beta2", "float", "smoothing of its uncertainty", 0.85, low=0.0, high=1.0, open="both"),
    Param("orthogonality", "float", "weight of ‖PᵀP − I‖ and ‖QQᵀ − I‖ among `peftc.losses`", 0.5, low=0.0),
    DTYPE,
)
DEFAULTS = {param.name: param.default for param in PARAMS}

register(
    Form(
        name="svd",
        equation="f(x) = (alpha / r) · P (λ ⊙ Q x); the least important λ of all sites become zero while training",
        takes_input=True,
        params=PARAMS,
        shape=_shape,
        count=_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.svd_module:SVD",
        paper="Zhang et al. 2023, arXiv:2303.10512 (AdaLoRA)",
        rank=lambda args, dims: integer(args, "r"),
    )
)
