"""A module selected by a glob: `x` is the first tensor in its arguments, `h` the first in its
result, however nested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import peftc
from tests.laws.harness import randomise

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[True, True, True, False, False], [True] * 5])


@dataclass
class Output(ModelOutput):
    mask: Tensor | None = None
    state: Tensor | None = None


def masked(fc: nn.Linear, x: Tensor, mask: Tensor) -> Tensor:
    return fc(x) * mask[..., None]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return masked(self.fc, x, mask)


class Pair(Bare):
    def forward(self, mask: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        return mask, masked(self.fc, x, mask)


class Nested(Bare):
    def forward(self, inputs: dict[str, Tensor], scale: float = 1.0) -> list[Any]:  # pyright: ignore
        return [inputs["mask"], {"state": (masked(self.fc, inputs["x"], inputs["mask"]) * scale,)}]


class Named(Bare):
    def forward(self, *, mask: Tensor, x: Tensor) -> Output:  # pyright: ignore
        return Output(mask=mask, state=masked(self.fc, x, mask))


class Model(nn.Module):
    """The blocks compute the same, with different signatures."""

    def __init__(self, block: type[Bare]) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(D, D), block(), nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        match self.block:
            case Pair():
                x = self.block(mask, x)[1]
            case Nested():
                x = self.block({"mask": mask, "x": x})[1]["state"][0]
            case Named():
                x = self.block(mask=mask, x=x).state
            case _:
                x = self.block(x, mask)
        return self.last(x)


def compiled(block: type[Bare], equation: str) -> nn.Module:
    torch.manual_seed(0)
    text = f'peft 1\nedit e at "block" {{ {equation} }}'
    model = peftc.compile(text, Model(block), 0, sample={"x": X, "mask": MASK})
    randomise(peftc.parameters(model))
    return model


@pytest.mark.parametrize("equation", ["h += adapter(h, r=2)", "h += adapter(x, r=2)", "h *= vector()"])
@pytest.mark.parametrize("block", [Pair, Nested, Named])
def test_a_state_is_the_first_tensor(block: type[Bare], equation: str) -> None:
    """The same function as a block that takes and returns one tensor."""
    plain, model = compiled(Bare, equation), compiled(block, equation)
    for mode in (True, False):
        got, want = model.train(mode)(X, MASK), plain.train(mode)(X, MASK)
        assert torch.equal(got, want)
        with peftc.disabled(plain):
            assert not torch.allclose(got, plain(X, MASK), atol=1e-3)
    got.sum().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values())
    assert peftc.verify(model).ok
