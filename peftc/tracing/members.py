"""What code reads and writes of Python's values in modules, and in objects that modules hold.

The code of a block rests on them. A number is an `Attribute`, which the graph reads at each call.
Of other constants and small collections the value is guarded. Objects, such as configurations,
report what the code reads in them.
"""

from __future__ import annotations

from abc import ABCMeta
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from transformers import PretrainedConfig

from peftc.tracing.bytecode import reading_instruction
from peftc.tracing.patches import INSTRUMENTED, PLAIN, is_member
from peftc.tracing.proxy import Attribute, attribute_proxy, contains_proxy, is_proxy
from peftc.tracing.region_trace import Absent, TraceError
from peftc.tracing.tracer_base import TracerBase, current_tracer

MOST_ENTRIES = 64  # of a collection whose value is guarded
_COLLECTIONS: Any = (dict, list, tuple, set, frozenset)  # equal to those of derived classes
_SIMPLE = frozenset({bool, int, float, str, bytes, type(None)})
_ATOMS = (type, Enum, FunctionType, BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_NO_OBJECTS = (type, Enum, nn.Module, torch.Tensor, fx.Proxy, ModuleType, Exception)


class _NoConstantError(Exception):
    """A value has a part that is no constant."""


class _Plain:
    """The base of a class while it is made."""


def constant_copy(value: Any) -> Any:
    """A copy of a constant or of a small collection of some; `Absent` where a value is no such."""
    if type(value).__module__.startswith("peftc."):  # what a trace has put there
        return Absent
    try:
        return _constant(value) if _size(value) <= MOST_ENTRIES else Absent
    except _NoConstantError:
        return Absent


def _size(value: Any) -> int:
    if not isinstance(value, _COLLECTIONS) or is_proxy(value):
        return 1
    parts = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(_size, parts)) if len(value) <= MOST_ENTRIES else len(value)


def _constant(value: Any) -> Any:
    kind: Any = type(value)
    collection = next((one for one in _COLLECTIONS if isinstance(value, one)), None)
    if collection is not None and not is_proxy(value):
        if collection is dict:
            return {_constant(k): _constant(v) for k, v in value.items()}
        return collection(map(_constant, value))
    if isinstance(value, np.generic):
        return _constant(value.item())
    if (kind in _SIMPLE and value == value) or (isinstance(value, _ATOMS) and not is_proxy(value)):
        return value
    raise _NoConstantError


def are_equal(own: Any, value: Any) -> bool:
    """Whether code does with one value what it does with another, which it has read in a trace."""
    if own is Absent or value is Absent:
        return own is value
    if isinstance(value, PretrainedConfig):
        return bool(own == value)
    if isinstance(value, FunctionType):
        return isinstance(own, FunctionType) and _parts(own) == _parts(value)
    return constant_copy(own) == value


def _parts(function: FunctionType) -> list[Any]:
    """What a function consists of: constants, and other objects by their `id`."""
    cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # which is empty
    values = [function.__defaults__, function.__kwdefaults__, *(cell.cell_contents for cell in cells)]
    copies = [(value, constant_copy(value)) for value in values]
    return [function.__code__, *(id(value) if copy is Absent else copy for value, copy in copies)]


@cache
def _reporting_class(cls: type) -> type:
    """A subclass that reports reads and writes of members to the current tracer.

    Raises: TypeError for a class of which there can be none.
    """
    if type(cls) not in (type, ABCMeta):
        raise TypeError(cls)
    parent: Any = cls

    def __getattribute__(self: Any, name: str) -> Any:
        value = parent.__getattribute__(self, name)
        tracer = current_tracer()
        if tracer is None or name[:2] == "__" or (type(value) not in PLAIN and not is_member(self, name)):
            return value
        return tracer.read_object(self, name, value)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        tracer = current_tracer()
        if tracer is not None:
            tracer.write_object(self, name, value)
        parent.__setattr__(self, name, value)

    members: dict[str, Any] = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, INSTRUMENTED: cls}
    if hasattr(cls, "__getattr__"):

        def __getattr__(self: Any, name: str) -> Any:
            value = parent.__getattr__(self, name)
            tracer = current_tracer()
            return value if tracer is None or name[:2] == "__" else tracer.read_object(self, name, value)

        members["__getattr__"] = __getattr__
    members |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__", "__hash__")}
    if not any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1]):
        return type(cls)(cls.__name__, (cls,), members)
    new = type(cls)(cls.__name__, (_Plain,), members)
    new.__bases__ = (cls,)  # which calls no `__init_subclass__`: code of a model's own, perhaps a registry
    return new


