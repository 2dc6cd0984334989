"""Finds the layers of a model that repeat another one: elements of lists that are equal but for the
values of tensors, and for numbers such as the index of a layer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from peftc.modules.instance_forward import FORWARD
from peftc.modules.memory import Memory, memory_of, overlapping_pieces
from peftc.modules.module_rows import ModuleRows, Span
from peftc.modules.torch_attributes import TABLES, getter

IMMUTABLE = frozenset({bool, int, float, str, type(None), type, torch.dtype, torch.device})
COPY_METHODS = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_NUMBERS = frozenset({int, float})
_CONTAINERS = frozenset({list, dict, set})
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = sorted(TABLES.keys() - {*_REGISTRIES, "_non_persistent_buffers_set"})
_MOST = 8  # kinds in one list that an element is compared with


@dataclass(frozen=True, eq=False)
class RepeatedLayer:
    """A layer that is equal to an earlier one of its list, which is its template.

    `attributes`: those of modules in it that differ, by the module's name and their own.
    `memories`: of tensors in it that have data, by the module's name and their own.
    """

    template: nn.Module
    attributes: dict[tuple[str, str], Any]
    memories: dict[tuple[str, str], tuple[Memory, ...]]


@dataclass(frozen=True, eq=False)
class RepeatedLayers:
    """The repeated layers of a model by `id`. `owners`: the `id` of all that is in one of them."""

    layers: dict[int, RepeatedLayer]
    owners: set[int]

    def overlap(self, others: Iterator[Tensor]) -> bool:
        """Whether a tensor of theirs shares memory, also with `others`."""
        own = [m for layer in self.layers.values() for memory in layer.memories.values() for m in memory]
        if not own:
            return False
        pieces = [*own, *(m for tensor in others for m in memory_of(tensor))]
        groups = overlapping_pieces([(memory, i) for i, memory in enumerate(pieces)])
        return any(i < len(own) for group in groups for i in group)


class _Unequal(Exception):
    """An element is not like the template, or cannot be copied by the rules of this module."""


def repeated_layers(model: nn.Module, rows: ModuleRows | None = None) -> RepeatedLayers:
    """The elements of the outermost lists of a model that repeat an earlier element. `rows`: those
    of the model's modules, if they are known.
    """
    repeats = RepeatedLayers({}, set())
    for elements in _lists(model, {id(model)}):
        templates: list[_Template] = []
        for element in elements:
            if not any(_add(element, template, repeats) for template in templates) and len(templates) < _MOST:
                try:
                    templates.append(_Template(element, rows if rows is not None and rows.is_plain else None))
                except _Unequal:
                    continue
    return repeats


def _lists(module: nn.Module, seen: set[int]) -> Iterator[list[nn.Module]]:
    for child in vars(module)["_modules"].values():
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        elements = [one for one in vars(child)["_modules"].values() if _may_repeat(one)]
        if isinstance(child, _LISTS) and len(elements) > 1:
            yield elements
        else:
            yield from _lists(child, seen)


def _may_repeat(element: nn.Module | None) -> TypeGuard[nn.Module]:
    """Whether an element has a forward and children."""
    return element is not None and bool(vars(element)["_modules"]) and not isinstance(element, _LISTS)


def _add(element: nn.Module, template: _Template, repeats: RepeatedLayers) -> bool:
    """Adds an element that repeats the template and shares nothing with others."""
    try:
        comparison = template.comparison(element)
    except _Unequal:
        return False
    own = set(comparison.owners)
    if len(own) < len(comparison.owners) or not repeats.owners.isdisjoint(own):
        return False
    repeats.owners.update(own)
    repeats.layers[id(element)] = RepeatedLayer(template.layer, comparison.attributes, comparison.memories)
    return True


class _Template:
    """What other elements of a list are compared with. Raises: _Unequal, if none can repeat it."""

    def __init__(self, layer: nn.Module, rows: ModuleRows | None) -> None:
        self.layer = layer
        self.modules: list[_ModuleFacts] = []
        root = self._collect(layer, "", set())
        span = None if rows is None else rows.spans.get(id(layer))
        self.rows = None
        values = (value for facts in self.modules for value in facts.attributes.values())
        copied = any(type(value) in _CONTAINERS for value in values)  # an element has containers of its own
        if rows is not None and span is not None and not span.refers and not copied:
            self.rows = _TemplateRows(rows, span, root, self.modules)

    def _collect(self, module: nn.Module, name: str, seen: set[int]) -> _ModuleFacts:
        if id(module) in seen:
            raise _Unequal
        seen.add(id(module))
        facts = _ModuleFacts(module, name)
        self.modules.append(facts)
        for child_name, child in vars(module)["_modules"].items():
            if child is None:
                raise _Unequal
            facts.parts.append(self._collect(child, f"{name}.{child_name}".lstrip("."), seen))
        return facts

    def comparison(self, element: nn.Module) -> _Comparison:
        """What an element has of its own. Raises: _Unequal."""
        if self.rows is not None and (comparison := self.rows.comparison(element)) is not None:
            return comparison
        comparison, facts = _Comparison(), iter(self.modules)
        comparison.compare(element, next(facts), facts, is_root=True)
        return comparison


class _ModuleFacts:
    """What must be equal in the modules of a repeated layer. Raises: _Unequal."""

    def __init__(self, module: nn.Module, name: str) -> None:
        own = vars(module)
        if FORWARD in own or not _is_copied_plainly(type(module)) or any(map(own.get, _HOOKS)):
            raise _Unequal
        if any(type(own[registry]) is not dict for registry in _REGISTRIES):  # of a ScriptModule
            raise _Unequal
        self.module, self.name, self.cls, self.keys = module, name, type(module), own.keys()
        self.names = tuple(own)
        self.attributes = {key: value for key, value in own.items() if key not in TABLES}
        self.values = getter(("training", *self.attributes))
        self.expected = self.values(own)
        self.hooks = getter(name for name in _HOOKS if name in own)  # modules of edits lack some
        self.non_persistent = own.get("_non_persistent_buffers_set", set[str]())
        self.children = [*own["_modules"]]
        tensors = [(key, table, value) for table in _REGISTRIES[:2] for key, value in own[table].items()]
        self.tensors = [(key, table, None if value is None else _layout(value)) for key, table, value in tensors]
        self.counts = len(own["_parameters"]), len(own["_buffers"])
        # What a module of one matrix is depends on its numbers: the padding of a convolution.
        self.has_weight = "weight" in {*own["_parameters"], *own["_buffers"], *own} or hasattr(self.cls, "weight")
        if any(value is not None and not value.is_contiguous() for _, _, value in tensors):
            raise _Unequal
        self.parts: list[_ModuleFacts] = []  # of its children


class _TemplateRows:
    """The rows of a template, by which an element is compared in less time than by its modules."""

    def __init__(self, rows: ModuleRows, span: Span, root: _ModuleFacts, modules: list[_ModuleFacts]) -> None:
        self.all, self.row, self.root = rows, span.row, root
        self.flags = [tensor.requires_grad for tensor in rows.tensors[span.tensors]]
        names = [[(facts.name, key) for key, _, layout in facts.tensors if layout is not None] for facts in modules]
        self.own_tensors = len(names[0])  # of the layer itself, which are copied at once
        self.tensors = [name for of_module in names[1:] for name in of_module]
        # Attributes whose values are equal in rows though an element may have other objects.
        objects = ((facts, key, value) for facts in modules for key, value in facts.attributes.items())
        self.objects = [
            (facts.name.split(".") if facts.name else [], key, value)
            for facts, key, value in objects
            if not _is_value(value)
        ]

    def comparison(self, element: nn.Module) -> _Comparison | None:
        """What an element has of its own; None if more than numbers may differ."""
        span = self.all.spans.get(id(element))
        if span is None or span.refers:
            return None
        comparison, tensors = _Comparison(), self.all.tensors[span.tensors]
        if [tensor.requires_grad for tensor in tensors] != self.flags:
            return None
        if not self.compare(span.row, self.row, self.root, comparison) or not self.has_objects(element):
            return None
        comparison.owners += self.all.objects[span.objects][1 + self.own_tensors :]
        for name, tensor in zip(self.tensors, tensors[self.own_tensors :], strict=True):
            if not tensor.is_meta and (memory := memory_of(tensor)):
                comparison.memories[name] = memory
        return comparison

    def has_objects(self, element: nn.Module) -> bool:
        """Whether an element of equal rows has the very objects that the template has."""
        for path, key, value in self.objects:
            module = element
            for name in path:
                module = vars(module)["_modules"][name]
            if vars(module)[key] is not value:
                return False
        return True

    def compare(self, number: int, other: int, facts: _ModuleFacts, comparison: _Comparison) -> bool:
        """Whether two rows, that of an element's module and a template's, differ in numbers alone;
        notes these.
        """
        if number == other:
            return True
        row, template = self.all.rows[number], self.all.rows[other]
        names = self.all.names[template[1]]
        start = 2 + len(names)
        if len(row) != len(template) or row[:2] != template[:2]:
            return False
        if row[2:start] != template[2:start]:
            for name, value, expected in zip(names, row[2:start], template[2:start], strict=True):
                if value != expected:
                    if facts.has_weight or type(facts.attributes[name]) not in _NUMBERS:
                        return False
                    if facts is not self.root:
                        comparison.attributes[facts.name, name] = value
        for part, expected in zip(row[start:], template[start:], strict=True):
            if expected[0] != "children":
                if part != expected:
                    return False
            elif part[1::2] != expected[1::2] or not all(
                self.compare(*pair, comparison) for pair in zip(part[2::2], expected[2::2], facts.parts, strict=True)
            ):
                return False
        return True


class _Comparison:
    """Compares an element of a list with a template, module by module."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[str, str], Any] = {}
        self.memories: dict[tuple[str, str], tuple[Memory, ...]] = {}
        self.owners: list[int] = []

    def compare(self, module: nn.Module, facts: _ModuleFacts, rest: Iterator[_ModuleFacts], is_root: bool) -> None:
        own = vars(module)
        if type(module) is not facts.cls or (tuple(own) != facts.names and own.keys() != facts.keys):
            raise _Unequal  # a comparison of names in order is quick
        if any(facts.hooks(own)):
            raise _Unequal
        children, parameters, buffers = own["_modules"], own["_parameters"], own["_buffers"]
        if type(children) is not dict or type(parameters) is not dict or type(buffers) is not dict:
            raise _Unequal
        if len(parameters) != facts.counts[0] or len(buffers) != facts.counts[1]:
            raise _Unequal
        if (children or facts.children) and [*children] != facts.children:
            raise _Unequal
        if buffers and own.get("_non_persistent_buffers_set", set()) != facts.non_persistent:
            raise _Unequal
        if not all(map(is_, facts.values(own), facts.expected)):
            for key, value in facts.attributes.items():
                if (other := own[key]) is not value:
                    self.compare_attributes(key, other, value, facts, is_root)
        for key, table, layout in facts.tensors:
            if (tensor := own[table].get(key)) is not None or layout is not None:
                self.compare_tensors(key, tensor, layout, facts, is_root)
        if not is_root:
            self.owners.append(id(module))
        for child in children.values():
            if child is None:
                raise _Unequal
            self.compare(child, next(rest), rest, is_root=False)

    def compare_attributes(self, key: str, value: Any, other: Any, facts: _ModuleFacts, is_root: bool) -> None:
        if type(value) is not type(other):
            raise _Unequal
        is_equal = _are_equal(value, other)
        if not is_equal and (type(value) not in _NUMBERS or facts.has_weight):
            raise _Unequal
        if not is_root and (not is_equal or type(value) in _CONTAINERS):
            self.attributes[facts.name, key] = copy.deepcopy(value)

    def compare_tensors(self, key: str, tensor: Any, layout: Any, facts: _ModuleFacts, is_root: bool) -> None:
        if tensor is None or layout is None:
            if tensor is not layout:
                raise _Unequal
            return
        if _layout(tensor) != layout:
            raise _Unequal
        if is_root:
            return  # it is copied at once
        self.owners.append(id(tensor))
        if not tensor.is_meta and (memory := memory_of(tensor)):
            self.memories[facts.name, key] = memory


