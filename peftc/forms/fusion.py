"""Bottlenecks of other tasks, which stay as they are, mixed by an attention that is trained (AdapterFusion)."""

from __future__ import annotations

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, REDUCTION, features, integer, over
from peftc.forms.bottleneck import activated, width
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape


def sizes(args: Args, dims: Dims) -> tuple[int, int, int]:
    """n, r, d"""
    d = features("fusion", dims.input, "reads")
    return integer(args, "n"), width(args, d, "fusion"), d


def _shape(args: Args, dims: Dims) -> Shape:
    _, _, d = sizes(args, dims)
    if features("fusion", dims.target, "writes") != d:
        raise Illegal("P301", f"`fusion` reads {dims.input} but writes {dims.target}", "input")
    return over(dims)


def _count(args: Args, dims: Dims) -> Count:
    n, r, d = sizes(args, dims)
    trained = (3 if args["value"] else 2) * d * d + d
    return Count(trained, trained + n * (2 * d * r + (r + d if args["bias"] else 0)))


register(
    Form(
        name="fusion",
        equation="f(x) = Σᵢ aᵢ zᵢ V, aᵢ = softmaxᵢ((x Q + b) · zᵢ K), zᵢ = act(x W_down,i + b_down,i) W_up,i + b_up,i: adapters that "
        "`peftc.fuse` reads, and that are not trained",
        takes_input=True,
        params=(
            Param("n", "int", "how many adapters", required=True, low=1),
            Param("r", "int", "width of their bottlenecks, in features", low=1),
            REDUCTION,
            ACT,
            Param("bias", "bool", "whether their projections have biases", True),
            Param("value", "bool", "whether there is V, which begins next to the identity", True),
            Param("penalty", "float", "weight of ‖I − V‖² among `peftc.losses`", 0.01, low=0.0),
            Param(
                "dropout",
                "float",
                "probability of zeroing a score of the attention while training",
                DROPOUT.default,
                low=0.0,
                high=1.0,
                open="high",
            ),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=lambda args: "its attention depends on the input",
        module="peftc.forms.fusion_module:Fusion",
        paper="Pfeiffer et al. 2021, arXiv:2005.00247 (AdapterFusion)",
        design=lambda source, args: f"Σᵢ aᵢ {activated(args, f'{source} W_down,i')} W_up,i V",
    )
)
