"""Bottlenecks of which a part of the weights is trained, and the others are zero (SparseAdapter)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, INIT, REDUCTION, SEED, WIDTH, activated, not_linear, over, width
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import Shape
from peftc.forms.sparse import chosen, density


@register
class SparseAdapter(Form):
    name = "sparse_adapter"
    equation = "f(x) = act(x W_down + b_down) W_up + b_up, the W zero but at the entries that are chosen among those of all sites"
    paper = "He et al. 2022, arXiv:2210.04284 (SparseAdapter)"
    module = "peftc.forms.pruned_module:SparseAdapterModule"
    common_module = "peftc.forms.pruned_module:PrunedValues"
    mixes_shapes = True
    separates_tasks = True
    arguments = (
        WIDTH,
        REDUCTION,
        density("entries of W_down and W_up"),
        Argument(
            "select",
            "choice",
            "which, at first values: of the largest |w · ∂w| (SNIP), of the largest absolute value, or any",
            "snip",
            choices=("snip", "magnitude", "random"),
        ),
        ACT,
        Argument("bias", "bool", "whether the projections have biases, which are trained as a whole", True),
        DROPOUT,
        replace(
            INIT,
            doc="first values, as those of `adapter`",
            choices=tuple(choice for choice in INIT.choices if choice != "lora"),  # under which all scores are zero
        ),
        SEED,
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        self.entries(args, dims)
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        biased = args["bias"]
        yield Parameter("down_bias", (width(args, self.read_features(dims), self.name),) if biased else None)
        yield Parameter("up_bias", (self.written_features(dims),) if biased else None)
        count = chosen(args, dims.spread[1] or self.entries(args, dims))
        yield Parameter("values", (count,), scope="common")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return not_linear(args)

    def common(self, args: Args) -> Scope | None:
        return "edit"

    def entries(self, args: Args, dims: Dims) -> int:
        d_in, d_out = self.read_features(dims), self.written_features(dims)
        return width(args, d_in, self.name) * (d_in + d_out)

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        return f"{activated(args, f'{source} W_down')} W_up"
