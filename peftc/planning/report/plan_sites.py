"""The sites of an edit in a plan: ranges of layers, and of networks in them, such as experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_serializer
from pydantic_core import CoreSchema, core_schema

from peftc.addressing.lazy_sequence import LazySequence

LAYER, NUMBER = "{layer}", "{number}"  # where a range has its numbers
_LAYER_PATH = re.compile(r"(.*?\blayer)\[(\d+)\]")


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanSite(Record):
    """A site of an edit.

    Attributes:
        path: such as `encoder.layer[0].attn.self`.
        module: the dotted name of the module that computes it.
    """

    path: str
    module: str


class PlanSiteRange(Record):
    """Sites of an edit that differ in numbers alone: one for each layer, and each number in it.

    Attributes:
        path: of the sites, with `{layer}` and `{number}` in the place of numbers.
        module: the same of their modules. Slices of one parameter are of one module.
        layers: the first and the last layer; None where `path` has its layer, or is in none.
        numbers: the first and the last number of a network, such as an expert; else None.
    """

    path: str
    module: str
    layers: tuple[int, int] | None = None
    numbers: tuple[int, int] | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}

    def __len__(self) -> int:
        return len(_numbers(self.layers)) * len(_numbers(self.numbers))

    def each_layer(self) -> Iterator[tuple[int, str, str]]:
        """For each layer its number, the path and the module. It is -1 where a path has none."""
        match = None if self.layers else _LAYER_PATH.match(self.path)
        for layer in _numbers(self.layers):
            if layer is None:
                yield (-1 if match is None else int(match.group(2))), self.path, self.module
            else:
                yield layer, self.path.replace(LAYER, str(layer)), self.module.replace(LAYER, str(layer))

    @property
    def first_path(self) -> str:
        """The path of the first of the sites."""
        layer, number = ((0 if ends is None else ends[0]) for ends in (self.layers, self.numbers))
        path = self.path.replace(LAYER, str(layer)) if self.layers else self.path
        return path.replace(NUMBER, str(number)) if self.numbers else path

    @property
    def stack(self) -> str:
        """What is before the number of the layer; the path itself outside of layers."""
        match = _LAYER_PATH.match(self.path.replace(LAYER, "0") if self.layers else self.path)
        return self.path if match is None else match.group(1)


class PlanSitePattern(NamedTuple):
    """The sites of one layer that differ in the number of their network: `experts[0..7].up`."""

    path: str
    module: str
    total: int


def _before(number: int, module: str) -> str:
    """What is before a number in a dotted name; nothing where it is not there."""
    before, part, _ = f"{module}.".partition(f".{number}.")
    return f"{before}." if part else ""


class PlanSites(LazySequence[PlanSite]):
    """The sites of an edit, in model order. `ranges` has each kind of site once.

    Attributes:
        ranges: each site is in one of them.
    """

    def __init__(self, ranges: Iterable[PlanSiteRange] = ()) -> None:
        self.ranges = tuple(ranges)

    def _make(self) -> Iterable[PlanSite]:
        def site(path: str, module: str, number: int | None) -> PlanSite:
            if number is None:
                return PlanSite(path=path, module=module)
            return PlanSite(path=path.replace(NUMBER, str(number)), module=module.replace(NUMBER, str(number)))

        sites: list[tuple[tuple[int, ...], PlanSite]] = []
        networks: dict[tuple[int, str], int] = {}  # the order of the first site of the networks of a stack
        for (stack, layer, order), one, path, module in self._by_layer():
            first = order if one.numbers is None else networks.setdefault((stack, one.path.partition(NUMBER)[0]), order)
            for number in _numbers(one.numbers):
                sites.append(((stack, layer, first, number or 0, order), site(path, module, number)))
        return tuple(one for _, one in sorted(sites, key=lambda pair: pair[0]))

    @cached_property
    def _stacks(self) -> dict[str, int]:
        """The stacks in model order, by their path and by what their layers' modules begin with."""
        stacks: dict[str, int] = {}
        for one in self.ranges:
            layer, _, module = next(one.each_layer())
            prefix = one.module.partition(LAYER)[0] if one.layers else _before(layer, module)
            number = next((stacks[name] for name in (prefix, one.stack) if name in stacks), len(stacks))
            stacks.setdefault(one.stack, number)
            stacks.setdefault(prefix or one.stack, number)
        return stacks

    def _by_layer(self) -> Iterator[tuple[tuple[int, int, int], PlanSiteRange, str, str]]:
        """For each layer of each range its place in the model, the range, the path and the module.

        A place is a stack, a layer and the order in a layer: that of the first with this path.
        """
        orders: dict[str, int] = {}
        for i, one in enumerate(self.ranges):
            for layer, path, module in one.each_layer():
                stack, layer = (self._stacks[one.stack], layer) if layer >= 0 else self._layer_of(one, module)
                alike = one.path if one.layers else re.sub(rf"(?<=[.\[]){layer}(?=[.\]])", LAYER, one.path, count=1)
                yield (stack, layer, orders.setdefault(alike, i)), one, path, module

    def _layer_of(self, one: PlanSiteRange, module: str) -> tuple[int, int]:
        """The stack and the layer of a module that a spec names; -1 outside of layers."""
        numbers = [int(part) for part in module.split(".") if part.isdecimal()]
        names = ((_before(number, module), number) for number in numbers)
        own = ((self._stacks[name], number) for name, number in names if name in self._stacks)
        return next(own, (self._stacks[one.stack], -1))

    def patterns(self) -> list[PlanSitePattern]:
        """The sites in model order, those of networks of one layer as one."""
        patterns: list[tuple[tuple[int, int, int], PlanSitePattern]] = []
        for place, one, path, module in self._by_layer():
            if one.numbers is not None:
                first, last = one.numbers
                path = path.replace(NUMBER, f"{first}..{last}")
                module = module.replace(NUMBER, f"{{{first}..{last}}}")
            patterns.append((place, PlanSitePattern(path, module, len(_numbers(one.numbers)))))
        return [pattern for _, pattern in sorted(patterns, key=lambda pair: pair[0])]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __eq__(self, other: object) -> bool:
        return self.ranges == other.ranges if isinstance(other, PlanSites) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        return f"PlanSites({list(self.ranges)!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In data, the list of ranges."""
        ranges = core_schema.no_info_after_validator_function(cls, handler(tuple[PlanSiteRange, ...]))
        return core_schema.json_or_python_schema(
            json_schema=ranges,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), ranges]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda sites: [one.model_dump() for one in sites.ranges]
            ),
        )


def _numbers(ends: tuple[int, int] | None) -> Sequence[int | None]:
    return (None,) if ends is None else range(ends[0], ends[1] + 1)
