"""A mixture of the states that a token has in all layers, for the last one (attention fusion)."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import DTYPE
from peftc.forms.cross_layer_state import CrossLayerForm
from peftc.forms.form import Args, Dims, Parameter
from peftc.forms.registry import register


@register
class LayerAttention(CrossLayerForm):
    name = "layer_attention"
    equation = "f(h) = Σₗ aₗ hₗ in the last layer, a = softmaxₗ(hₗ · q) over its h and those of the layers before; f(h) = h in these"
    paper = "Cao et al. 2022, Findings of NAACL, pages 857-866 (Attention Fusion)"
    module = "peftc.forms.layer_attention_module:LayerAttentionModule"
    common_module = "peftc.forms.layer_attention_module:LayerQuery"
    arguments = (DTYPE,)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        yield Parameter("query", (self.read_features(dims),), scope="common")

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        return f"Σₗ softmaxₗ({source}ₗ · q) {source}ₗ"
