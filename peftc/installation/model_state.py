"""All of a model that an analysis depends on, as a value that compares and hashes.

Modules with equal contents are described once, wherever they are: names are those of children in
their parents, and a tensor that nothing before has is new, without a number of its own. Of a layer
that is like another one, the description is a number.

For other processes a state is a text. Only models of torch's and transformers' own classes have
one: other code may change without a trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from peftc.cache.environment import LIBRARIES, library_folders
from peftc.concurrency.context import CHOICE
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.base_values import BASE_VALUES
from peftc.modules.memory import storage_of
from peftc.modules.module_rows import ModuleRows, Row, Span
from peftc.modules.torch_attributes import ATTRIBUTES, getter
from peftc.modules.walk import Named, all_named_modules, modules_in
from peftc.observation.reachable_code import reachable_code
from peftc.rewriting.edits import CONTAINER, SHARED

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
_HOOKS = frozenset(key for key in ATTRIBUTES if key.endswith(("_hooks", "_called", "_with_kwargs")))
PEFTC = frozenset({"_peftc", CHOICE, BASE_VALUES, "peftc_completeness"})
_NO_ATTRIBUTES = ATTRIBUTES | PEFTC
_SIMPLE = frozenset({bool, int, float, str, type(None)})
_PRINTED = frozenset({*_SIMPLE, torch.Size, torch.dtype, torch.device})  # whose texts are equal for equal values
_TENSORS = frozenset({torch.Tensor, nn.Parameter})


class NotComparable(Exception):
    """A model has an attribute whose changes cannot be seen."""


@dataclass(frozen=True)
class ModelState:
    """All that an analysis depends on.

    Attributes:
        modules: a `Row` of texts and numbers for all modules that are equal; the model's own is
            the last. Numbers are places in `modules` and `parts`. Where an object is not new, they
            count the objects before it.
        parts: all other values, equal ones once.
        flags: `requires_grad` of all parameters and buffers.
    """

    modules: tuple[Row, ...]
    parts: tuple[Any, ...]
    flags: tuple[bool, ...]


def state_of(model: nn.Module) -> ModelState | None:
    """Classes, code, attributes and layouts of a model; None where one cannot be compared."""
    return read_state(model)[0]


def read_state(model: nn.Module) -> tuple[ModelState | None, ModuleRows | None]:
    """`state_of`, with the rows of the modules; the flags are those of their tensors."""
    reader = _Reader(model)
    try:
        state = reader.state(model)
    except NotComparable:
        return None, None
    names = {number: attributes.names for number, attributes in reader.kind_names.items()}
    rows = ModuleRows(state.modules, names, reader.spans, [*reader.objects], reader.tensors, reader.is_plain)
    return state, rows


def flags_of(modules: Named) -> tuple[bool, ...]:
    """`ModelState.flags` of a model with these modules, without those of edits."""
    flags, seen = list[bool](), set[int]()
    for _, module in modules:
        own = vars(module)
        if (own["_parameters"] or own["_buffers"]) and id(module) not in seen:
            seen.add(id(module))
            for table in (own["_parameters"], own["_buffers"]):
                for tensor in table.values():
                    if tensor is not None:
                        flags.append(tensor.requires_grad)
    return tuple(flags)


def own_modules(model: nn.Module) -> Named:
    """The modules of a model without those of edits."""
    modules = all_named_modules(model, CONTAINER)
    return [pair for pair in modules if not pair[0].startswith(SHARED) or pair[0].split(".")[0] != SHARED]


def class_without_edits(cls: type[Any]) -> type[Any]:
    """The class that a module had before it got a generated one, or an overlay."""
    while (own := vars(cls)).keys() & {"_peftc_under", "_peftc_kind"}:
        cls = own["_peftc_under"] if "_peftc_under" in own else own["_peftc_kind"].base
    return cls


def check_classes(model: nn.Module) -> None:
    """Raises: P451 for modules without edits of a class derived from that of edited ones."""
    for module in modules_in(model):
        kind: Any = getattr(type(module), "_peftc_kind", None)
        if kind is not None and CHOICE not in vars(module):
            message = f"the class {type(module).__name__} is derived from that of an edited {kind.base.__name__}"
            help_ = "derive it from the class that the module has without edits"
            raise PeftcError(Diagnostic("P451", message, help=help_))


class _Numbers(dict[Any, int]):
    """The number of each value: how many others came before it."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Attributes(NamedTuple):
    """Reads the attributes of modules that have the same names, and their tables of hooks."""

    number: int
    names: tuple[str, ...]
    values: Callable[[dict[str, Any]], tuple[Any, ...]]
    hooks: Callable[[dict[str, Any]], tuple[Any, ...]]

    @classmethod
    def of(cls, number: int, every: tuple[str, ...]) -> _Attributes:
        names = tuple(name for name in every if name not in _NO_ATTRIBUTES)
        return cls(number, names, getter(names), getter(name for name in every if name in _HOOKS))


