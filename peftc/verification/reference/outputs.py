"""Tensors in the inputs and outputs of modules, and the tolerances by which they are compared."""

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from peftc.forms.module import seeded
from peftc.verification.reference.locations import EditKey

# Relative to the largest absolute value of a tensor.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
GRADIENT_FACTOR = 20.0  # a gradient sums more terms than an output


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dictionaries, tuples and lists by path. Caches are skipped."""
    if isinstance(value, Tensor):
        yield path or "result", value
    elif isinstance(value, Mapping):
        for name, part in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from named_tensors(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from named_tensors(part, f"{path}[{i}]")


def first_tensor(value: Any) -> Tensor | None:
    return next((tensor for _, tensor in named_tensors(value)), None)


def with_first_tensor(value: Any, tensor: Tensor | None) -> Any:
    if first_tensor(value) is None:
        return value
    if isinstance(value, Tensor):
        return tensor
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
    key, part = next((key, part) for key, part in items if first_tensor(part) is not None)
    result: Any = list(value) if isinstance(value, tuple) else copy(value)
    result[key] = with_first_tensor(part, tensor)
    return tuple(result) if isinstance(value, tuple) else result


def floating_tensors(value: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(value) if tensor.is_floating_point()}


def model_outputs(result: Any) -> dict[str, Tensor]:
    """The floating-point tensors that a model returns, without its cache."""
    return {name: t for name, t in floating_tensors(result).items() if not name.startswith("past_key_values")}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs by more than its tolerance."""

    name: str
    size: float  # the largest absolute difference
    scale: float  # the largest absolute value
    bound: float  # the largest difference that is allowed

    def __str__(self) -> str:
        return f"`{self.name}` differs by {self.size:.3g} where the largest value is {self.scale:.3g}"


def first_difference(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], factor: float = 1.0
) -> Difference | None:
    """The first tensor that differs by more than `factor` times what its dtype allows."""
    for name, first in expected.items():
        second = actual.get(name)
        if second is None or second.shape != first.shape:
            return Difference(name, float("inf"), 0.0, 0.0)
        if not first.is_floating_point() or not factor:
            if not torch.equal(first.nan_to_num(), second.nan_to_num()):
                return Difference(name, max_difference(first, second), max_abs(first), 0.0)
            continue
        scale = max_abs(first)
        bound = factor * TOLERANCE.get(first.dtype, 1e-4) * max(scale, 1e-6)
        if (size := max_difference(first, second)) > bound or size != size:
            return Difference(name, size, scale, bound)
    return None


def max_difference(first: Tensor, second: Tensor) -> float:
    """The largest absolute difference. Entries that are finite in neither tensor are ignored."""
    a, b = first.detach().double(), second.detach().double()
    where = a.isfinite() | b.isfinite()
    return (a - b)[where].abs().max().item() if bool(where.any()) else 0.0


def max_abs(value: Tensor) -> float:
    values = value.detach().double()
    values = values[values.isfinite()]
    return values.abs().max().item() if values.numel() else 0.0


def random_projection(outputs: Mapping[str, Tensor]) -> Tensor | None:
    """A fixed random linear function of all outputs, or None if no output requires a gradient."""
    total: Tensor | None = None
    for name, value in outputs.items():
        if value.requires_grad:
            weights = torch.randn(value.shape, generator=seeded(name)).to(value.device, value.dtype)
            part = torch.where(value.isfinite(), value * weights, 0.0).sum() / max(1, value.numel()) ** 0.5
            total = part if total is None else total + part
    return total


class CallEvent(NamedTuple):
    """The beginning (`input`) or the end (`output`) of call number `call` of a module."""

    kind: Literal["input", "output"]
    module: str
    call: int


Activations = Mapping[CallEvent, Mapping[str, Tensor]]


class Recorder:
    """Copies of module inputs and outputs, by event."""

    def __init__(self) -> None:
        self.events: dict[CallEvent, dict[str, Tensor]] = {}
        self.tensors: dict[CallEvent, list[Tensor]] = {}
        self.edit_positions: dict[EditKey, int] = {}  # the number of events before an edit first acts at a site
        self.edit_inputs: dict[EditKey, list[Tensor]] = {}  # the tensors that it changes

    def record_edit(self, key: EditKey, value: Any) -> None:
        self.edit_positions.setdefault(key, len(self.events))
        if isinstance(value, Tensor):
            self.edit_inputs.setdefault(key, []).append(value)

    def record(self, event: CallEvent, value: Any) -> None:
        tensors = floating_tensors(value)
        self.events[event] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.tensors[event] = list(tensors.values())

    def events_before(self, keys: Collection[EditKey]) -> list[CallEvent]:
        """The events before the first of these edits acts, without those of tensors it changes."""
        # The module that returns such a tensor may be the one that was rewritten.
        end = min((self.edit_positions[key] for key in keys if key in self.edit_positions), default=0)
        changed = {value.data_ptr() for key in keys for value in self.edit_inputs.get(key, ())}
        return [e for e in list(self.events)[:end] if not any(t.data_ptr() in changed for t in self.tensors[e])]

    def last_edit_before(self, event: CallEvent) -> EditKey | None:
        index = list(self.events).index(event)
        positions = {key: position for key, position in self.edit_positions.items() if position <= index}
        return max(positions, key=lambda key: positions[key]) if positions else None

    @contextmanager
    def recording(self, model: nn.Module, names: Collection[str]) -> Generator[None]:
        calls: Counter[tuple[str, str]] = Counter()
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name not in names:
                    continue

                def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    calls["input", name] += 1
                    self.record(CallEvent("input", name, calls["input", name]), (args, kwargs))

                def after(_: nn.Module, args: Any, result: Any, name: str = name) -> None:
                    calls["output", name] += 1
                    self.record(CallEvent("output", name, calls["output", name]), result)

                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            yield


def first_differing_output(
    expected: Activations, actual: Activations, modules: Collection[str], end: CallEvent
) -> CallEvent | None:
    """The first output of one of these modules that differs, before the event `end`."""
    events = (e for e in takewhile(lambda e: e != end, expected) if e.kind == "output" and e.module in modules)
    return next((e for e in events if e in actual and first_difference(expected[e], actual[e]) is not None), None)


def first_differing_input(expected: Activations, actual: Activations) -> CallEvent | None:
    """The first module input that differs. A hook may see outputs before or after an edit."""
    events = (e for e in expected if e.kind == "input" and e in actual and expected[e].keys() == actual[e].keys())
    return next((e for e in events if first_difference(expected[e], actual[e]) is not None), None)
