"""What the modules of a model take and return in one call, in the order in which they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from peftc.verification.witness.outputs import Difference, difference, floating

Place = tuple[str, str]


class Event(NamedTuple):
    """The `call`-th call of a module begins (`input`) or is over (`output`); or an edit is about to act at a site."""

    kind: Literal["input", "output"]
    module: str
    call: int


class Recorder:
    """Copies of what modules take and return, by event; `places`: how many events come before the first act of an edit at a site,
    `values`: which tensors it changes.
    """

    def __init__(self) -> None:
        self.events: dict[Event, dict[str, Tensor]] = {}
        self.tensors: dict[Event, list[Tensor]] = {}
        self.places: dict[Place, int] = {}
        self.values: dict[Place, list[Tensor]] = {}

    def mark(self, place: Place, value: Any) -> None:
        self.places.setdefault(place, len(self.events))
        if isinstance(value, Tensor):
            self.values.setdefault(place, []).append(value)

    def add(self, event: Event, value: Any) -> None:
        found = floating(value)
        self.events[event] = {name: tensor.detach().clone() for name, tensor in found.items()}
        self.tensors[event] = list(found.values())

    def before(self, places: Collection[Place]) -> list[Event]:
        """The events before any of these edits acts, without those of the very values that it changes: a module that returns one may
        be where the edit was installed.
        """
        first = min((self.places[place] for place in places if place in self.places), default=0)
        changed = {value.data_ptr() for place in places for value in self.values.get(place, ())}
        return [e for e in list(self.events)[:first] if not any(t.data_ptr() in changed for t in self.tensors[e])]

    def place_before(self, event: Event) -> Place | None:
        """The edit that has acted last before an event."""
        at = list(self.events).index(event)
        acted = {place: number for place, number in self.places.items() if number <= at}
        return max(acted, key=lambda place: acted[place]) if acted else None

    @contextmanager
    def recording(self, model: nn.Module, names: Collection[str]) -> Generator[None]:
        """Records the calls of the named modules inside the block."""
        calls: Counter[tuple[str, str]] = Counter()
        handles: list[Any] = []
        for name, module in model.named_modules():
            if name in names:

                def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    calls["input", name] += 1
                    self.add(Event("input", name, calls["input", name]), (args, kwargs))

                def after(_: nn.Module, args: Any, result: Any, name: str = name) -> None:
                    calls["output", name] += 1
                    self.add(Event("output", name, calls["output", name]), result)

                handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def first_output(
    want: Mapping[Event, Mapping[str, Tensor]],
    got: Mapping[Event, Mapping[str, Tensor]],
    modules: Collection[str],
    end: Event,
) -> Event | None:
    """The first of these modules that returns other values, before an event."""
    for event in takewhile(lambda event: event != end, want):
        both = event.kind == "output" and event.module in modules and event in got
        if both and difference(want[event], got[event]) is not None:
            return event
    return None


def first_difference(
    want: Mapping[Event, Mapping[str, Tensor]], got: Mapping[Event, Mapping[str, Tensor]]
) -> tuple[Event, Difference] | None:
    """Where two runs differ first, among what modules take: outputs may be seen before an edit or behind it."""
    for event, values in want.items():
        if event.kind == "input" and event in got and values.keys() == got[event].keys():
            found = difference(values, got[event])
            if found is not None:
                return event, found
    return None
