"""`with` blocks are preserved: an operation inside one runs inside the same one in the generated
code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.specialization.generated_class import GeneratedClass
from peftc.tracing.region_trace import TraceError
from peftc.tracing.tracer import RegionTracer


class Layer(nn.Module):
    """A layer with this function as its forward."""

    body: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(4, 4))


def layer(body: Callable[..., Tensor]) -> Any:
    """A layer with a class of its own, and the same with a generated forward."""

    class Own(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return body(self, x)

    base, generated = Own(), Own()
    generated.__class__ = GeneratedClass(Own, frozenset({""}), (), "Own").cls
    return base, generated


def code(module: Any) -> str:
    return type(module)._peftc_kind.source


def in_float32(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(device_type=x.device.type, enabled=False):
        y = self.linear(x.float()) @ self.scale
    return self.linear(y)


def constant_in_float32(self: Any, x: Tensor) -> Tensor:
    before = self.table @ self.table
    with torch.autocast("cpu", enabled=False):
        table = self.table @ self.table
    after = self.table @ self.table
    return x.to(table.dtype) @ table + (x @ before) * (x @ after)


def in_bfloat16(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x)


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.linear(x)
        with torch.enable_grad():
            differentiable = self.linear(x)
    with torch.set_grad_enabled(False):
        off = x * self.scale[0]
    return x * scale + differentiable + off


@torch.no_grad()
def helper(x: Tensor) -> Tensor:
    return x * 3


def decorated_helper(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) + helper(self.linear(x))


def querying_torch(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if torch.is_autocast_enabled("cpu") else x * self.scale[0]


def querying_grad_mode(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if torch.is_grad_enabled() else x * self.scale[0]


def answered_by_the_block(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.linear(x) if torch.is_grad_enabled() else x * self.scale[0]


def caught(self: Any, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            x = self.linear(x)
            raise ValueError
    except ValueError:
        return x * self.scale[0]


BODIES = (
    in_float32,
    constant_in_float32,
    in_bfloat16,
    without_gradient,
    decorated_helper,
    querying_torch,
    querying_grad_mode,
    answered_by_the_block,
    caught,
)


def outcome(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients where there are any."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    if out.requires_grad:
        out.float().sum().backward()
    return [out, *(p.grad for p in (x, *module.parameters()) if p.grad is not None)]


@pytest.mark.parametrize("body", BODIES)
def test_generated_code_computes_what_the_code_computes(body: Callable[..., Tensor]) -> None:
    base, generated = layer(body)
    x = torch.randn(3, 4)
    surroundings: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        contextlib.nullcontext,
    ]
    for around in surroundings:
        with around():
            want, got = outcome(base, x), outcome(generated, x)
        assert [t.dtype for t in got] == [t.dtype for t in want]
        assert all(map(torch.equal, got, want)), code(generated)
        assert torch.is_grad_enabled()


def test_blocks_are_printed_as_blocks() -> None:
    _, generated = layer(without_gradient)
    generated(torch.randn(3, 4))
    lines = code(generated).splitlines()
    heads = [line for line in lines if line.lstrip().startswith("with ")]
    assert [line.strip() for line in heads] == [
        "with torch.no_grad():",
        "with torch.enable_grad():",
        "with torch.set_grad_enabled(False):",
    ]
    assert [len(line) - len(line.lstrip()) for line in heads] == [4, 8, 4]
    assert not any("entered" in line or "left" in line for line in lines)


def test_a_query_of_torchs_state_is_a_guard() -> None:
    _, generated = layer(querying_torch)
    x = torch.randn(3, 4)
    variants = type(generated)._peftc_kind.variants
    for count in (1, 1):
        generated(x)
        assert len(variants) == count
    with torch.autocast("cpu", torch.bfloat16):
        generated(x)
    assert len(variants) == 2
    assert "not torch.is_autocast_enabled('cpu')" in variants[0].conditions
    assert "torch.is_autocast_enabled('cpu')" in variants[1].conditions


def test_blocks_in_one_graph() -> None:
    base, generated = layer(in_float32)
    x = torch.randn(3, 4)
    generated(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(generated, backend="eager", fullgraph=True)(x), base(x))
    torch._dynamo.reset()


def test_tracing_undoes_permanent_changes_of_global_state() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return self.linear(x)

    _, generated = layer(body)
    x = torch.randn(3, 4)
    with torch.enable_grad():
        RegionTracer(lambda name: False).trace_region(layer(body)[0], {"x": x})
        assert torch.is_grad_enabled()
        assert not generated(x).requires_grad
        assert not torch.is_grad_enabled()


def refused(body: Callable[..., Tensor], match: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(TraceError, match=match):
        RegionTracer(lambda name: True).trace_region(layer(body)[0], {"x": mode.from_tensor(torch.randn(3, 4))})


def test_a_module_with_an_unsupported_block_is_not_inlined() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.linear(x)

    refused(body, "inference_mode")
    assert torch.inference_mode.__enter__.__qualname__ == "inference_mode.__enter__"
    assert torch.no_grad.__enter__.__qualname__ == "no_grad.__enter__"
    assert "__init__" not in vars(torch.enable_grad)


def test_two_exits_of_a_block_are_refused() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(x) if x.sum() > 0 else x

    refused(body, "inside of a `with` block")


def test_a_decorated_forward_is_not_inlined() -> None:
    class Child(nn.Module):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child()

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    x = torch.randn(3, 4)
    RegionTracer(lambda name: False).trace_region(Parent(), {"x": x})
    with pytest.raises(TraceError, match="decorated"):
        RegionTracer(lambda name: True).trace_region(Parent(), {"x": x})
