"""Records the inputs and outputs of modules in one call of a model, in order of execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from peftc.verification.reference.locations import EditKey
from peftc.verification.reference.outputs import first_difference, floating_tensors


class CallEvent(NamedTuple):
    """The beginning (`input`) or the end (`output`) of call number `call` of a module."""

    kind: Literal["input", "output"]
    module: str
    call: int


Activations = Mapping[CallEvent, Mapping[str, Tensor]]


class Recorder:
    """Copies of module inputs and outputs, by event.

    `edit_positions`: the number of events before an edit first acts at a site. `edit_inputs`: the
    tensors that it changes.
    """

    def __init__(self) -> None:
        self.events: dict[CallEvent, dict[str, Tensor]] = {}
        self.tensors: dict[CallEvent, list[Tensor]] = {}
        self.edit_positions: dict[EditKey, int] = {}
        self.edit_inputs: dict[EditKey, list[Tensor]] = {}

    def record_edit(self, key: EditKey, value: Any) -> None:
        self.edit_positions.setdefault(key, len(self.events))
        if isinstance(value, Tensor):
            self.edit_inputs.setdefault(key, []).append(value)

    def record(self, event: CallEvent, value: Any) -> None:
        tensors = floating_tensors(value)
        self.events[event] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.tensors[event] = list(tensors.values())

    def events_before(self, keys: Collection[EditKey]) -> list[CallEvent]:
        """The events before the first of these edits acts.

        Events of the tensors that the edits change are left out: the module that returns such a
        tensor may be the one that was rewritten.
        """
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
