"""Interventions in a low-rank subspace, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftc.forms.module import FormModule
from peftc.forms.rowwise_module import linear
from peftc.forms.sequence_module import Sequence, picked

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class ReFTModule(FormModule):
    """f(h) = Rᵀ (W h + b − R h), or Rᵀ (W h + b) without `subtract`; not zero at first.

    Where R is orthonormal, its rows are those of the stored matrix made so (Gram-Schmidt), which is itself orthonormal at
    first. W and b as in `nn.Linear`.

    With `first` or `last` it is zero but for the first or the last tokens of each sequence. Padding is no token of it, on
    either side: the stack tells the form which columns of the mask it is given (`peftc.runtime.positions`). With a cache, tokens
    count from the start of the cache, so that generation with and without one give the same; the first `first` tokens are
    edited even where the prompt has fewer. `last` counts from the end of what a call is given, and a call with a cache is
    refused: pyreft edits the end of the prompt in the first call, which without a cache would be at another place with every
    token. AdapterHub edits the first tokens of every call with a cache, so that all that is generated is edited.
    Shapes: h (batch, tokens, d); f (batch, tokens, d_out); R (r, d_out); W (r, d); b (r,).
    Source: Wu et al. 2024, arXiv:2404.03592, Eq. 2 and 3.
    """

    sequence: Sequence | None = None

    R: nn.Parameter
    W: nn.Parameter
    b: nn.Parameter

    def forward(self, h: Tensor) -> Tensor:
        rotation, z = self.rotation(), h.to(self.W.dtype)
        inner = linear(z, self.W, self.b)
        if self.form_args["subtract"]:
            inner = inner - linear(z, rotation)
        made = inner @ rotation
        if self.definition.selects_positions(self.form_args):
            made = made.masked_fill(~picked(self.form_args, self.sequence, h), 0.0)
        return made.to(h.dtype)

    def takes_rows(self) -> bool:
        return True

    def rotation(self) -> Tensor:
        """R, (r, d_out)."""
        if not self.form_args["orthogonal"]:
            return self.R
        rows = (
            self.R.float() if self.R.dtype in (torch.float16, torch.bfloat16) else self.R
        )  # torch has no `qr` of these
        q, upper = torch.linalg.qr(rows.mT)
        return (q * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.to(self.R.dtype)

    def fold(self, value: Affine) -> Affine:
        rotation = self.rotation().detach()
        weight = self.W.detach() - rotation if self.form_args["subtract"] else self.W
        return value.through(weight, self.b).through(rotation.t())