class _Reader:
    """Reads a model once, from the root on. Objects are known by their `id`."""

    def __init__(self, model: nn.Module) -> None:
        self.config = getattr(model, "config", None)
        self.configs: dict[int, int] = {}  # several modules may have one
        self.objects, self.memories = dict[int, int](), dict[int, int]()  # in the order of the walk
        self.nodes, self.values, self.layouts = _Numbers(), _Numbers(), _Numbers()
        self.names: dict[tuple[str, ...], _Attributes] = {}  # by all names of a module
        self.kinds: dict[object, tuple[int, tuple[int, ...]]] = {}  # by names and types of attributes
        self.classes: dict[type, int] = {}  # the number of each, without edits
        self.codes: dict[type, tuple[Any, ...]] = {}
        self.tensors: list[Tensor] = []  # those of modules, in order
        self.kind_names: dict[int, _Attributes] = {}  # by the numbers of `kinds`
        self.spans: dict[int, Span] = {}  # of modules with children
        self.references = 0  # how many objects were not new
        self.is_plain = True

    def state(self, model: nn.Module) -> ModelState:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            self.node(model, (CONTAINER, SHARED))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        parts = (modes, comparable(self.config), tuple(self.values), tuple(self.layouts), tuple(self.codes.items()))
        return ModelState(tuple(self.nodes), parts, tuple([tensor.requires_grad for tensor in self.tensors]))

    def node(self, module: nn.Module, without: tuple[str, ...] = (CONTAINER,)) -> int:
        """The number of the node of a module that is new. `without`: children that are skipped."""
        objects, own, cls = self.objects, module.__dict__, type(module)
        objects[id(module)] = first = len(objects)
        every, children = tuple(own), own["_modules"]
        attributes = self.names.get(every) or self.new_attributes(every)
        if any(attributes.hooks(own)):
            raise NotComparable
        if (number := self.classes.get(cls)) is None:
            number = self.new_class(cls)
        values = attributes.values(own)
        key = (attributes.number, *map(type, values))
        kind, others = self.kinds.get(key) or self.new_kind(key, attributes)
        if others:
            values = [*values]
            for i in others:
                values[i] = self.value(values[i])
        if not children:
            if own["_parameters"] or own["_buffers"]:
                return self.nodes[number, kind, *values, self.layout(own)]
            return self.nodes[number, kind, *values]
        tensors, references = len(self.tensors), self.references
        layout = (self.layout(own),) if own["_parameters"] or own["_buffers"] else ()
        names: list[Any] = []
        for name, child in children.items():
            if child is None:
                names += (name, None)
            elif name in without:
                self.is_plain = False
            elif (seen := objects.get(id(child))) is None:
                names += (name, self.node(child))
            else:
                self.references += 1
                names += (name, (seen,))
        row = (number, kind, *values, *layout)
        number = self.nodes[(*row, ("children", *names)) if names else row]
        spans = slice(first, len(objects)), slice(tensors, len(self.tensors))
        self.spans[id(module)] = Span(number, *spans, self.references > references)
        return number

    def new_attributes(self, every: tuple[str, ...]) -> _Attributes:
        self.names[every] = attributes = _Attributes.of(len(self.names), every)
        return attributes

    def new_class(self, module_class: type) -> int:
        """The number of a class without edits."""
        cls = class_without_edits(module_class)
        if hasattr(cls, "_peftc_kind"):  # P451
            raise NotComparable
        self.is_plain &= cls is module_class
        self.classes[module_class] = number = self.values[cls]
        self.codes.setdefault(cls, reachable_code(cls))
        return number

    def new_kind(self, key: tuple[Any, ...], attributes: _Attributes) -> tuple[int, tuple[int, ...]]:
        """The number of names and types of attributes; the places of values that are not simple."""
        others = tuple(i for i, cls in enumerate(key[1:]) if cls not in _SIMPLE)
        self.kinds[key] = kind = self.values[attributes.names, *key[1:]], others
        self.kind_names[kind[0]] = attributes
        return kind

    def value(self, value: Any) -> int:
        """The number of what is no simple value."""
        if value is self.config:
            return -1
        if not isinstance(value, PretrainedConfig):
            return self.values[comparable(value)]
        if id(value) not in self.configs:
            self.configs[id(value)] = self.values[comparable(value)]
        return self.configs[id(value)]

    def layout(self, own: dict[str, Any]) -> tuple[Any, ...]:
        """Of each tensor its name, layout and, if it or its memory is not new, their numbers."""
        parameters, buffers = own["_parameters"], own["_buffers"]
        row: list[Any] = ["tensors", len(parameters)]
        if buffers:
            row.append(tuple(sorted(own.get("_non_persistent_buffers_set", ()))))
        objects, memories = self.objects, self.memories
        for name, tensor in [*parameters.items(), *buffers.items()] if buffers else parameters.items():
            row.append(name)
            if tensor is None:
                row.append(None)
                continue
            cls, number = type(tensor), id(tensor)
            if cls not in _TENSORS or tensor.layout is not torch.strided:
                raise NotComparable
            sizes = tensor.shape, tensor.stride(), tensor.storage_offset()
            row.append(self.layouts[cls, *sizes, tensor.dtype, tensor.device])
            memory = storage_of(tensor)
            if number in objects or memory in memories:
                row.append((objects.get(number), memories.get(memory)))
                self.references += 1
                objects.setdefault(number, len(objects))
                memories.setdefault(memory, len(memories))
            else:
                objects[number], memories[memory] = len(objects), len(memories)
            self.tensors.append(tensor)
        return tuple(row)


