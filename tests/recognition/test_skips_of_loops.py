"""Layers in a loop that read what the layers of an earlier loop have computed: U-Nets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        scores = self.q(tokens) @ self.k(tokens).transpose(1, 2)
        return x + self.o(scores.softmax(-1) @ self.v(tokens)).transpose(1, 2).view_as(x)


class Convolutions(nn.Module):
    """A depthwise convolution, and a network of its result with the skip beside it."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.up, self.down = nn.Conv2d(width, 2 * D, 1), nn.Conv2d(2 * D, D, 1)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        h = self.depthwise(x)
        h = h if skip is None else torch.cat([h, skip], dim=1)
        return self.down(torch.relu(self.up(h))) + x


class UNet(nn.Module):
    """The stream of the second loop begins with a convolution over single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.turn = nn.Conv2d(3, D, 2, stride=2), nn.Conv2d(D, D, 1)
        self.downs = nn.ModuleList([nn.ModuleList([Convolutions(), Attention()]) for _ in range(2)])
        self.ups = nn.ModuleList([nn.ModuleList([Convolutions(2 * D), Attention()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), list[Tensor]()
        for convolutions, attention in self.downs:  # pyright: ignore[reportGeneralTypeIssues]
            x = attention(convolutions(x))
            skips.append(x)
        x = self.turn(x)
        for convolutions, attention in self.ups:  # pyright: ignore[reportGeneralTypeIssues]
            x = attention(convolutions(x, skips.pop()))
        return x


def built() -> UNet:
    torch.manual_seed(0)
    return UNet().double().eval()


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


@pytest.mark.parametrize("role", ["up", "down"])
def test_roles(role: str) -> None:
    """The sums of the first loop are no part of the second one's sub-layers."""
    sites = [site for site in peftc.sites(built(), sample=inputs()).sites if site.path.endswith(f"ffn.{role}")]
    names = [site.states["w"].weight.module for site in sites]  # pyright: ignore[reportOptionalMemberAccess]
    assert names == [f"{part}.{i}.0.{role}" for part in ("downs", "ups") for i in range(2)]


def test_edits() -> None:
    """As hooks at the convolutions would compute."""
    model, plain = built(), built()
    peftc.compile("peft 1 edit f at layer[*].ffn { h += adapter(h, r=2) }", model, seed=0, sample=inputs())
    parameters = dict(peftc.parameters(model))
    assert len({name.split("/")[1] for name in parameters}) == 4
    for parameter in parameters.values():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    blocks = [*plain.downs, *plain.ups]
    sites = dict.fromkeys(name.rpartition("/")[0] for name in parameters)
    for block, site in zip(blocks, sites, strict=True):
        own = {name.rpartition(".")[2]: p for name, p in parameters.items() if name.startswith(f"{site}/")}

        def adapt(_module: nn.Module, _inputs: object, h: Tensor, own: dict[str, nn.Parameter] = own) -> Tensor:
            z = torch.relu(h.movedim(1, -1) @ own["down"].T + own["down_bias"])
            return h + (z @ own["up"].T + own["up_bias"]).movedim(-1, 1)

        block[0].down.register_forward_hook(adapt)  # pyright: ignore[reportIndexIssue]
    torch.testing.assert_close(model(**inputs()), plain(**inputs()))


class Denoiser(UNet):
    """A Linear of the time is the last that runs; the result is that of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.out = nn.Linear(1, D), nn.Conv2d(D, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x.mean((1, 2, 3))[:, None])
        return self.out(super().forward(x) + time[:, :, None, None])


def test_no_head() -> None:
    model = Denoiser().double().eval()
    assert not any(site.path == "head" for site in peftc.sites(model, sample=inputs()).sites)
