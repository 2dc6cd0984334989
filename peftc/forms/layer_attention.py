"""A mixture of the states that a token has in all layers, for the last one (attention fusion)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import DTYPE, over
from peftc.forms.cross_layer_state import check_depth
from peftc.forms.form import Args, Dims, Form, Parameter, PlacementError, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import Shape


@register
class LayerAttention(Form):
    name = "layer_attention"
    equation = "f(h) = Σₗ aₗ hₗ in the last layer, a = softmaxₗ(hₗ · q) over its h and those of the layers before; f(h) = h in these"
    paper = "Cao et al. 2022, Findings of NAACL, pages 857-866 (Attention Fusion)"
    module = "peftc.forms.layer_attention_module:LayerAttentionModule"
    common_module = "peftc.forms.layer_attention_module:LayerQuery"
    arguments = (DTYPE,)

    def shape(self, args: Args, dims: Dims) -> Shape:
        if self.written_features(dims) != self.read_features(dims):
            raise PlacementError("P301", f"`layer_attention` reads {dims.input} but writes {dims.target}", "input")
        check_depth(self.name, dims)
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        yield Parameter("query", (self.read_features(dims),), scope="common")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it depends on the states of all layers"

    def common(self, args: Args) -> Scope | None:
        return "group"

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        return f"Σₗ softmaxₗ({source}ₗ · q) {source}ₗ"