class ReportingObjects:
    """Objects of a model's own classes that modules hold, such as configurations. Inside, those
    that the code has read report what it reads in them.

    Attributes:
        paths: where each is, by its `id`: `blocks.0.cfg`.
    """

    def __init__(self, tracer: TracerBase) -> None:
        self.tracer = tracer
        self.paths: dict[int, str] = {}
        self.classes: list[tuple[object, type]] = []
        self.before: list[tuple[object, dict[str, Any]]] = []  # what they held

    def enter(self, path: str, value: object) -> None:
        """Lets an object report, or guards all of one whose class cannot be changed."""
        cls = type(value)
        if id(value) in self.paths or isinstance(value, _NO_OBJECTS) or is_proxy(value):
            return
        if cls.__module__.partition(".")[0] in ("torch", "peftc", "builtins"):
            return
        self.before.append((value, _members_of(value)))
        if not hasattr(value, "__dict__"):
            return
        try:
            object.__setattr__(value, "__class__", _reporting_class(cls))
        except TypeError:
            if (members := constant_copy(dict(vars(value)))) is not Absent:
                self.tracer.attribute_guards[path, "__dict__"] = members
            return
        self.paths[id(value)] = path
        self.classes.append((value, cls))

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: object, *_: object) -> None:
        """Takes out the proxies that code has put into objects."""
        while self.classes:
            value, cls = self.classes.pop()
            object.__setattr__(value, "__class__", cls)
        left: list[tuple[object, str, Any]] = []
        while self.before:
            value, before = self.before.pop()
            for name, member in _members_of(value).items():
                if member is before.get(name) or not contains_proxy(member):
                    continue
                left.append((value, name, member))
                if name in before:
                    object.__setattr__(value, name, before[name])
                else:
                    object.__delattr__(value, name)
        for one in left if error is None else ():
            self.tracer.note_left(*one)


def _members_of(value: object) -> dict[str, Any]:
    """Those in its dictionary and in its slots."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = {name for own in slots for name in ((own,) if isinstance(own, str) else own)} - {"__dict__", "__weakref__"}
    members = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return members | getattr(value, "__dict__", {})


class MemberTracer(TracerBase):
    """Sees what code reads and writes of the values in modules, and of objects in these."""

    def __init__(self, path_prefix: tuple[bool, ...] = ()) -> None:
        super().__init__(path_prefix)
        self.reads, self.writes = set[tuple[str, str]](), set[tuple[str, str]]()  # by Python
        self.numbers_read: list[Attribute] = []
        self.objects = ReportingObjects(self)

    def read_attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        owner = self.module_names.get(id(module))
        if owner is None or (owner, name) in self.writes:  # this call has written the value
            return value
        if value is None or isinstance(value, str):
            self.note_read(owner, name)
            return self.read_module_option(owner, name, value)
        return self.read_member(owner, name, value)

    def read_object(self, value: object, name: str, member: Any) -> Any:
        owner = self.objects.paths.get(id(value))
        if owner is None or (owner, name) in self.writes:
            return member
        if member is None or isinstance(member, str):
            self.note_read(owner, name)
            return self.read_option(owner, name, member)
        return self.read_member(owner, name, member)

    def read_module_option(self, owner: str, name: str, value: str | None) -> Any:
        """A text or None that a module holds: blocks that share a trace have the same."""
        return value

    def read_option(self, owner: str, name: str, value: str | None) -> Any:
        """A text or None that an object holds."""
        self.attribute_guards[owner, name] = value
        return value

    def read_member(self, owner: str, name: str, value: Any) -> Any:
        """Any other value that a module or an object holds."""
        if isinstance(value, Attribute) or is_proxy(value):  # which the code has put there
            return value
        path = f"{owner}.{name}".lstrip(".")
        if type(value) in PLAIN:
            self.note_read(owner, name)
        if type(value) in (int, float) or name == "training":
            attribute = attribute_proxy(value, path, self, reading_instruction())
            self.numbers_read.append(attribute)
            return attribute
        if (constant := constant_copy(value)) is not Absent:
            self.attribute_guards[owner, name] = constant
        elif isinstance(value, PretrainedConfig):
            self.read_configuration(owner, name, value)
        else:
            self.objects.enter(path, value)
        return value

    def read_configuration(self, owner: str, name: str, value: PretrainedConfig) -> None:
        """A configuration of transformers: blocks that share a trace have equal ones."""
        self.attribute_guards[owner, name] = value

    def note_absence(self, module: nn.Module, name: str) -> None:
        owner = self.module_names.get(id(module))
        if owner is not None and self.recording:
            self.attribute_guards[owner, name] = Absent

    def note_read(self, owner: str, name: str) -> None:
        if self.recording:
            self.reads.add((owner, name))

    def write_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        owner = self.module_names.get(id(module))
        if owner is not None and type(value) in PLAIN and not contains_proxy(value):
            self.note_write(owner, name, vars(module).get(name, nn.Module), value)

    def write_object(self, written: object, name: str, value: Any) -> None:
        owner = self.objects.paths.get(id(written))
        if owner is not None and not contains_proxy(value):
            self.note_write(owner, name, vars(written).get(name, nn.Module), value)

    def note_write(self, owner: str, name: str, old: Any, value: Any) -> None:
        if not self.recording:
            return
        if name == "training":  # another call may find another value
            self.reject_write(name)
        if (type(old), old) != (type(value), value):
            self.writes.add((owner, name))
            if (owner, name) in self.reads:
                self.reject_write(name)

    def reject_write(self, name: str) -> None:
        """Raises: TraceError for a counter, or a flag that says what an earlier call has done."""
        raise TraceError(f"its code sets `{name}`, which it depends on, and a graph sets no attributes")

    def guard_numbers(self) -> None:
        """Guards the numbers that Python has used, or may have."""
        for number in self.numbers_read:
            if number.is_used_by_python:
                owner, _, name = number.path.rpartition(".")
                self.attribute_guards[owner, name] = number.value
