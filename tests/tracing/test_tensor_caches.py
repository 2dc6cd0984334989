"""What modules keep in dictionaries between calls; sizes of a call in methods of parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.tracing.tracer import RegionTracer
from tests.layers import Layers

D, T = 8, 6
SPEC = """peft 1
edit inside at layer[*].attn.q { h += lora(x, r=2) }
edit beside at layer[*].attn { h += adapter(x, r=4, init=lora) }
"""


class Biased(nn.Module):
    """A bias by positions, with the size of the batch and of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.table = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Parameter(torch.randn(1, T, T))

    def bias(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.o((q @ k.transpose(1, 2) + self.bias(x)).softmax(-1) @ v)


class Cached(Biased):
    """timm: a bias of parameters is computed once for each device, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def bias(self, x: Tensor) -> Tensor:
        if self.training:
            return self.table.flip(1)
        if "bias" not in self.cache:
            self.cache["bias"] = self.table.flip(1)
        return self.cache["bias"]


class ByDevice(Cached):
    def bias(self, x: Tensor) -> Tensor:
        device = str(x.device)
        if device not in self.cache:
            self.cache[device] = self.table.flip(1) if device == "cpu" else self.table
        return self.cache[device]


class BySize(Cached):
    def bias(self, x: Tensor) -> Tensor:
        return self.table if str(x.shape[0]) == "2" else self.table.flip(1)


class Remembered(Cached):
    """The keys of the call before take part."""

    def bias(self, x: Tensor) -> Tensor:
        before = self.cache.get("x", x)
        self.cache["x"] = x
        return before @ x.transpose(1, 2)


class Noted(Cached):
    """Written, and never read."""

    def bias(self, x: Tensor) -> Tensor:
        self.cache["x"] = x
        return self.table


def check(layer: Callable[[], nn.Module]) -> None:
    """Edits act and change nothing else, in training and evaluation, for another batch, too."""
    torch.manual_seed(0)
    model, inputs = Layers(layer(), layer()).double(), [torch.randn(n, T, D, dtype=torch.float64) for n in (2, 3)]
    runs = [(mode, x) for mode in (True, False) for x in inputs]
    base = [model.train(mode)(x).detach() for mode, x in runs]
    peftc.compile(SPEC, model, seed=0, sample={"x": inputs[0]})
    same = [model.train(mode)(x) for mode, x in runs]
    torch.testing.assert_close(same, base, rtol=0, atol=1e-12)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    assert not any(torch.allclose(model.train(mode)(x), one) for (mode, x), one in zip(runs, base, strict=True))


@pytest.mark.parametrize("layer", [Cached, ByDevice, Noted])
def test_tensors_in_a_dictionary_are_computed_anew(layer: Callable[[], nn.Module]) -> None:
    check(layer)


def test_texts_of_sizes_decide() -> None:
    check(BySize)


def test_a_state_of_earlier_calls_is_refused() -> None:
    model = Layers(Remembered(), Remembered())
    reasons = {u.reason for u in peftc.sites(model, sample={"x": torch.randn(2, T, D)}).untraced}
    assert reasons == {"`cache` keeps tensors of earlier calls"}


SIZES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda p, size: p.expand(size, -1, -1),
    "new_zeros": lambda p, size: p.new_zeros(size, T, T) + p,
    "new_ones": lambda p, size: p.new_ones(size, T, T) * p,
    "new_empty": lambda p, size: p.new_empty(size, T, T).fill_(2.0) * p,
}


class Sized(Biased):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def bias(self, x: Tensor) -> Tensor:
        return SIZES[self.method](self.table, x.shape[0])


@pytest.mark.parametrize("method", SIZES)
def test_sizes_of_a_call_in_methods_of_parameters(method: str) -> None:
    check(lambda: Sized(method))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.last: Tensor | None = None
        self.values: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first = y = self.up(x)
        self.values.append(y)
        self.by_name["y"] = y
        return x + y


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_nothing_of_its_own_in_attributes(fails: bool) -> None:
    layer = Keeping()
    layer.by_name["x"] = one = torch.ones(1)
    tracer = RegionTracer(lambda _: True)
    if fails:
        layer.by_name = MappingProxyType({})  # type: ignore[assignment]
        with pytest.raises(TypeError):
            tracer.trace_region(layer, {"x": torch.randn(2, T, D)})
    else:
        tracer.trace_region(layer, {"x": torch.randn(2, T, D)})
        assert layer.by_name == {"x": one}
    assert layer.last is None
    assert layer.values == []
    assert "first" not in vars(layer)
