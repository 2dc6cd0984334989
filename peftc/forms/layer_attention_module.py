"""A mixture of the states of all layers, as modules: that of each layer passes on with those from below."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peftc.forms.cross_layer_state_module import CrossLayerState
from peftc.forms.module import FormModule


class LayerQuery(FormModule):
    """What the layers of a stack have in common: the query, and the states of the present forward.

    Shapes: query (d,).
    """

    query: nn.Parameter

    def setup(self) -> None:
        self.cross_layer_state = CrossLayerState()

    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        here = states[-1].device
        h = torch.stack([state.to(here) for state in states], -2).to(self.query.dtype)  # (batch, tokens, layers, d)
        a = (h @ self.query).softmax(-1)
        return (a.unsqueeze(-2) @ h).squeeze(-2)


class LayerAttentionModule(FormModule):
    """f(h) = Σₗ aₗ hₗ in the last layer, a = softmaxₗ(hₗ · q) over the layers that the form is in; h in the others. One token at a time, so
    that a cache of keys and values changes nothing. A layer that was dropped is not among them.

    Shapes: h, f (batch, tokens, d).
    Raises: P421 where the gradient of a state would be lost on the way (checkpoints that run a layer without gradients first), or be
    that of another forward.
    Source: Cao et al. 2022, Findings of NAACL, Eq. 1 and 2. That q begins with zero, a mean of all layers, is of here.
    """

    def forward(self, h: Tensor) -> Tensor:
        common = self.owner_module
        assert isinstance(common, LayerQuery)
        states = common.cross_layer_state
        below = states.below(self, h, h.requires_grad, "the attention over layers")
        # Without gradients, not h itself: it is an output of the layer, and a checkpoint gives it one afterwards.
        if states.pass_on(self, *below, h if torch.is_grad_enabled() else h.detach()):
            return h
        return common((*below, h)).to(h.dtype)
