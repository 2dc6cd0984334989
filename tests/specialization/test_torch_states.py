"""Code of an edited layer asks for states of torch: its default dtype, deterministic algorithms. A
call under another state is another call. What tells how a tensor was computed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Layers

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
SPEC = "peft 2\n\nedit a at layer[*].ffn.hidden { h += adapter(x, r=2, init=lora) }\n"


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


STATES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "default dtype": (lambda: torch.get_default_dtype() == torch.float32, default_dtype),
    "deterministic": (lambda: torch.are_deterministic_algorithms_enabled(), deterministic),
    "precision": (lambda: torch.get_float32_matmul_precision() == "medium", precision),
    "anomaly": (lambda: torch.is_anomaly_enabled(), lambda: torch.autograd.set_detect_anomaly(True)),
    "gradients": (lambda: torch.is_grad_enabled(), torch.no_grad),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
}


class Layer(nn.Module):
    """`decision`: asks for a state, or names a member of a tensor."""

    def __init__(self, decision: Callable[[], object] | str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention(D)
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)
        self.decision = decision

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        hidden = self.up(x)
        holds = self.decision() if callable(self.decision) else getattr(hidden, self.decision) is None
        return x + self.down(torch.tanh(hidden) if holds else 2 * torch.relu(hidden))


def network(decision: Callable[[], object] | str) -> nn.Module:
    torch.manual_seed(0)
    return Layers(Layer(decision), Layer(decision)).eval()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", STATES)
def test_a_call_has_the_state_of_its_time(name: str) -> None:
    decision, state = STATES[name]
    model, base = peftc.compile(SPEC, network(decision), seed=0, sample={"x": X}), network(decision)
    for _ in range(2):
        torch.testing.assert_close(model(X), base(X))
        with state():
            torch.testing.assert_close(model(X), base(X))


@pytest.mark.parametrize("name", ["grad_fn", "is_leaf", "grad", "_base"])
def test_how_a_tensor_was_computed_is_no_state(name: str) -> None:
    with pytest.raises(peftc.PeftcError, match="P406"):
        peftc.compile(SPEC, network(name), seed=0, sample={"x": X})(X)
