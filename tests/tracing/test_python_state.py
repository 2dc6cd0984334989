"""Layers that ask Python itself: sizes as keys and texts, `type`, counters, random numbers.
Edits that change nothing leave each call as it was, or the layer is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers
from tests.specialization.test_variants import kinds

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
SITES = ("layer[*].ffn", "layer[*].ffn.hidden", "layer[*]")
CALLS: list[Any] = []


class Layer(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.function = function
        self.steps, self.started, self.table, self.seen = 0, False, {"n": 0}, 0
        self._steps = 0
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self, x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


@lru_cache
def places(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None]


def cached(layer: Any, x: Tensor) -> Tensor:
    if x.shape[1] > layer.seen:
        layer.seen = x.shape[1]
        layer.places = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
    return x + layer.places[: x.shape[1]]


def count(layer: Any, x: Tensor) -> Tensor:
    layer.steps += 1
    return x * layer.steps


def count_privately(layer: Any, x: Tensor) -> Tensor:
    layer._steps += 1
    return x * layer._steps


def start(layer: Any, x: Tensor) -> Tensor:
    if not layer.started:
        layer.started = True
        return 2 * x
    return x


def count_in_dictionary(layer: Any, x: Tensor) -> Tensor:
    layer.table["n"] += 1
    return x * layer.table["n"]


def count_in_global(layer: Any, x: Tensor) -> Tensor:
    CALLS.append(1)
    return x * len(CALLS)


def stay_in_eval(layer: Any, x: Tensor) -> Tensor:
    layer.eval()
    return nn.functional.dropout(x, 0.5, layer.training)


def count_in_buffer(layer: Any, x: Tensor) -> Tensor:
    layer.calls = layer.calls + 1
    return x * layer.calls


def seeded(layer: Any, x: Tensor) -> Tensor:
    torch.manual_seed(x.shape[1])
    return x + torch.rand_like(x)


KEPT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a size as a key": lambda _, x: x * {5: 2, 4: 3}.get(x.shape[1], 7),
    "sizes as a key": lambda _, x: x * {(2, 5): 2, (2, 4): 3}.get((x.shape[0], x.shape[1]), 7),
    "a size in a set": lambda _, x: x * (2 if x.shape[1] in {5, 6} else 3),
    "a device as a key": lambda _, x: x * {torch.device("cpu"): 2}.get(x.device, 7),
    "a text of a size": lambda _, x: x * {"5": 2, "4": 3}.get(f"{x.shape[1]}", 7),
    "a text of sizes": lambda _, x: x * len(str(tuple(x.shape[:1] * (x.shape[1] - 3)))),
    "a list, repeated": lambda _, x: x * len([1] * x.shape[1]),
    "type of a tensor": lambda _, x: x * (2 if type(x) is Tensor else 3),
    "type of a size": lambda _, x: x * (2 if type(x.shape[1]) is int else 3),
    "class of a tensor": lambda _, x: x * (2 if x.__class__ is Tensor else 3),
    "type of a module": lambda layer, x: x * (2 if type(layer.up) is nn.Linear else 3),
    "round": lambda _, x: x * round(x.shape[1] / 3),
    "divmod": lambda _, x: x * divmod(x.shape[1], 3)[0],
    "inference": lambda _, x: x * (2 if torch.is_inference_mode_enabled() else 3),
    "a number of NumPy": lambda _, x: (
        x.view(*x.shape[:2], int(x.size(-1) / -np.prod([2, -1])), 2).flatten(2) / np.sqrt(D)
    ),
    "a number of NumPy on the left": lambda _, x: np.float64(2) * x + np.float64(3) * x.shape[1],
    "a root of a size": lambda _, x: x / np.sqrt(x.shape[1]) * np.log(x.size(1)),
    "a table of a cache": lambda _, x: x + places(x.shape[1]),
    "a table of an attribute": cached,
}
REFUSED: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "counter": ("sets `steps`", count),
    "flag": ("sets `started`", start),
    "private counter": ("sets `_steps`", count_privately),
    "counter in a dictionary": ("changes `table`", count_in_dictionary),
    "counter in a global list": ("changes `CALLS`", count_in_global),
    "mode": ("sets `training`", stay_in_eval),
    "random": ("draws from Python's `random`", lambda _, x: x * random.random()),
    "NumPy's random": ("draws from `numpy.random`", lambda _, x: x * float(np.random.rand())),
    "seed": ("calls `torch.manual_seed`", seeded),
    "seed, read": ("calls `torch.initial_seed`", lambda _, x: x * (torch.initial_seed() % 2)),
}


@lru_cache
def cooked(pattern: str, sizes: tuple[int, ...], parts: int) -> list[int]:
    """What einops remembers of a pattern and sizes."""
    if sizes[-1] % parts != 0:
        raise ValueError(f"{pattern}: {sizes[-1]} is not divisible by {parts}")
    return [*sizes[:-1], parts, sizes[-1] // parts]


def rearranged(_: Any, x: Tensor) -> Tensor:
    try:
        return x.reshape(cooked("b n (h d) -> b n h d", x.shape, 2)).flatten(2)
    except ValueError as error:
        raise RuntimeError(f"{error}, for an input of {tuple(x.shape)}") from None


def outputs(model: nn.Module) -> list[Tensor]:
    calls = [X, X, X[:, :4], X[:1], 2 * X]
    with torch.no_grad():
        results = [model(x) for x in calls]
    with torch.inference_mode():
        return [*results, model(X).clone()]


@pytest.mark.parametrize("name", KEPT)
def test_code_that_asks_python_for_sizes_and_classes_is_kept(name: str) -> None:
    torch.manual_seed(0)
    model = Layers(Layer(KEPT[name]), Layer(KEPT[name])).eval()
    base = outputs(model)
    for site in SITES:
        peftc.compile(f"peft 1  edit e at {site} {{ h += 0 * adapter(x, r=2) }}", model, seed=0, sample={"x": X})
        for expected, value in zip(base, outputs(model), strict=True):
            torch.testing.assert_close(value, expected)
        peftc.remove(model)


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_depends_on_earlier_calls_is_refused(name: str) -> None:
    reason, function = REFUSED[name]
    model = Layers(Layer(function), Layer(function)).eval()
    untraced = peftc.sites(model, sample={"x": X}).untraced
    assert reason in untraced[-1].reason
    for site in SITES:
        with pytest.raises(peftc.PeftcError, match="P214"):
            peftc.compile(f"peft 1  edit e at {site} {{ h += 0 * adapter(x, r=2) }}", model, sample={"x": X})
    peftc.compile('peft 1  edit e at "layers.*.up" { h += lora(x, r=1) }', model, seed=0, sample={"x": X})
    model(X[:, :3])


def test_a_counter_in_a_buffer_that_is_assigned_counts() -> None:
    torch.manual_seed(0)
    model = Layers(Layer(count_in_buffer), Layer(count_in_buffer)).eval()
    base = deepcopy(model)
    peftc.compile("peft 1  edit e at layer[*].ffn { h += 0 * adapter(x, r=2) }", model, seed=0, sample={"x": X})
    for n in range(1, 4):
        torch.testing.assert_close(model(X), base(X))
        assert [int(buffer) for name, buffer in model.named_buffers() if name.endswith("calls")] == [n, n]


def test_results_that_code_remembers_for_sizes_are_of_all_sizes() -> None:
    model = Layers(Layer(rearranged), Layer(rearranged)).eval()
    model(X[:1])
    peftc.compile("peft 1  edit e at layer[*] { h += 0 * adapter(x, r=2) }", model, seed=0, sample={"x": X[:1]})
    counts = list[int]()
    for x in (X, X[:, :4], X[:, :3]):
        model(x)
        counts.append(sum(len(kind.variants) for kind in kinds(model)))
    assert len({*counts}) == 1
    for batch, length in ((1, 5), (2, 5), (2, 4)):
        assert cooked("b n (h d) -> b n h d", (batch, length, D), 2) == [batch, length, 2, D // 2]
        assert all(type(n) is int for n in cooked("b n (h d) -> b n h d", (batch, length, D), 2))


@lru_cache(maxsize=1)
def decay(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.linspace(0, 1, size, dtype=dtype, device=device)


@pytest.mark.parametrize("runs_before", [False, True])
def test_what_functions_remember_has_data(runs_before: bool) -> None:
    """Sizes, dtypes and devices are those of a run without data, too."""
    decay.cache_clear()
    model = Layers(*(Layer(lambda _, x: x * decay(D, x.dtype, x.device)) for _ in range(2)))
    function = decay
    expected = model(X) if runs_before else None
    peftc.sites(model, sample={"x": X})
    assert decay is function
    assert decay.cache_info().currsize == runs_before
    expected = model(X) if expected is None else expected
    peftc.compile("peft 2\nedit e at layer[*].ffn { h += lora(x, r=2) }", model, seed=0, sample={"x": X})
    assert type(decay(D, X.dtype, X.device)) is Tensor
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(model(X[:, :3]), peftc.remove(model)(X[:, :3]))


MASKS: dict[int, Tensor] = {}
LAST: Tensor | None = None


class Shared:
    tables: ClassVar[dict[int, Tensor]] = {}
    rows: ClassVar[list[Tensor]] = []


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]


def in_dictionary(_: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in MASKS:
        MASKS[x.shape[1]] = _positions(x)
    return x + MASKS[x.shape[1]]


def in_variable(_: Any, x: Tensor) -> Tensor:
    global LAST
    if LAST is None or len(LAST) != x.shape[1]:
        LAST = _positions(x)
    return x + LAST


def in_class(_: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in Shared.tables:
        Shared.tables[x.shape[1]] = _positions(x)
        Shared.rows.append(_positions(x))
        Shared.last = _positions(x)  # type: ignore[attr-defined]
    return x + Shared.tables[x.shape[1]] + Shared.last  # type: ignore[attr-defined]


def in_function(_: Any, x: Tensor) -> Tensor:
    if not hasattr(in_function, "positions"):
        in_function.positions = _positions(x)  # type: ignore[attr-defined]
    return x + in_function.positions[: x.shape[1]]  # type: ignore[attr-defined]


def global_state() -> tuple[Any, ...]:
    """What the functions above have left."""
    tables = (len(MASKS), len(Shared.tables), len(Shared.rows))
    return (*tables, LAST is None, hasattr(Shared, "last"), hasattr(in_function, "positions"))


@pytest.mark.parametrize("function", [in_dictionary, in_variable, in_class, in_function])
def test_global_variables_keep_no_tensor_without_data(function: Any) -> None:
    model = Layers(Layer(function), Layer(function))
    before = global_state()
    peftc.sites(model, sample={"x": X})
    assert global_state() == before
    peftc.compile('peft 2 edit e at "layers.*.up" { h += lora(x, r=1) }', model, seed=0, sample={"x": X})
    assert global_state() == before
    assert type(model(X)) is Tensor
    torch.testing.assert_close(model(X), peftc.remove(model)(X))
