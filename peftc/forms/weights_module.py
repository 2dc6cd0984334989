"""Changes of a weight, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peftc.forms.arguments import integer
from peftc.forms.module import FormModule


class OrthogonalModule(FormModule):
    """f(W) = W Rᵀ: what W reads is rotated, block by block; Q zero at first, so that R is the identity.

    R = (I − Q)(I + Q)⁻¹ (Cayley), or I + 2 Q + 2 Q² + … + Qⁿ with `neumann` = n + 1, which is nearly its transpose, as in PEFT.
    Shapes: W and f (out, in); Q (blocks, block · (block − 1) / 2), the entries of each upper triangle.
    Source: Qiu et al. 2023, arXiv:2306.07280.
    """

    Q: nn.Parameter

    def setup(self) -> None:
        self.size, self.neumann = integer(self.form_args, "block"), self.form_args["neumann"]

    def forward(self, weight: Tensor) -> Tensor:
        w = weight.to(self.Q.dtype).unflatten(1, (-1, self.size))
        return torch.einsum("obk,bck->obc", w, self.rotations()).flatten(1).to(weight.dtype)

    def rotations(self) -> Tensor:
        """R of each block, (blocks, block, block)."""
        rows, columns = torch.triu_indices(self.size, self.size, 1, device=self.Q.device)
        upper = self.Q.new_zeros(self.Q.shape[0], self.size, self.size)
        upper = upper.index_put((torch.arange(self.Q.shape[0], device=rows.device)[:, None], rows, columns), self.Q)
        q = upper - upper.transpose(1, 2)
        one = torch.eye(self.size, dtype=q.dtype, device=q.device).expand_as(q)
        if self.neumann is None:
            return torch.linalg.solve(one + q, one - q, left=False)
        power, total = q, one + 2 * q
        for term in range(2, integer(self.form_args, "neumann")):
            power = power @ q
            total = total + (power if term == integer(self.form_args, "neumann") - 1 else 2 * power)
        return total
