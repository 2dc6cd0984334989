"""A Linear with LoRA has one backward of its own, where plain tensors are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.runtime.low_rank import LowRankLinear, low_rank_linear
from tests import zoo

FACTOR = 1.5


def operands(has_bias: bool = True, dtype: torch.dtype = torch.float64, **changes: bool) -> list[Any]:
    """x, W, b, A and B. `changes`: which do, or do not, have gradients; W and b have none."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (2, 3, 5), "weight": (7, 5), "bias": (7,), "down": (2, 5), "up": (7, 2)}
    trained = {"x": True, "weight": False, "bias": False, "down": True, "up": True} | changes
    tensors = {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in sizes.items()}
    values = [tensor.requires_grad_(trained[name]) for name, tensor in tensors.items()]
    return values if has_bias else [*values[:2], None, *values[3:]]


def by_operations(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + FACTOR * (x @ down.mT @ up.mT)


def compute(*tensors: Any) -> Tensor:
    return low_rank_linear(*tensors, FACTOR)


def node_of(result: Tensor) -> str:
    return type(result.grad_fn).__name__


@pytest.mark.parametrize(
    "changes",
    [{}, {"weight": True, "bias": True}, {"x": False}, {"down": False}, {"up": False, "down": False}],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_value_and_two_derivatives(has_bias: bool, changes: dict[str, bool]) -> None:
    tensors = operands(has_bias, **changes)
    assert node_of(compute(*tensors)) == LowRankLinear.__name__ + "Backward"
    torch.testing.assert_close(compute(*tensors), by_operations(*tensors), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(compute, tensors)
    assert torch.autograd.gradgradcheck(compute, tensors)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("has_bias", [True, False])
def test_code_may_write_into_the_result(has_bias: bool, tokens: int) -> None:
    x, *others = operands(has_bias)

    def scaled(way: Callable[..., Tensor]) -> Tensor:
        return way(x[:, :tokens], *others).mul_(3.0).add_(1.0)

    torch.testing.assert_close(scaled(compute), scaled(by_operations))
    for one, other in zip(
        *(torch.autograd.grad(scaled(w).square().sum(), [x, *others[2:]]) for w in (compute, by_operations)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_without_gradients_a_large_result_is_one_tensor(has_bias: bool, dtype: torch.dtype) -> None:
    x, *others = operands(has_bias, dtype)
    x = torch.randn(2, 1 << 14, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = compute(x, *others)
    assert "aten::add" not in {event.name for event in profile.events()}
    exact = by_operations(x.double(), *(tensor if tensor is None else tensor.double() for tensor in others))
    bound = {"rtol": 0.02, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result, exact.to(dtype), **bound)
    with torch.no_grad():
        zero = [*others[:-1], torch.zeros_like(others[-1])]
        assert torch.equal(compute(x, *zero), F.linear(x, *zero[:2]))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 3, 5), (2, 2, 3, 5), (0, 3, 5)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_number_of_dimensions(has_bias: bool, shape: tuple[int, ...]) -> None:
    _, *others = operands(has_bias)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(compute(x, *others), by_operations(x, *others))
    one, other = (torch.autograd.grad(way(x, *others).sum(), x)[0] for way in (compute, by_operations))
    torch.testing.assert_close(one, other)


class Transposed(torch.overrides.TorchFunctionMode):
    """Linears whose results are transposed in memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.mT.contiguous().mT if func is F.linear else result


def test_results_of_other_strides() -> None:
    tensors = operands()
    with Transposed():
        result = compute(*tensors)
    assert node_of(result) == LowRankLinear.__name__ + "Backward"
    torch.testing.assert_close(result, by_operations(*tensors))


def test_other_strides() -> None:
    x, *others = operands()
    moved = x.detach().mT.contiguous().mT.requires_grad_()
    assert torch.autograd.gradcheck(compute, [moved, *others])


WAYS: dict[str, Callable[[list[Any]], Tensor]] = {
    "vmap": lambda t: torch.vmap(lambda x: compute(x, *t[1:]))(t[0]),
    "grad": lambda t: torch.func.grad(lambda x: compute(x, *t[1:]).square().sum())(t[0]),
    "jvp": lambda t: torch.func.jvp(lambda x: compute(x, *t[1:]), (t[0],), (torch.ones_like(t[0]),))[1],
    "compiled": lambda t: torch.compile(compute, backend="aot_eager", fullgraph=True)(*t),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward AD imports it
@pytest.mark.parametrize("way", WAYS)
def test_transforms_take_operations(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = operands()
    result = WAYS[way](tensors)
    monkeypatch.setattr("tests.rewriting.test_low_rank.compute", by_operations)
    torch.testing.assert_close(result, WAYS[way](tensors), rtol=1e-12, atol=1e-12)


def test_autocast_takes_operations() -> None:
    tensors = operands(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compute(*tensors)
        assert result.dtype == torch.bfloat16
    assert "LowRank" not in node_of(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    tensors = operands(dtype=dtype)
    exact = by_operations(*(t.detach().double() for t in tensors))
    torch.testing.assert_close(compute(*tensors).double(), exact, rtol=0.02, atol=0.05)
    down, up = tensors[3].detach(), torch.zeros_like(tensors[4]).requires_grad_()
    assert torch.equal(compute(*tensors[:3], down, up), F.linear(*tensors[:3]))  # nothing is trained yet


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_compiled_model_has_it(name: str) -> None:
    model = zoo.build(name, torch.float64)
    peftc.compile("peft 1\n\nedit a at layer[*].attn.q { h += lora(x, r=4, alpha=8) }\n", model, seed=0)
    results: list[Tensor] = []
    sites = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.endswith("q_proj")]
    for site in sites:
        site.register_forward_hook(lambda _m, _i, result: results.append(result))
    model(**zoo.inputs(name, model))
    assert {node_of(result) for result in results} == {LowRankLinear.__name__ + "Backward"}
    assert len(results) == len(sites)
