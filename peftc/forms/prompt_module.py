"""Trained tokens before those of the input, as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peftc.forms.arguments import integer
from peftc.forms.module import FormModule
from peftc.forms.rowwise_module import linear


class PromptModule(FormModule):
    """f = P: direct rows; relu MLP of three layers over rows E (P-tuning); or W' tanh(W z + b) + b' of a vector z (IPT).

    Shapes: f (len, d); tokens or embedding (len, d); in (m, d or intrinsic); mid (m, m); out (d or len · d, m); z (intrinsic,).
    Source: Lester et al. 2021, arXiv:2104.08691; the MLP as PEFT's `PromptEncoder`; Qin et al. 2021, arXiv:2110.07867, 3.2.
    """

    tokens: nn.Parameter | None
    embedding: nn.Parameter
    inner: nn.Parameter
    inner_bias: nn.Parameter
    middle: nn.Parameter | None
    middle_bias: nn.Parameter | None
    outer: nn.Parameter
    outer_bias: nn.Parameter

    def forward(self, like: Tensor) -> Tensor:
        return self.rows().to(like.dtype)

    def rows(self) -> Tensor:
        """P, (len, d), in the dtype of the parameters."""
        if self.tokens is not None:
            return self.tokens
        z = linear(self.embedding, self.inner, self.inner_bias)
        if self.middle is None:
            return linear(torch.tanh(z), self.outer, self.outer_bias).view(integer(self.form_args, "len"), -1)
        z = linear(torch.relu(z), self.middle, self.middle_bias)
        return linear(torch.relu(z), self.outer, self.outer_bias)

    def takes_rows(self) -> bool:
        return self.form_args["intrinsic"] is None

    def collapsed(self) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"tokens": self.rows().contiguous()}
