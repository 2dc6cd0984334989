"""Bottlenecks of which a part of the weights is trained, and the others are zero (SparseAdapter)."""

from __future__ import annotations

from dataclasses import replace

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, INIT, REDUCTION, WIDTH, features, over
from peftc.forms.bottleneck import activated, affine, width
from peftc.forms.projected import SEED
from peftc.forms.registry import Args, Count, Dims, Form, Param, register
from peftc.forms.shapes import Shape
from peftc.forms.sparse import chosen, density


def sizes(args: Args, dims: Dims) -> tuple[int, int, int]:
    """d_in, r, d_out"""
    d_in, d_out = features("sparse_adapter", dims.input, "reads"), features("sparse_adapter", dims.target, "writes")
    return d_in, width(args, d_in, "sparse_adapter"), d_out


def _shape(args: Args, dims: Dims) -> Shape:
    sizes(args, dims)
    return over(dims)


def _entries(args: Args, dims: Dims) -> int:
    d_in, r, d_out = sizes(args, dims)
    return r * (d_in + d_out)


def _count(args: Args, dims: Dims) -> Count:
    _, r, d_out = sizes(args, dims)
    return Count(r + d_out, r + d_out) if args["bias"] else Count(0, 0)


def _common_count(args: Args, dims: Dims) -> Count:
    count = chosen(args, dims.spread[1] or _entries(args, dims))
    return Count(count, count)


SPARSE_ADAPTER = register(
    Form(
        name="sparse_adapter",
        equation="f(x) = act(x W_down + b_down) W_up + b_up, the W zero but at the entries that are chosen among those of all sites",
        takes_input=True,
        params=(
            WIDTH,
            REDUCTION,
            density("entries of W_down and W_up"),
            Param(
                "select",
                "choice",
                "which, at first values: of the largest |w · ∂w| (SNIP), of the largest absolute value, or any",
                "snip",
                choices=("snip", "magnitude", "random"),
            ),
            ACT,
            Param("bias", "bool", "whether the projections have biases, which are trained as a whole", True),
            DROPOUT,
            replace(
                INIT,
                doc="first values, as those of `adapter`",
                choices=tuple(choice for choice in INIT.choices if choice != "lora"),  # under which all scores are zero
            ),
            SEED,
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=affine,
        module="peftc.forms.pruned_module:SparseAdapter",
        paper="He et al. 2022, arXiv:2210.04284 (SparseAdapter)",
        common=lambda args: "edit",
        common_count=_common_count,
        anywhere=True,
        apart=True,
        entries=_entries,
        design=lambda source, args: f"{activated(args, f'{source} W_down')} W_up",
    )
)
