"""Traces a call of a region and keeps everything that its code asked, so that guards can ask it again.

More than a `RegionTracer` keeps: which arguments were asked for their type, which fields of configs and which parameters'
dtypes were read. Arguments named `symbolic` stay arguments even where they are plain (None, True, 3, "a").
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import fx, nn
from transformers import PretrainedConfig

from peftc.concurrency.interrupts import shielded
from peftc.dataflow.nodes import ancestors
from peftc.dataflow.operations import has_side_effects
from peftc.specialization.size_expressions import Sizes
from peftc.tracing.code_positions import Origin
from peftc.tracing.module_calls import is_constant
from peftc.tracing.proxy import Attribute, ConcreteProxy, attribute_proxy, is_proxy
from peftc.tracing.region_trace import RegionTrace, is_input
from peftc.tracing.tracer import RegionTracer
from peftc.tracing.tracer_base import current_tracer


class GuardedTracer(RegionTracer):
    """A tracer of one call. Names in `symbolic` are parameters, `**key` for the keys of a `**` parameter."""

    def __init__(self, inline: Callable[[str], bool], script: tuple[bool, ...], symbolic: frozenset[str]) -> None:
        super().__init__(inline, script)
        self.symbolic = symbolic
        self.beforehand = set[Origin]()  # of decisions on sizes inside that are to be asked of the arguments
        self.typed: set[fx.Node] = set()
        self.dtypes: dict[str, torch.dtype] = {}  # of parameters whose dtype may have been asked for
        self.numbers: dict[str, None] = {}  # attributes that were read where others may have None
        self.owners: dict[int, str] = {}  # of configs, by id: where they are

    # Arguments ---------------------------------------------------------------------------------------------------

    def placeholders(
        self, signature: inspect.Signature, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = super().placeholders(signature, arguments)
        nodes = {str(n.target): n for n in self.graph.nodes}
        for i, p in enumerate(list(signature.parameters.values())[1:]):
            if p.name in self.symbolic:
                held = ConcreteProxy(nodes[p.name], self, nodes[p.name].meta["example"])
                if p.kind is p.KEYWORD_ONLY:
                    kwargs[p.name] = held
                else:
                    args[i] = held
            elif p.kind is p.VAR_KEYWORD:
                keys = [k for k, v in arguments.get(p.name, {}).items() if f"**{k}" in self.symbolic and is_constant(v)]
                kwargs.update({k: self.part(nodes["**" + p.name], k) for k in keys})
        return args, kwargs

    def part(self, holder: fx.Node, key: str) -> ConcreteProxy:
        node = self.create_node("call_function", operator.getitem, (holder, key), {})
        node.meta["example"] = value = holder.meta["example"][key]
        return ConcreteProxy(node, self, value)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What an argument has as a part may be None in another call, and Python be told so (`mask is None`)."""
        made = super().create_proxy(kind, target, *args, **kwargs)
        if target is operator.getitem and is_proxy(made) and is_input(made.node):
            self.guard(made.node, "given", getattr(made.node.meta["example"], "ndim", None))
        return made

    # What code asks ----------------------------------------------------------------------------------------------

    def guard(self, node: fx.Node, kind: str, value: Any) -> Any:
        """A truth that can only be told while the region runs (of a size that a cache gives) is asked there; a number that
        follows from the shapes of weights need not be asked.
        """
        if kind in ("int", "float") and self.recording and any(map(has_side_effects, ancestors(node))):
            number = self.sizes.beforehand(node)
            if number is None or not isinstance(number, fx.Node):
                return value if number is not None else super().guard(node, kind, value)
            return super().guard(number, kind, value)
        if kind == "bool" and self.recording and any(map(has_side_effects, ancestors(node))):
            before = self.sizes.beforehand(node) if node.meta["origin"] in self.beforehand else None
            if before is None:
                return self.fork(node, likely=value)
            node = before
        return super().guard(node, kind, value)

    @property
    def sizes(self) -> Sizes:
        assert self.root is not None
        return Sizes(self.root, lambda target, args: self.create_node(operation(target, args), target, args, {}))

    def guard_type(self, node: fx.Node, cls: type) -> None:
        self.typed.add(node)
        super().guard_type(node, cls)

    def read_attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        owner = self.module_names.get(id(module))
        if owner is None or name.startswith("_"):
            return value
        if value is None or isinstance(value, str):
            return self.word_read(owner, name, value)
        if is_row(value):
            self.attribute_guards[owner, name] = value
            return value
        read = super().read_attribute(module, name, value)
        if name != "training" and isinstance(read, Attribute):
            self.numbers[read.path] = None
        return read

    def config_read(self, config: Any, name: str, value: Any) -> Any:
        owner = self.owners[id(config)]
        if type(value) is bool or value is None or isinstance(value, str):
            return self.word_read(owner, name, value)
        self.numbers[f"{owner}.{name}"] = None
        return attribute_proxy(value, f"{owner}.{name}", self)

    def word_read(self, owner: str, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return Text.of(value, owner, name, self)
        self.attribute_guards[owner, name] = value
        return value

    def trace_region(self, root: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
        with self.watched(root):
            return super().trace_region(root, arguments)

    @shielded
    def watched(self, root: nn.Module) -> Generator[None]:
        """Configs tell what is read from them, modules which of their parameters; `root` is a copy made for this trace."""
        for name, module in root.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, PretrainedConfig) and id(value) not in self.owners:
                    self.owners[id(value)] = f"{name}.{key}".lstrip(".")
                    object.__setattr__(value, "__class__", telling(type(value)))
        before = [(m, type(m)) for m in root.modules()]
        try:
            for module, cls in before:
                module.__class__ = showing(cls)
            yield
        finally:
            for module, cls in before:
                module.__class__ = cls

    def parameter_read(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        self.dtypes[f"{self.module_names.get(id(module), '')}.{name}".lstrip(".")] = value.dtype


class Text(str):
    """A word read from a config; once Python compares it, the trace is right only where the word is the same."""

    owner: str
    name: str
    tracer: GuardedTracer

    @classmethod
    def of(cls, value: str, owner: str, name: str, tracer: GuardedTracer) -> Text:
        made = cls(value)
        made.owner, made.name, made.tracer = owner, name, tracer
        return made

    def asked(self) -> str:
        if self.tracer.recording:
            self.tracer.attribute_guards[self.owner, self.name] = str.__str__(self)
        return str.__str__(self)


def _asking(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Text, *args: Any, **kwargs: Any) -> Any:
        return plain(self.asked(), *args, **kwargs)

    return method


_QUIET = (
    "__new__",
    "__init__",
    "__class__",
    "__getattribute__",
    "__setattr__",
    "__delattr__",
    "__repr__",
    "__reduce__",
)
for _name in vars(str):
    if _name not in _QUIET and callable(getattr(str, _name)) and _name != "maketrans":
        setattr(Text, _name, _asking(_name))


_telling: dict[type, type] = {}
_showing: dict[type, type] = {}


def telling(cls: type) -> type:
    """A subclass of a config class that reports what is read to the live tracer of this thread."""
    if cls in _telling:
        return _telling[cls]
    parent: Any = cls

    def __getattribute__(self: Any, name: str) -> Any:
        tracer = current_tracer()
        if not isinstance(tracer, GuardedTracer):
            return parent.__getattribute__(self, name)
        with tracer.pause():
            value = parent.__getattribute__(self, name)
        plain = value is None or type(value) in (bool, int, float, str)
        return tracer.config_read(self, name, value) if plain and not name.startswith("__") else value

    _telling[cls] = made = type(
        cls.__name__, (cls,), {"__getattribute__": __getattribute__, "__module__": cls.__module__}
    )
    return made


def showing(cls: type) -> type:
    """A subclass of a module class that reports more reads than a spy to the live tracer of this thread: of parameters and
    buffers, None and words.
    """
    if cls in _showing:
        return _showing[cls]
    parent: Any = cls

    def __getattr__(self: Any, name: str) -> Any:
        value = parent.__getattr__(self, name)
        tracer = current_tracer()
        if isinstance(tracer, GuardedTracer) and isinstance(value, torch.Tensor):
            tracer.parameter_read(self, name, value)
        return value

    def __getattribute__(self: Any, name: str) -> Any:
        value = parent.__getattribute__(self, name)
        if value is not None and type(value) is not str and not is_row(value):
            return value
        tracer = current_tracer()
        return tracer.read_attribute(self, name, value) if isinstance(tracer, GuardedTracer) else value

    members = {"__getattr__": __getattr__, "__getattribute__": __getattribute__, "__module__": cls.__module__}
    _showing[cls] = made = type(cls.__name__, (cls,), members)
    return made


def is_row(value: Any) -> bool:
    """Whether a value is some numbers, which Python reads as they are (the height and width of a window)."""
    return type(value) in (tuple, list) and len(value) > 0 and all(type(v) in (bool, int, float) for v in value)


def operation(target: Any, args: tuple[Any, ...]) -> str:
    return "call_function" if not isinstance(target, str) else "call_method" if args else "get_attr"


def name_of(node: fx.Node) -> str:
    """The name of an argument's node: the parameter, or `**key`."""
    return str(node.target) if node.op == "placeholder" else f"**{node.args[1]}"


def is_argument(node: fx.Node) -> bool:
    """Whether a node is an argument of the call: a placeholder, or what a `**` parameter has under a key."""
    holder = node.args[0] if node.target is operator.getitem else None
    of_keywords = isinstance(holder, fx.Node) and holder.op == "placeholder" and str(holder.target).startswith("**")
    return of_keywords if node.op != "placeholder" else not str(node.target).startswith("*")


def plain_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that a trace takes as constants, by the names of `Asking`."""
    found: dict[str, Any] = {}
    for p in list(signature.parameters.values())[1:]:
        value = arguments.get(p.name)
        if p.kind is p.VAR_KEYWORD:
            found |= {f"**{k}": v for k, v in (value or {}).items() if is_constant(v)}
        elif p.kind is not p.VAR_POSITIONAL and is_constant(value):
            found[p.name] = value
    return found
