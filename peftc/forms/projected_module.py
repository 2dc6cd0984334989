"""Frozen random projections of a few trained numbers, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import features, integer, number
from peftc.forms.module import Draw, FormModule, constant, kaiming_relu, normal
from peftc.forms.projected import layers
from peftc.forms.registry import Args, Dims
from peftc.forms.shapes import Weight, entries

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

ORDER_16 = [
    [float((-1) ** (i & j).bit_count()) for j in range(16)] for i in range(16)
]  # Sylvester's; each corner is one, too


class VeRAProjections(FormModule):
    """A and B of all sites, as wide as the widest; narrower sites take their first columns and rows.

    Shapes: A (r, max d_in); B (max d_out, r).
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.A = self.fixed("A", integer(args, "r"), dims.widest[0] or features("vera", dims.input, "reads"))
        self.B = self.fixed("B", dims.widest[1] or features("vera", dims.target, "writes"), integer(args, "r"))

    def fixed_draws(self) -> Mapping[str, Draw]:
        return {"A": kaiming_relu(self.A.shape[1]), "B": kaiming_relu(self.B.shape[1])}


class VeRA(FormModule):
    """f(x) = b ⊙ B (d ⊙ A dropout(x)); d starts as `init`, b as zero.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); d (r,); b (d_out,); A and B as `VeRAProjections` has them.
    Source: Kopiczko et al. 2024, arXiv:2310.11454, Eq. 2; A and B Kaiming uniform.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.d_in, self.d_out = features("vera", dims.input, "reads"), features("vera", dims.target, "writes")
        self.d = self.parameter("d", integer(args, "r"))
        self.b = self.parameter("b", self.d_out)
        self.p = number(args, "dropout")

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return VeRAProjections(args, dims, dtype, device)

    def projections(self) -> tuple[Tensor, Tensor]:
        owner = self.owner_module
        assert isinstance(owner, VeRAProjections)
        return owner.A[:, : self.d_in], owner.B[: self.d_out]

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.projections()
        z = F.linear(F.dropout(x.to(self.d.dtype), self.p, self.training), a)
        return (F.linear(z * self.d, b) * self.b).to(x.dtype)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        return {"d": constant(number(self.form_args, "init")), "b": constant(0.0)}

    def fold(self, value: Affine) -> Affine:
        a, b = self.projections()
        through = value.through(a).scaled(self.d.detach().to(value.dtype))
        return through.through(b).scaled(self.b.detach().to(value.dtype))


class Theta(FormModule):
    """θ (d,), zero at first; with `scaled` θ (d − m,) and λ (m,), one at first, for m layers."""

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        m = len(layers(dims)) if args["scaled"] else 0
        self.theta = self.parameter("theta", integer(args, "d") - m)
        self.scale = self.optional("scale", m, m)

    def draws(self) -> Mapping[str, Draw]:
        drawn = {"theta": constant(0.0)}
        return drawn if self.scale is None else drawn | {"scale": constant(1.0)}


class Fastfood(FormModule):
    """f = P θ, or λ P θ with the λ of the layer, in n log n: P = H G Π H B / √(n · Σ G²) of the first entries of n, a power of two; θ
    is filled with zeros.

    H is the Hadamard matrix, G diagonal and normal, Π a permutation, B diagonal with entries ±1; they are drawn for each site.
    θ may be longer than a bias: n is at least as large as both.
    Shapes: f as the weight (out, in) or bias (d,) that it changes; G, B and Π (n,).
    Source: Aghajanyan et al. 2021, arXiv:2012.13255, section 3 (DID, and with λ SAID); Le et al. 2014, arXiv:1408.3060.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        target = dims.target
        self.size = (target.d_out, target.d_in) if isinstance(target, Weight) else (entries(target),)
        n = 1 << (max(entries(target), integer(args, "d")) - 1).bit_length()
        self.G, self.B = self.fixed("G", n), self.fixed("B", n)
        self.order = self.fixed("order", n, dtype=torch.int64)
        spot = dims.spots[dims.index] if dims.spots else None
        self.layer = layers(dims).index(spot.home or spot.layer or spot.part) if spot is not None else 0

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return Theta(args, dims, dtype, device)

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
            "G": normal(1.0),
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
