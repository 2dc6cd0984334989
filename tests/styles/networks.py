"""Feed-forward parts as people write them, each with the parameters of its roles."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tests.styles.attentions import D, Part, Roles, functional

M = 24  # hidden features


class TwoLinears(Part):
    roles: ClassVar[Roles] = {"up": "fc1.weight", "down": "fc2.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, M), nn.Linear(M, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.relu(self.fc1(x)) ** 2)


class Sequence(Part):
    roles: ClassVar[Roles] = {"up": "net.0.weight", "down": "net.3.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, M), nn.GELU(), nn.Dropout(0.0), nn.Linear(M, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class SwiGlu(Part):
    roles: ClassVar[Roles] = {"gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(D, M, bias=False), nn.Linear(M, D), nn.Linear(D, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Halves(Part):
    roles: ClassVar[Roles] = {"up": f"both.weight[0:{M}]", "gate": f"both.weight[{M}:{2 * M}]", "down": "down.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(D, 2 * M), nn.Linear(M, D)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.down(up * functional.gelu(gate))


class Glu(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.glu(self.both(x), dim=-1))


class BareNetwork(Part):
    roles: ClassVar[Roles] = {"up": "w_up.T", "down": "w_down.T"}

    def __init__(self) -> None:
        super().__init__()
        self.w_up, self.w_down = nn.Parameter(torch.randn(D, M) / 4), nn.Parameter(torch.randn(M, D) / 4)
        self.b_up = nn.Parameter(torch.randn(M))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnm,md->bnd", torch.tanh(x @ self.w_up + self.b_up), self.w_down)


class Pointwise(Part):
    roles: ClassVar[Roles] = {"up": "up.weight", "down": "down.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(D, M, 1), nn.Conv1d(M, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)


class NormInside(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(M)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.inner(functional.gelu(self.fc1(x))))


NETWORKS: tuple[type[Part], ...] = (TwoLinears, Sequence, SwiGlu, Halves, Glu, BareNetwork, Pointwise, NormInside)
