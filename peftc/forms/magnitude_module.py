"""The trained length of each row of a weight, as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peftc.forms.module import FormModule, Generators, has_values
from peftc.forms.registry import Args, Dims
from peftc.forms.shapes import Weight


class Magnitude(FormModule):
    """f(W) = (m / ‖W‖) ⊙ W by output row; m starts as the norms of the base weight w, so that f(w) is w bit for bit.

    No gradient flows through the norm. A row of zeros keeps its zeros.
    Shapes: W and f (out, in); m (out,).
    Source: Liu et al. 2024, arXiv:2402.09353, Eq. 5; section 4.3 for the gradient.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        assert isinstance(dims.target, Weight)
        self.m = self.parameter("m", dims.target.d_out)

    def forward(self, weight: Tensor) -> Tensor:
        w = weight.to(self.m.dtype)
        norm = row_norm(w.detach())
        factor = self.m / norm.masked_fill(norm == 0, 1.0)
        return (factor.unsqueeze(1) * w).to(weight.dtype)

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        w = base["w"].detach()
        if has_values(self.m) and has_values(w):
            with torch.no_grad():
                self.m.copy_(row_norm(w.to(self.m.device, self.m.dtype)))


def row_norm(w: Tensor) -> Tensor:
    """‖w‖ of each row (out,); of a contiguous copy, so that the order of summation does not depend on the storage."""
    return torch.linalg.vector_norm(w.contiguous(), dim=1)
