"""The sites of an edit in a plan: ranges of layers, and of networks in them, such as experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_serializer
from pydantic_core import CoreSchema, core_schema

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
        """For each layer its number, the path and the module."""
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


class PlanSites(Sequence[PlanSite]):
    """The sites of an edit, in model order. `ranges` has each kind of site once.

    Attributes:
        ranges: each site is in one of them.
    """

    def __init__(self, ranges: Iterable[PlanSiteRange] = ()) -> None:
        self.ranges = tuple(ranges)

    @cached_property
    def _all(self) -> tuple[PlanSite, ...]:
        def site(path: str, module: str, number: int | None) -> PlanSite:
            if number is None:
                return PlanSite(path=path, module=module)
            return PlanSite(path=path.replace(NUMBER, str(number)), module=module.replace(NUMBER, str(number)))

        networks = {one.path.partition(NUMBER)[0]: i for i, one in reversed([*enumerate(self.ranges)])}
        sites = [
            ((stack, layer, networks[one.path.partition(NUMBER)[0]], number or 0, i), site(path, module, number))
            for i, stack, one in self._by_stack()
            for layer, path, module in one.each_layer()
            for number in _numbers(one.numbers)
        ]
        return tuple(one for _, one in sorted(sites, key=lambda pair: pair[0]))

    def _by_stack(self) -> Iterator[tuple[int, int, PlanSiteRange]]:
        """Each range with its index and that of its stack."""
        stacks: dict[str, int] = {}
        for i, one in enumerate(self.ranges):
            yield i, stacks.setdefault(one.stack, len(stacks)), one

    def patterns(self) -> list[PlanSitePattern]:
        """The sites in model order, those of networks of one layer as one."""
        patterns: list[tuple[tuple[int, int, int], PlanSitePattern]] = []
        for i, stack, one in self._by_stack():
            for layer, path, module in one.each_layer():
                if one.numbers is not None:
                    first, last = one.numbers
                    path = path.replace(NUMBER, f"{first}..{last}")
                    module = module.replace(NUMBER, f"{{{first}..{last}}}")
                pattern = PlanSitePattern(path, module, len(_numbers(one.numbers)))
                patterns.append(((stack, layer, i), pattern))
        return [pattern for _, pattern in sorted(patterns, key=lambda pair: pair[0])]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    @overload
    def __getitem__(self, index: int) -> PlanSite: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PlanSite, ...]: ...
    def __getitem__(self, index: int | slice) -> PlanSite | tuple[PlanSite, ...]:
        return self._all[index]

    def __iter__(self) -> Iterator[PlanSite]:
        return iter(self._all)

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
