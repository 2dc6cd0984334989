"""Functions that hold modules: in a graph they would call the modules of the traced copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftc.tracing.region_trace import TraceError
from peftc.tracing.tracer import RegionTracer


class Checkpoint(torch.autograd.Function):
    """As in guided diffusion: calls a function that it is given."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    return scale * x


class Block(nn.Module):
    def __init__(self, choose: Callable[[Block], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.up, self.choose = nn.Linear(4, 4), choose

    def inner(self, x: Tensor) -> Tensor:
        return x + self.up(x)

    def forward(self, x: Tensor) -> Any:
        return Checkpoint.apply(self.choose(self), x)


@pytest.mark.parametrize(
    "choose",
    [
        lambda block: block.inner,
        lambda block: partial(block.inner),
        lambda block: lambda x: block.up(x),
        lambda block: partial(scaled, scale=block.up.weight),
        lambda block: lambda x, inner=block.inner: inner(x),
    ],
    ids=["method", "partial", "closure", "parameter", "default"],
)
def test_a_function_that_holds_a_module_is_no_constant(choose: Any) -> None:
    with pytest.raises(TraceError, match=r"gets a function that holds a (Block|Linear|Parameter)"):
        RegionTracer(lambda _: True).trace_region(Block(choose), {"x": torch.randn(2, 4)})


def test_another_function_is_a_constant() -> None:
    block = Block(lambda _: partial(scaled, scale=3.0))
    trace = RegionTracer(lambda _: True).trace_region(block, {"x": torch.ones(2, 4)})
    assert any(isinstance(argument, partial) for node in trace.graph.nodes for argument in node.args)
