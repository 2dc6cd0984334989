"""Dataclasses and named tuples. There is no `isinstance` here: on a proxy it would add a guard."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn


def is_record(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass, or a named tuple."""
    return _is_record_class(type(value))


@cache
def _is_record_class(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or _is_named_tuple_class(cls)


@cache
def _is_named_tuple_class(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_named_tuple(value: Any) -> bool:
    return _is_named_tuple_class(type(value))


def contents(record: Any) -> dict[str, Any]:
    """What a record holds, by name: its fields, then other attributes."""
    if is_named_tuple(record):
        return dict(zip(type(record)._fields, record, strict=True))
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}
    return {**fields, **{name: value for name, value in getattr(record, "__dict__", {}).items() if name not in fields}}


def constructor_fields(record: Any) -> list[str]:
    """The fields that the constructor of a record takes."""
    named = list(type(record)._fields) if is_named_tuple(record) else []
    return named or [f.name for f in dataclasses.fields(record) if f.init]


def converted(record: Any, convert: Callable[[Any], Any]) -> Any:
    """A record of the same class with each part converted; itself where no part changes."""
    values = {name: convert(value) for name, value in contents(record).items()}
    if all(value is values[name] for name, value in contents(record).items()):
        return record
    copy = type(record)(**{name: values.pop(name) for name in constructor_fields(record) if name in values})
    for name, value in values.items():
        object.__setattr__(copy, name, value)
    return copy


def structure_of(value: Any) -> object:
    """The types of nested values, and what code may ask without their data: how many there are, the
    keys of dictionaries, the rank and the dtype of tensors.
    """
    if isinstance(value, torch.Tensor):
        return "Tensor", value.ndim, value.dtype
    name, parts = type(value).__name__, contents(value) if is_record(value) else value
    if isinstance(parts, dict):
        return name, *((repr(key), structure_of(part)) for key, part in parts.items())
    return (name, *map(structure_of, parts)) if isinstance(parts, (tuple, list)) else name


def record_leaves(value: Any) -> Iterator[Any]:
    """The values in nested containers and records."""
    if is_record(value):
        value = contents(value)
    if issubclass(type(value), (tuple, list, dict)):
        for part in value.values() if issubclass(type(value), dict) else value:
            yield from record_leaves(part)
    else:
        yield value


def mutable_parts(values: Any, operands: Any) -> Iterator[Any]:
    """The lists, dicts and dataclasses in `operands` that traced code made. `values`: the operands
    before their proxies were replaced by what these stand for.
    """
    cls = type(values)
    if is_record(values):
        yield from () if is_named_tuple(values) else (operands,)
        values, operands = contents(values), contents(operands)
    elif issubclass(cls, (list, dict)):
        yield operands
    if issubclass(type(values), dict):
        values, operands = list(values.values()), list(operands.values())
    if issubclass(type(values), (list, tuple)):
        for value, operand in zip(values, operands, strict=True):
            yield from mutable_parts(value, operand)


def identities(part: Any) -> list[tuple[object, int]]:
    """The parts of a list, a dict or a record, as objects."""
    if isinstance(part, list):
        items: Any = enumerate(part)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    else:
        items = part.items() if isinstance(part, dict) else contents(part).items()  # pyright: ignore
    return [(key, id(value)) for key, value in items]


def state_of(value: Any, depth: int = 2) -> list[Any]:
    """What an object and its parts hold, as objects, so that states before and after a call can be
    compared.
    """
    if isinstance(value, (torch.Tensor, nn.Module, type)):
        return []
    if isinstance(value, dict):
        parts: list[Any] = [*value.keys(), *value.values()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        parts = list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return parts if depth == 1 else [*parts, *chain.from_iterable(state_of(part, depth - 1) for part in parts)]


def are_one_state(one: list[Any], other: list[Any]) -> bool:
    """Whether two states hold the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))
