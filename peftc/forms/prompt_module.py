"""Trained tokens before those of the input, as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from peftc.forms.arguments import hidden_width, integer
from peftc.forms.module import Draw, FormModule, kaiming, normal
from peftc.forms.registry import Args, Dims
from peftc.forms.rowwise_module import linear
from peftc.forms.shapes import Tokens


class Prompt(FormModule):
    """f = P: direct rows; relu MLP of three layers over rows E (P-tuning); or W' tanh(W z + b) + b' of a vector z (IPT).

    Shapes: f (len, d); tokens or embedding (len, d); in (m, d or intrinsic); mid (m, m); out (d or len · d, m); z (intrinsic,).
    Source: Lester et al. 2021, arXiv:2104.08691; the MLP as PEFT's `PromptEncoder`; Qin et al. 2021, arXiv:2110.07867, 3.2.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        assert isinstance(dims.target, Tokens)
        self.length, self.d, m = integer(args, "len"), dims.target.d, hidden_width(args)
        whole = args["intrinsic"] is not None
        self.tokens = self.optional("tokens", m is None, self.length, self.d)
        if m is None:
            return
        source = (integer(args, "intrinsic"),) if whole else (self.length, self.d)
        self.embedding = self.parameter("embedding", *source)
        self.inner, self.inner_bias = self.parameter("inner", m, source[-1]), self.parameter("inner_bias", m)
        self.middle = self.optional("middle", not whole, m, m)
        self.middle_bias = self.optional("middle_bias", not whole, m)
        d_out = self.length * self.d if whole else self.d
        self.outer, self.outer_bias = self.parameter("outer", d_out, m), self.parameter("outer_bias", d_out)

    def forward(self, like: Tensor) -> Tensor:
        return self.rows().to(like.dtype)

    def rows(self) -> Tensor:
        """P, (len, d), in the dtype of the parameters."""
        if self.tokens is not None:
            return self.tokens
        z = linear(self.embedding, self.inner, self.inner_bias)
        if self.middle is None:
            return linear(torch.tanh(z), self.outer, self.outer_bias).view(self.length, self.d)
        z = linear(torch.relu(z), self.middle, self.middle_bias)
        return linear(torch.relu(z), self.outer, self.outer_bias)

    def takes_rows(self) -> bool:
        return self.form_args["intrinsic"] is None

    def draws(self) -> Mapping[str, Draw]:
        if self.tokens is not None:
            std = self.form_args["std"]
            return {"tokens": normal(0.02 if std is None else cast(float, std))}
        drawn = {"embedding": normal(1.0)}
        for name, _ in self.named_parameters():
            if name not in ("embedding", "tokens"):
                drawn[name] = kaiming(self.get_parameter(name.removesuffix("_bias")).shape[1])
        return drawn

    def collapsed(self) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"tokens": self.rows().contiguous()}
