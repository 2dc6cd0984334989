"""Sizes inside of a region are expressions of the sizes of its arguments: a call of other sizes
gets the code that is right for it, and code that holds for many sizes is traced once.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.specialization.generated_class import GeneratedClass


class Unpacking(nn.Module):
    """Unpacks a tensor whose first size is that of a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, 4)).movedim(-2, 0)
        return q * k.sigmoid() + v


class Windows(Unpacking):
    """Needs the number of windows as an int, which depends on both sizes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(x)).view(-1, 2, 12)
        return y * int(y.shape[0] / (x.shape[1] / 2))


class Scores(Unpacking):
    """Uses sizes of products with weights, and of the arguments, as floats."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnd,fd->bfn", self.norm(x), self.inner.weight)
        y = y.softmax(-1).reshape(x.shape[0] * 3, -1, x.shape[1])
        return y * float(y.shape[1]) ** -0.5 + float(y.shape[2])


class Deciding(Unpacking):
    """A child decides on sizes: a number inside holds under its condition."""

    class Pooling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] if x.shape[1] > 3 else x

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.Pooling()

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.norm(x))
        return y * float(y.shape[1])


def rewritten(module: nn.Module) -> GeneratedClass:
    kind = GeneratedClass(type(module), frozenset([""]), (), type(module).__name__)
    module.__class__ = kind.cls
    return kind


# A size of 1 is a case of its own: it broadcasts.
@pytest.mark.parametrize(("cls", "variants"), [(Unpacking, 3), (Windows, 4), (Scores, 6), (Deciding, 5)])
def test_other_sizes(cls: type[nn.Module], variants: int) -> None:
    base, module = cls(), cls()
    module.load_state_dict(base.state_dict())
    kind = rewritten(module)
    for batch, tokens in ((2, 4), (3, 4), (2, 6), (4, 2), (2, 4), (1, 4), (2, 3), (3, 1)):
        if cls is Windows and tokens % 2:
            continue
        x = torch.randn(batch, tokens, 4)
        assert torch.equal(module(x), base(x)), (batch, tokens)
    assert len(kind.variants) == variants


def test_sizes_that_data_decide_are_refused() -> None:
    class Selecting(Unpacking):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return y * float(y[y[..., 0] > 0].shape[0])

    module = Selecting()
    rewritten(module)
    with pytest.raises(peftc.PeftcError, match="P40"):
        module(torch.randn(2, 3, 4))
