"""A record is what `dataclass(frozen=True)` makes of the same class."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from peftc.diagnostics.record import record


class Plain:
    """A class of two kinds, with fields that are not compared or not shown."""

    a: int
    b: tuple[int, ...] = ()
    c: str = field(default="c", compare=False, repr=False)
    d: list[int] = field(default_factory=list)
    e: Any = field(default=copy.copy, compare=False, repr=False)


@record()
class Record(Plain):
    __annotations__ = Plain.__annotations__
    b, c, d, e = Plain.b, Plain.c, Plain.d, Plain.e


@dataclass(frozen=True)
class Frozen(Plain):
    __annotations__ = Plain.__annotations__
    b, c, d, e = Plain.b, Plain.c, Plain.d, Plain.e


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, (2,), "x", [3]), {}),
    ((), {"a": 1, "c": "y"}),
    ((1,), {"b": (3,), "d": [4]}),
]
WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {"a": 2}),
    ((1,), {"z": 2}),
    ((1, 2, 3, 4, 5, 6), {}),
]


@pytest.mark.parametrize(("values", "named"), CALLS)
def test_a_record_is_a_frozen_dataclass(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    one, other = Record(*values, **named), Frozen(*values, **named)
    assert repr(one) == repr(other).replace("Frozen", "Record")
    assert [(f.name, getattr(one, f.name)) for f in fields(one)] == [
        (f.name, getattr(other, f.name)) for f in fields(other)
    ]
    assert one == replace(one, c="not compared") != replace(one, a=7)
    assert replace(one, a=7).d == one.d
    assert one.e(5) == 5  # a function, not a method
    assert one != other
    for same in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (same, same.c) == (one, one.c)
    with pytest.raises(FrozenInstanceError):
        one.a = 3
    with pytest.raises(FrozenInstanceError):
        del one.a
    match one:
        case Record(a, b):
            assert (a, b) == (one.a, one.b)


@pytest.mark.parametrize(("values", "named"), WRONG)
def test_wrong_arguments_are_a_type_error(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    for cls in (Record, Frozen):
        with pytest.raises(TypeError):
            cls(*values, **named)


def test_hashes_are_equal_where_records_are() -> None:
    @record()
    class Pair:
        a: int
        b: int = field(default=0, compare=False)

    assert len({Pair(1), Pair(1, 5), Pair(2)}) == 2
