"""Bottlenecks of other tasks, which stay as they are, mixed by an attention that is trained (AdapterFusion)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, REDUCTION, activated, integer, over, width
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import register
from peftc.forms.shapes import Shape

_STD = 0.02  # of the first values of Q and K


@register
class Fusion(Form):
    name = "fusion"
    equation = (
        "f(x) = Σᵢ aᵢ zᵢ V, aᵢ = softmaxᵢ((x Q + b) · zᵢ K), zᵢ = act(x W_down,i + b_down,i) W_up,i + b_up,i: adapters that "
        "`peftc.fuse` reads, and that are not trained"
    )
    paper = "Pfeiffer et al. 2021, arXiv:2005.00247 (AdapterFusion)"
    module = "peftc.forms.fusion_module:FusionModule"
    arguments = (
        Argument("n", "int", "how many adapters", required=True, low=1),
        Argument("r", "int", "width of their bottlenecks, in features", low=1),
        REDUCTION,
        ACT,
        Argument("bias", "bool", "whether their projections have biases", True),
        Argument("value", "bool", "whether there is V, which begins next to the identity", True),
        Argument("penalty", "float", "weight of ‖I − V‖² among `peftc.losses`", 0.01, low=0.0),
        Argument(
            "dropout",
            "float",
            "probability of zeroing a score of the attention while training",
            DROPOUT.default,
            low=0.0,
            high=1.0,
            open="high",
        ),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        d = self.read_features(dims)
        width(args, d, self.name)
        if self.written_features(dims) != d:
            raise PlacementError("P301", f"`fusion` reads {dims.input} but writes {dims.target}", "input")
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        n, d = integer(args, "n"), self.read_features(dims)
        r = width(args, d, self.name)
        yield Parameter("query", (d, d), ("normal", _STD))
        yield Parameter("query_bias", (d,))
        yield Parameter("key", (d, d), ("normal", _STD))
        yield Parameter("value", (d, d) if args["value"] else None)
        yield Parameter("down", (n, r, d), role="state")
        yield Parameter("up", (n, d, r), role="state")
        if args["bias"]:
            yield Parameter("down_bias", (n, r), role="state")
            yield Parameter("up_bias", (n, d), role="state")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "its attention depends on the input"

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        return f"Σᵢ aᵢ {activated(args, f'{source} W_down,i')} W_up,i V"
