"""A small network beside the layers, as modules: one rung in each layer, whose state passes to the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.activations_module import ACTIVATION, EPSILON
from peftc.forms.arguments import number
from peftc.forms.cross_layer_state_module import CrossLayerState
from peftc.forms.module import FormModule


class LadderEnd(FormModule):
    """What the rungs of a stack have in common: the way back to d features, the first state where there is one, and the states of the
    present forward.

    Shapes: up (d, r); up_bias (d,); end_norm_weight, end_norm_bias (r,); start (r, d); start_bias (r,).
    """

    end_norm_weight: nn.Parameter
    end_norm_bias: nn.Parameter
    up: nn.Parameter
    up_bias: nn.Parameter | None
    start: nn.Parameter | None
    start_bias: nn.Parameter | None

    def setup(self) -> None:
        self.cross_layer_state = CrossLayerState()

    def forward(self, s: Tensor) -> Tensor:
        normed = F.layer_norm(s, s.shape[-1:], self.end_norm_weight, self.end_norm_bias, EPSILON)
        return F.linear(normed, self.up, self.up_bias)

    def first(self, x: Tensor) -> Tensor:
        """The state before the first layer."""
        assert self.start is not None
        return F.linear(x.detach().to(self.start.dtype), self.start, self.start_bias)


class LadderRung(FormModule):
    """s ← σ(a / t) s + (1 − σ(a / t)) (h W_down + b_down), s ← s + act(LN(s) U + c) V + e; the value is LN(s) W_up + b_up at the last
    rung, and 0 at the others, or h with `replace`. s begins as 0, or as x W_start + b_start with the x of the first layer. No gradient
    enters h and x. Blocks see one token at a time, so that a cache of keys and values changes nothing.

    Shapes: h, x, f (batch, tokens, d); s (batch, tokens, r); down (r, d); gate (1,); block_in (hidden, r); block_out (r, hidden).
    Raises: P421 where the gradient would be lost on the way (checkpoints that run a layer without gradients first), or be that of
    another forward.
    Source: Sung et al. 2022, arXiv:2206.06522, section 3.2; a begins as 0. There t is 0.1, s begins at the embedding, and the last
    state is replaced.
    """

    gate: nn.Parameter
    down: nn.Parameter
    norm_weight: nn.Parameter
    norm_bias: nn.Parameter
    block_in: nn.Parameter
    block_out: nn.Parameter
    down_bias: nn.Parameter | None
    block_in_bias: nn.Parameter | None
    block_out_bias: nn.Parameter | None

    def setup(self) -> None:
        args = self.form_args
        self.act, self.p, self.t = str(args["act"]), number(args, "dropout"), number(args, "temperature")

    def forward(self, h: Tensor, x: Tensor | None = None) -> Tensor:
        end = self.owner_module
        assert isinstance(end, LadderEnd)
        states = end.cross_layer_state
        (below,) = states.below(self, h, self.down.requires_grad, "the side network") or (None,)
        if below is None and x is not None:
            below = end.first(x)
        s = self.rung(h.detach().to(self.down.dtype), below)
        if states.pass_on(self, s):
            return h if self.form_args["replace"] else h.new_zeros(()).expand_as(h)
        return end(s).to(h.dtype)

    def rung(self, h: Tensor, below: Tensor | None) -> Tensor:
        """The state of this layer, from its hidden state and the state of the layer below."""
        gate = torch.sigmoid(self.gate / self.t)
        s = (1 - gate) * F.linear(h, self.down, self.down_bias)
        s = s if below is None else gate * below + s
        z = F.layer_norm(s, s.shape[-1:], self.norm_weight, self.norm_bias, EPSILON)
        z = ACTIVATION[self.act](F.linear(z, self.block_in, self.block_in_bias))
        return s + F.linear(F.dropout(z, self.p, self.training), self.block_out, self.block_out_bias)