def _layout(tensor: Any) -> tuple[Any, ...]:
    if type(tensor) not in (nn.Parameter, Tensor) or tensor.layout is not torch.strided:
        raise _Unequal
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _are_equal(value: Any, other: Any) -> bool:
    """Whether two plain values are equal, with the types of what they contain."""
    if type(value) is not type(other):
        return False
    if type(value) in IMMUTABLE or (type(value) is set and IMMUTABLE.issuperset(map(type, value))):
        return value == other
    if type(value) is dict:
        return _are_equal([*value.items()], [*other.items()])
    return type(value) in (tuple, list) and len(value) == len(other) and all(map(_are_equal, value, other))


def _is_value(value: Any) -> bool:
    """Whether nothing can tell a value from an equal one of its type."""
    if type(value) is tuple:
        return all(map(_is_value, value))
    return type(value) in IMMUTABLE or isinstance(value, type)


def _is_copied_plainly(cls: type[nn.Module]) -> bool:
    return copied_class(cls) is cls and cls.__getattr__ is nn.Module.__getattr__


def copied_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of the copies of modules of a class; None if it has copy methods of its own."""
    # FSDP2 puts a class in front, which refuses to be copied.
    sharded: type | tuple[()] = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    cls: type[nn.Module] = next(c for c in kind.__mro__ if not issubclass(c, sharded))
    generated = hasattr(cls, "_peftc_kind") or hasattr(cls, "_peftc_over")  # have copy methods that are not needed here
    special = not generated and any(getattr(cls, n, None) is not getattr(nn.Module, n, None) for n in COPY_METHODS)
    return None if special and cls is kind else cls
