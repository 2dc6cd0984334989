"""A mixture of the states that a token has in all layers, for the last one (attention fusion)."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, features, over
from peftc.forms.handed import check_depth
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, register
from peftc.forms.shapes import Shape


def _shape(args: Args, dims: Dims) -> Shape:
    d = features("layer_attention", dims.input, "reads")
    if features("layer_attention", dims.target, "writes") != d:
        raise Illegal("P301", f"`layer_attention` reads {dims.input} but writes {dims.target}", "input")
    check_depth("layer_attention", dims)
    return over(dims)


def _common_count(args: Args, dims: Dims) -> Count:
    d = features("layer_attention", dims.input, "reads")
    return Count(d, d)


register(
    Form(
        name="layer_attention",
        equation="f(h) = Σₗ aₗ hₗ in the last layer, a = softmaxₗ(hₗ · q) over its h and those of the layers before; f(h) = h in these",
        takes_input=True,
        params=(DTYPE,),
        shape=_shape,
        count=lambda args, dims: Count(0, 0),
        at_init=lambda args: None,
        affine=lambda args: "it depends on the states of all layers",
        module="peftc.forms.layer_attention_module:LayerAttention",
        paper="Cao et al. 2022, Findings of NAACL, pages 857-866 (Attention Fusion)",
        common=lambda args: "group",
        common_count=_common_count,
        design=lambda source, args: f"Σₗ softmaxₗ({source}ₗ · q) {source}ₗ",
    )
)
