"""Singular value decompositions of a change, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.arguments import integer, number
from peftc.forms.module import FormModule
from peftc.forms.rowwise_module import linear

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

EPSILON = 1e-5  # added to the rank, as PEFT does
IMPORTANCE, UNCERTAINTY = "importance", "uncertainty"


class SVDModule(FormModule):
    """f(x) = alpha / (r + 1e-5) · P (λ ⊙ (Q dropout(x))); P and Q N(0, 0.02), λ zero; alpha = r where none is given.

    Which λ are `kept`, and the smoothed importances, are a state that `peftc.step` changes.
    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); P (d_out, r); Q (r, d_in); values (r,).
    Source: Zhang et al. 2023, arXiv:2303.10512, Eq. 3; scale and first values as PEFT has them.
    """

    reduction = "mean"
    P: nn.Parameter
    Q: nn.Parameter
    values: nn.Parameter

    def setup(self) -> None:
        args, r = self.form_args, len(self.values)
        self.scale = (float(r) if args["alpha"] is None else number(args, "alpha")) / (r + EPSILON)
        self.p = number(args, "dropout")
        if args["target"] is not None:
            self.state("kept", torch.ones(r, dtype=torch.bool))
            for name, parameter in list(self.named_parameters()):
                for what in (IMPORTANCE, UNCERTAINTY):
                    self.state(f"{name}_{what}", torch.zeros(parameter.shape, dtype=parameter.dtype))

    def forward(self, x: Tensor) -> Tensor:
        z = linear(F.dropout(x.to(self.P.dtype), self.p, self.training), self.Q)
        return (linear(z * self.values, self.P) * self.scale).to(x.dtype)

    def takes_rows(self) -> bool:
        return True

    def fold(self, value: Affine) -> Affine:
        values = self.values.detach().to(value.dtype)
        return value.through(self.Q).scaled(values).through(self.P).scaled(self.scale)

    # Giving up ranks ---------------------------------------------------------------------------------------------

    def last_round(self) -> int:
        """The last step in which ranks are given up."""
        return integer(self.form_args, "total") - integer(self.form_args, "cooldown")

    def has_gradients(self) -> bool:
        return all(parameter.grad is not None for parameter in self.parameters())

    def is_trained(self) -> bool:
        """Whether the loss of the batch depends on it; not, where the batch had no example of its task."""
        return self.values.grad is not None and bool(self.values.grad.any())

    def is_smoothed(self) -> bool:
        return any(bool(self.get_buffer(f"{name}_{IMPORTANCE}").any()) for name, _ in self.named_parameters())

    def smooth(self) -> None:
        """Takes the present |p · ∂p| of every entry into its importance, and how far off it is into its uncertainty."""
        beta1, beta2 = number(self.form_args, "beta1"), number(self.form_args, "beta2")
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            now = (parameter * parameter.grad).abs()
            mean, spread = self.get_buffer(f"{name}_{IMPORTANCE}"), self.get_buffer(f"{name}_{UNCERTAINTY}")
            mean.mul_(beta1).add_((1 - beta1) * now)
            spread.mul_(beta2).add_((1 - beta2) * (now - mean).abs())

    def scores(self) -> Tensor:
        """The importance of each triplet (r,): of λ, and the means over its row of Q and its column of P."""
        entry = {
            n: self.get_buffer(f"{n}_{IMPORTANCE}") * self.get_buffer(f"{n}_{UNCERTAINTY}")
            for n in ("P", "Q", "values")
        }
        return entry["values"] + (entry["Q"].mean(1) + entry["P"].mean(0))

    def penalties(self) -> Mapping[str, Tensor]:
        """orthogonality: w · mean of ‖PᵀP − I‖ and ‖QQᵀ − I‖ (Frobenius)."""
        if not self.form_args["orthogonality"]:
            return {}
        one = torch.eye(len(self.values), dtype=self.P.dtype, device=self.P.device)
        norms = [torch.linalg.matrix_norm(product - one) for product in (self.P.t() @ self.P, self.Q @ self.Q.t())]
        return {"orthogonality": number(self.form_args, "orthogonality") * torch.stack(norms).mean()}
