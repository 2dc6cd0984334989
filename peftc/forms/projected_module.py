"""Frozen random projections of a few trained numbers, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.arguments import changed_weight, size_of
from peftc.forms.module import Draw, FormModule, draw_of
from peftc.forms.projected import layers_of
from peftc.forms.shapes import entries

ORDER_16 = [
    [float((-1) ** (i & j).bit_count()) for j in range(16)] for i in range(16)
]  # Sylvester's; each corner is one, too


class Theta(FormModule):
    """θ (d,), zero at first; with `scaled` θ (d − m,) and λ (m,), one at first, for m layers."""

    theta: nn.Parameter
    scale: nn.Parameter | None


class FastfoodModule(FormModule):
    """f = P θ, or λ P θ with the λ of the layer, in n log n: P = H G Π H B / √(n · Σ G²) of the first entries of n, a power of two; θ
    is filled with zeros.

    H is the Hadamard matrix, G diagonal and normal, Π a permutation, B diagonal with entries ±1; they are drawn for each site.
    θ may be longer than a bias: n is at least as large as both.
    Shapes: f as the weight (out, in) or bias (d,) that it changes; G, B and Π (n,).
    Source: Aghajanyan et al. 2021, arXiv:2012.13255, section 3 (DID, and with λ SAID); Le et al. 2014, arXiv:1408.3060.
    """

    G: Tensor
    B: Tensor
    order: Tensor

    def setup(self) -> None:
        dims = self.form_dims
        self.size = size_of(changed_weight("fastfood", dims))
        spot = dims.spots[dims.index] if dims.spots else None
        self.layer = layers_of(dims).index(spot.home or spot.layer or spot.part) if spot is not None else 0

    def forward(self, like: Tensor) -> Tensor:
        assert isinstance(self.owner_module, Theta)
        theta, n = self.owner_module.theta, len(self.G)
        z = hadamard(F.pad(theta, (0, n - len(theta))) * self.B)
        z = hadamard(z[self.order] * self.G)
        count = entries(self.form_dims.target)
        # each H is √n times an orthogonal matrix; the entries taken keep the length that θ has
        factor = 1 / (sqrt(n) * torch.linalg.vector_norm(self.G) * sqrt(count / n))
        scale = self.owner_module.scale
        factor = factor if scale is None else factor * scale[self.layer]
        return (z[:count] * factor).view(self.size).to(like.dtype)

    def fixed_draws(self) -> Mapping[str, Draw]:
        return {
            "G": draw_of(("normal", 1.0), ()),
            "B": lambda values, generator: values.bernoulli_(0.5, generator=generator).mul_(2).sub_(1),
            "order": lambda values, generator: values.copy_(torch.randperm(len(values), generator=generator)),
        }


def hadamard(z: Tensor) -> Tensor:
    """H z, H the Hadamard matrix of order n, a power of two: (n,) to (n,). H is the Kronecker product of matrices of order 16 at most."""
    n, step = len(z), 1
    while step < n:
        order = min(n // step, len(ORDER_16))
        h = torch.tensor([row[:order] for row in ORDER_16[:order]], dtype=z.dtype, device=z.device)
        z = (z.view(-1, order) @ h if step == 1 else h @ z.view(-1, order, step)).view(n)
        step *= order
    return z
