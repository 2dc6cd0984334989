"""A small network beside the layers, which reads their states and changes only the last of them (ladder side-tuning)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, INIT, REDUCTION, first_projections, integer, width
from peftc.forms.cross_layer_state import CrossLayerForm
from peftc.forms.form import Args, Argument, Dims, Parameter, PlacementError
from peftc.forms.registry import register
from peftc.forms.shapes import Shape


@register
class Ladder(CrossLayerForm):
    name = "ladder"
    equation = (
        "s ← σ(a / t) s + (1 − σ(a / t)) (h W_down + b_down), s ← s + act(LN(s) U + c) V + e in every layer, from s = 0, or "
        "from s = x W_start + b_start with the x of the first layer, `ladder(h, x)`; f = LN(s) W_up + b_up in the last layer, and 0 in the "
        "others, or h where it replaces the last state; no gradient enters h and x"
    )
    paper = "Sung et al. 2022, arXiv:2206.06522 (LST), with blocks that are applied token by token"
    inputs = ("h", "x")
    module = "peftc.forms.ladder_module:LadderRung"
    common_module = "peftc.forms.ladder_module:LadderEnd"
    arguments = (
        Argument("r", "int", "width of the side network, in features", low=1),
        REDUCTION,
        Argument("expand", "int", "hidden features of a block, in multiples of r", 4, low=1),
        ACT,
        Argument("temperature", "float", "t: what a, which begins as 0, is divided by", 1.0, low=0.0, open="low"),
        Argument("replace", "bool", "the value is h in all layers but the last: for `h = ladder(h, …)`", False),
        Argument("bias", "bool", "whether the projections have biases", True),
        DROPOUT,
        INIT,
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        d = self.read_features(dims)
        width(args, d, self.name)
        if dims.second is not None and dims.second != dims.input:
            message = f"`ladder` starts from {dims.second} and reads {dims.input}: they have the same features"
            raise PlacementError("P301", message, "second")
        return super().shape(args, dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        d = self.read_features(dims)
        r = width(args, d, self.name)
        hidden, biased, (_, last) = r * integer(args, "expand"), args["bias"], first_projections(args)
        yield Parameter("gate", (1,))
        yield Parameter("down", (r, d), "kaiming")
        yield Parameter("norm_weight", (r,), 1.0)
        yield Parameter("norm_bias", (r,))
        yield Parameter("block_in", (hidden, r), "kaiming")
        yield Parameter("block_out", (r, hidden), "kaiming")
        yield Parameter("down_bias", (r,) if biased else None)
        yield Parameter("block_in_bias", (hidden,) if biased else None)
        yield Parameter("block_out_bias", (r,) if biased else None)
        starts = dims.second is not None
        yield Parameter("end_norm_weight", (r,), 1.0, scope="common")
        yield Parameter("end_norm_bias", (r,), scope="common")
        yield Parameter("up", (d, r), last, scope="common")
        yield Parameter("up_bias", (d,) if biased else None, scope="common")
        yield Parameter("start", (r, d) if starts else None, "kaiming", scope="common")
        yield Parameter("start_bias", (r,) if starts and biased else None, scope="common")

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0 if args["init"] == "lora" and not args["replace"] else None