def comparable(value: Any) -> Any:
    """A value that is equal exactly where an attribute is the same. Raises: NotComparable."""
    if type(value) in _SIMPLE:
        return type(value), value
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, PretrainedConfig):
        return type(value), value.to_json_string(use_diff=False), getattr(value, "_attn_implementation", None)
    if isinstance(value, GenerationConfig):
        return type(value), str(value)
    if isinstance(value, tuple | list):
        return type(value), *map(comparable, value)
    if isinstance(value, dict):
        return type(value), *((comparable(k), comparable(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(comparable, value))
    library = str(getattr(value, "__module__", "")).startswith(("torch", "transformers"))
    if library and callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return value  # one of its functions
    raise NotComparable


# As a text ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateText:
    """The sha256 of a state's text, and the classes of the model."""

    sha256: str
    classes: frozenset[type]


def state_text(state: ModelState) -> StateText:
    """Raises: NotComparable for a state with code that is in no file of the libraries."""
    writer = _Writer()
    text = f"{state.modules} {writer.text(state.parts)} {state.flags} {torch.get_default_dtype()}"
    return StateText(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), frozenset(writer.classes))


class _Writer:
    def __init__(self) -> None:
        self.folders = library_folders()
        self.classes: dict[type, str] = {}
        self.functions: dict[FunctionType | CodeType, str] = {}

    def text(self, value: Any) -> str:
        """A text that is equal in another process exactly for an equal value."""
        kind = type(value)
        if kind in _PRINTED:
            return repr(value)
        if kind is tuple:
            return f"({','.join(map(self.text, value))})"
        if isinstance(value, type):
            return self.classes.get(value) or self.of_class(value)
        if kind is FunctionType or kind is CodeType:
            return self.functions.get(value) or self.of_function(value)
        if kind is frozenset:
            return f"{{{','.join(sorted(map(self.text, value)))}}}"
        if kind is BuiltinFunctionType:
            return f"{value.__module__}.{value.__qualname__}"
        raise NotComparable

    def of_class(self, cls: type[Any]) -> str:
        library = cls.__module__.partition(".")[0]
        if library not in LIBRARIES and cls.__module__ != "builtins":
            raise NotComparable
        if library in LIBRARIES:
            self.classes[cls] = f"{cls.__module__}.{cls.__qualname__}"
        return f"{cls.__module__}.{cls.__qualname__}"

    def of_function(self, function: FunctionType | CodeType) -> str:
        code = function if isinstance(function, CodeType) else function.__code__
        if not code.co_filename.startswith(self.folders):
            raise NotComparable
        self.functions[function] = text = f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}"
        return text
