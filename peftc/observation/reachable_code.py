"""The code that a forward may run: its functions, and what they read outside of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import repeat
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from peftc.tracing.bytecode import LIBRARIES

_CALLABLES = (FunctionType, MethodType, property)
MOST = 64  # entries of a global dictionary that are compared
_CONSTANTS = (bool, int, float, str)
_LIBRARIES = LIBRARIES | {"peftc"}  # which patches methods of torch while it analyses a model
Read = tuple[Any, str, Any]  # an owner, a name, the value


def reachable_code(cls: type) -> tuple[Any, ...]:
    """The functions that a forward may call, with code and constants; equal until patched."""
    return tuple((function, function.__code__, _constants_of(function)) for function in _reachable_functions(cls))


class CodeReads:
    """What the code of some classes reads outside of modules: global variables, closures, members
    of classes and global objects, entries of global dictionaries. Names are followed, not calls.
    """

    def __init__(self, *reads: Read) -> None:
        self.reads = {(id(owner), name): (owner, name, value) for owner, name, value in reads}
        every = self.reads.values()
        self.in_tables = _columns(read for read in every if isinstance(read[0], dict))
        self.of_objects = _columns(read for read in every if not isinstance(read[0], dict))

    @classmethod
    def of(cls, *classes: type) -> CodeReads:
        return cls(*(read for one in classes for read in _reads_of(one)))

    def are_current(self) -> bool:
        """Whether each read gives the same object. Every call of a model asks."""
        tables, names, values = self.in_tables
        if not all(map(is_, map(dict.get, tables, names), values)):
            return False
        objects, names, values = self.of_objects
        return all(map(is_, map(getattr, objects, names, repeat(None)), values))

    def are_equal(self, others: CodeReads) -> bool:
        """Whether both have the same reads, with equal constants."""
        if self.reads.keys() != others.reads.keys():
            return False
        pairs = ((read[2], others.reads[key][2]) for key, read in self.reads.items())
        return all(a is b or (type(a) is type(b) and isinstance(a, _CONSTANTS) and a == b) for a, b in pairs)


def _columns(reads: Iterator[Read]) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*reads, strict=True)) or ((), (), ())


NO_READS = CodeReads()


def _reads_of(cls: type) -> Iterator[Read]:
    """The owner is a table of globals, or has attributes: a class, a function, a cell."""
    yield cls, "forward", getattr(cls, "forward", None)
    for function in _reachable_functions(cls):
        if _is_of_library(function):
            continue
        yield function, "__code__", function.__code__
        yield from ((cell, "cell_contents", cell.cell_contents) for cell in _cells_of(function))
        own = _globals_of(function)
        yield from ((function.__globals__, name, value) for name, value in own.items())
        small = (table for table in own.values() if isinstance(table, dict) and len(table) <= MOST)
        yield from ((table, name, value) for table in small for name, value in table.items())
        names = _code_names(function.__code__)
        yield from (read for value in own.values() for read in _member_reads(value, names))
        yield from _class_reads(cls, names)


def _member_reads(value: Any, names: Iterable[str]) -> Iterator[Read]:
    """Of a global value: a module, a class, an object. No property of an object is called."""
    if isinstance(value, type):
        yield from _class_reads(value, names)
    elif isinstance(members := getattr(value, "__dict__", None), dict):
        yield from ((members, name, members[name]) for name in names if name in members)
        yield from _class_reads(type(value), names)


def _class_reads(cls: type, names: Iterable[str]) -> Iterator[Read]:
    own = [one for one in cls.__mro__ if not _is_of_library(one)]
    for name in names:
        value = getattr(cls, name, None) if any(name in vars(one) for one in own) else None
        if value is not None and value is getattr(cls, name):  # a class method is new each time
            yield cls, name, value


def _is_of_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _reachable_functions(cls: type) -> list[FunctionType]:
    functions: dict[int, FunctionType] = {}

    def visit(value: Any) -> None:
        value = value.__func__ if isinstance(value, MethodType) else value
        value = value.fget if isinstance(value, property) else value
        if not isinstance(value, FunctionType) or id(value) in functions:
            return
        functions[id(value)] = value
        if _is_of_library(value):
            return
        names = _code_names(value.__code__)
        cells = [cell.cell_contents for cell in _cells_of(value)]
        methods = [getattr(cls, n, None) for n in names]  # names are followed, not calls
        members = (getattr(m, n, None) for m in _modules_of(value) for n in names)
        for inner in (*_globals_of(value).values(), *cells, *methods, *members):
            if isinstance(inner, _CALLABLES):
                visit(inner)

    visit(getattr(cls, "forward", None))
    return list(functions.values())


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """The global variables that a function may read."""
    table = function.__globals__
    return {name: table[name] for name in _code_names(function.__code__) if name in table}


def _constants_of(function: FunctionType) -> tuple[tuple[str, Any], ...]:
    own = _globals_of(function).items()
    return tuple((name, value) for name, value in own if value is None or isinstance(value, _CONSTANTS))


def _modules_of(function: FunctionType) -> list[ModuleType]:
    return [value for value in _globals_of(function).values() if isinstance(value, ModuleType)]


def _cells_of(function: FunctionType) -> list[CellType]:
    return [cell for cell in function.__closure__ or () if cell != CellType()]


@cache
def _code_names(code: CodeType) -> tuple[str, ...]:
    inner = (name for c in code.co_consts if isinstance(c, CodeType) for name in _code_names(c))
    return tuple(dict.fromkeys((*code.co_names, *inner)))
