"""Traces a call of a region and records all that its code decides on, so that guards can test it.

Besides what a `RegionTracer` records: which arguments' types the code tests, which config fields it
reads, and which parameters' dtypes. Arguments named `symbolic` are proxies even if they are
constants (None, True, 3, "a").
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from transformers import PretrainedConfig

from peftc.dataflow.nodes import ancestors
from peftc.dataflow.operations import has_side_effects
from peftc.specialization.size_expressions import InputSizes
from peftc.tracing.code_positions import Origin
from peftc.tracing.module_calls import is_constant
from peftc.tracing.proxy import Attribute, ConcreteProxy, attribute_proxy, is_proxy
from peftc.tracing.region_trace import RegionTrace, is_input
from peftc.tracing.tracer import RegionTracer
from peftc.tracing.tracer_base import current_tracer


class GuardedTracer(RegionTracer):
    """Traces one call. `symbolic`: parameters, and `**key` for keywords, that stay proxies."""

    def __init__(self, inline: Callable[[str], bool], script: tuple[bool, ...], symbolic: frozenset[str]) -> None:
        super().__init__(inline, script)
        self.symbolic = symbolic
        self.size_guards = set[Origin]()  # decisions on sizes inside that become guards on the arguments
        self.typed: set[fx.Node] = set()
        self.dtypes: dict[str, torch.dtype] = {}  # of parameters whose dtype the code may have read
        self.numbers: dict[str, None] = {}  # attributes that were read, and may be None in other modules
        self.config_paths: dict[int, str] = {}  # by id

    # Arguments ------------------------------------------------------------------------------------

    def placeholders(
        self, signature: inspect.Signature, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = super().placeholders(signature, arguments)
        nodes = {str(n.target): n for n in self.graph.nodes}
        for i, p in enumerate(list(signature.parameters.values())[1:]):
            if p.name in self.symbolic:
                proxy = ConcreteProxy(nodes[p.name], self, nodes[p.name].meta["example"])
                if p.kind is p.KEYWORD_ONLY:
                    kwargs[p.name] = proxy
                else:
                    args[i] = proxy
            elif p.kind is p.VAR_KEYWORD:
                keys = [k for k, v in arguments.get(p.name, {}).items() if f"**{k}" in self.symbolic and is_constant(v)]
                kwargs.update({k: self.keyword(nodes["**" + p.name], k) for k in keys})
        return args, kwargs

    def keyword(self, keywords: fx.Node, key: str) -> ConcreteProxy:
        node = self.create_node("call_function", operator.getitem, (keywords, key), {})
        node.meta["example"] = value = keywords.meta["example"][key]
        return ConcreteProxy(node, self, value)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Guards parts of arguments, which may be None in another call (`mask is None`)."""
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        if target is operator.getitem and is_proxy(proxy) and is_input(proxy.node):
            self.guard(proxy.node, "given", getattr(proxy.node.meta["example"], "ndim", None))
        return proxy

    # Decisions ------------------------------------------------------------------------------------

    def guard(self, node: fx.Node, kind: str, value: Any) -> Any:
        """A truth known only at run time (of a size from a cache) becomes a branch of the graph.

        A number that follows from the shapes of weights needs no guard.
        """
        numeric = kind in ("int", "float", "bool")
        if not numeric or not self.recording or not any(map(has_side_effects, ancestors(node))):
            return super().guard(node, kind, value)
        if kind != "bool":
            number = self.sizes.rebuild(node)
            if number is not None and not isinstance(number, fx.Node):
                return value
            return super().guard(node if number is None else number, kind, value)
        condition = self.sizes.rebuild(node) if node.meta["origin"] in self.size_guards else None
        return self.fork(node, likely=value) if condition is None else super().guard(condition, kind, value)

    @property
    def sizes(self) -> InputSizes:
        assert self.root is not None

        def create(target: Any, args: tuple[Any, ...]) -> fx.Node:
            kind = "call_function" if not isinstance(target, str) else "call_method" if args else "get_attr"
            return self.create_node(kind, target, args, {})

        return InputSizes(self.root, create)

    def guard_type(self, node: fx.Node, cls: type) -> None:
        self.typed.add(node)
        super().guard_type(node, cls)

    # Modules and configs --------------------------------------------------------------------------

    def read_attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        owner = self.module_names.get(id(module))
        if owner is None or name.startswith("_"):
            return value
        if value is None or isinstance(value, str) or is_numbers(value):
            return self.read_option(owner, name, value)
        proxy = super().read_attribute(module, name, value)
        if name != "training" and isinstance(proxy, Attribute):
            self.numbers[proxy.path] = None
        return proxy

    def read_config(self, config: Any, name: str, value: Any) -> Any:
        owner = self.config_paths[id(config)]
        if type(value) not in (int, float):
            return self.read_option(owner, name, value)
        self.numbers[f"{owner}.{name}"] = None
        return attribute_proxy(value, f"{owner}.{name}", self)

    def read_option(self, owner: str, name: str, value: Any) -> Any:
        if isinstance(value, str):
            string = GuardedString(value)
            string.owner, string.name, string.tracer = owner, name, self
            return string
        self.attribute_guards[owner, name] = value
        return value

    def read_tensor(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        self.dtypes[f"{self.module_names.get(id(module), '')}.{name}".lstrip(".")] = value.dtype

    def trace_region(self, root: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
        for name, module in root.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, PretrainedConfig) and id(value) not in self.config_paths:
                    self.config_paths[id(value)] = f"{name}.{key}".lstrip(".")
                    object.__setattr__(value, "__class__", reporting_config(type(value)))  # a copy for this trace
        return super().trace_region(root, arguments)


class GuardedString(str):
    """A string read from a module or a config. An operation on it adds a guard for its value."""

    owner: str
    name: str
    tracer: GuardedTracer

    def guarded(self) -> str:
        if self.tracer.recording:
            self.tracer.attribute_guards[self.owner, self.name] = str.__str__(self)
        return str.__str__(self)


def _guarding(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: GuardedString, *args: Any, **kwargs: Any) -> Any:
        return plain(self.guarded(), *args, **kwargs)

    return method


for _name in set(vars(str)).difference(("__new__", "__getattribute__", "__repr__", "maketrans")):
    if callable(getattr(str, _name)):
        setattr(GuardedString, _name, _guarding(_name))


@cache
def reporting_config(cls: type) -> type:
    """A subclass of a config class that reports what is read to the recording tracer."""
    parent: Any = cls

    def __getattribute__(self: Any, name: str) -> Any:
        tracer = current_tracer()
        if not isinstance(tracer, GuardedTracer):
            return parent.__getattribute__(self, name)
        with tracer.pause():
            value = parent.__getattribute__(self, name)
        plain = value is None or type(value) in (bool, int, float, str)
        return tracer.read_config(self, name, value) if plain and not name.startswith("__") else value

    return type(cls.__name__, (cls,), {"__getattribute__": __getattribute__, "__module__": cls.__module__})


def is_numbers(value: Any) -> bool:
    """Whether a value is a tuple or list of numbers, such as the height and width of a window."""
    return type(value) in (tuple, list) and len(value) > 0 and all(type(v) in (bool, int, float) for v in value)


def name_of(node: fx.Node) -> str:
    """The name of an argument's node: the parameter, or `**key`."""
    return str(node.target) if node.op == "placeholder" else f"**{node.args[1]}"


def is_argument(node: fx.Node) -> bool:
    """Whether a node is an argument: a placeholder, or a keyword of a `**` parameter."""
    source = node.args[0] if node.target is operator.getitem else None
    is_keyword = isinstance(source, fx.Node) and source.op == "placeholder" and str(source.target).startswith("**")
    return is_keyword if node.op != "placeholder" else not str(node.target).startswith("*")


def constant_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The constants among the arguments of a call, by the names of `GuardedTracer`."""
    constants: dict[str, Any] = {}
    for p in list(signature.parameters.values())[1:]:
        value = arguments.get(p.name)
        if p.kind is p.VAR_KEYWORD:
            constants |= {f"**{k}": v for k, v in (value or {}).items() if is_constant(v)}
        elif p.kind is not p.VAR_POSITIONAL and is_constant(value):
            constants[p.name] = value
    return constants
