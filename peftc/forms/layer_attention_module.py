"""A mixture of the states of all layers, as modules: each layer hands on its state and those from below."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peftc.forms.handed_module import Handed, lost_gradient, runs_again
from peftc.forms.module import FormModule


class LayerQuery(FormModule):
    """What the layers of a stack have in common: the query, and the states of the present forward.

    Shapes: query (d,).
    """

    query: nn.Parameter

    def setup(self) -> None:
        self.handed = Handed[tuple[Tensor, ...]]()

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
        again = runs_again()
        below = common.handed.before(self.task, self.index, again) or ()
        if again and h.requires_grad and not all(state.requires_grad for state in below):
            raise lost_gradient("the attention over layers")
        common.handed.check(self.task, self.index, h, self.training or torch.is_grad_enabled(), again)
        if self.index + 1 < self.form_dims.sites:
            if not again:
                # Without gradients, not h itself: it is an output of the layer, and a checkpoint gives it one afterwards.
                state = h if torch.is_grad_enabled() else h.detach()
                common.handed.states[self.task][self.index] = (*below, state)
            return h
        if not (self.training or torch.is_grad_enabled()):
            common.handed.states.pop(self.task, None)
        return common((*below, h)).to(h.dtype)
