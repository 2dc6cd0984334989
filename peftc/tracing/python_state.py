"""Python itself in the code of a model: `type` of a proxy is the class that its value has. Numbers
that differ from call to call, of which a graph would hold those of its trace, are refused.
"""

from __future__ import annotations

import builtins
import pickle
import random
import sys
from collections.abc import Generator
from typing import Any

from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.fakes.python_globals import global_variables
from peftc.modules.torch_attributes import TABLES
from peftc.tracing.operations import model_function
from peftc.tracing.patches import INSTRUMENTED
from peftc.tracing.proxy import Attribute, class_of, concrete_values, is_proxy
from peftc.tracing.region_trace import TraceError
from peftc.tracing.tracer_base import TracerBase

_COLLECTIONS = frozenset({list, dict, set})
_SIMPLE = frozenset({bool, int, float, str, type(None)})


class _Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1:
            return builtins.type(*args, **kwargs)
        (value,) = args
        if is_proxy(value) and value.tracer.recording:
            value.tracer.guard_type(value.node, builtins.type(concrete_values(value)))
        if is_proxy(value) or isinstance(value, Attribute):
            return class_of(concrete_values(value))
        own = builtins.type(value)
        return vars(own).get(INSTRUMENTED, own)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.type)


class ValueType(type, metaclass=_Meta):
    """The built-in `type`, but for proxies and modules that a trace instruments."""


@shielded
def value_types(root: nn.Module) -> Generator[None]:
    """Inside, the files of the classes of `root` and its modules have `ValueType` as `type`."""
    changed = [file for file in global_variables(root) if "type" not in file]
    try:
        for file in changed:
            file["type"] = ValueType
        yield
    finally:
        for file in changed:
            if file.get("type") is ValueType:
                del file["type"]


@shielded
def no_random_numbers() -> Generator[None]:
    """Leaves the generators as they are. Raises: TraceError if the code inside draws from one."""
    numpy: Any = sys.modules.get("numpy.random")
    before, state = random.getstate(), None if numpy is None else numpy.get_state(legacy=False)
    sources: list[str] = []
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)
            sources.append("Python's `random`")
        if numpy is not None and pickle.dumps(numpy.get_state(legacy=False)) != pickle.dumps(state):
            numpy.set_state(state)
            sources.append("`numpy.random`")
    if sources:
        raise TraceError(f"its code draws from {' and '.join(sources)}, and a graph has random numbers of torch alone")


def _entries(collection: Any) -> set[tuple[Any, ...]]:
    """The numbers and texts in a list, a dictionary or a set, with their places."""
    pairs = collection.items() if isinstance(collection, dict) else enumerate(collection)
    return {(None if isinstance(collection, set) else key, type(v), v) for key, v in pairs if type(v) in _SIMPLE}


@shielded
def unchanged_collections(tracer: TracerBase, root: nn.Module) -> Generator[None]:
    """Raises: TraceError if the code inside puts numbers or texts into global variables, or into
    collections that are global or attributes: it counts, or remembers something for later calls.
    What the graph calls may do so.
    """
    variables, owners = global_variables(root), [(id(module), vars(module)) for module in root.modules()]
    members = [(owner, n, v) for owner, own in (*owners, *((0, own) for own in variables)) for n, v in own.items()]
    collections = [
        one for one in members if type(one[2]) in _COLLECTIONS and one[1] not in TABLES and one[1][:2] != "__"
    ]
    before = [(*one, _entries(one[2])) for one in (*collections, *((0, "", own) for own in variables))]
    yield
    targets = {str(node.target) for node in tracer.graph.nodes if node.op == "call_module"}
    named = root.named_modules(remove_duplicate=False)
    called = {id(part): part for name, module in named if name in targets for part in module.modules()}
    if any(node.target is model_function for node in tracer.graph.nodes) or global_variables(*called.values()):
        before = [one for one in before if one[0]]
    for owner, name, value, entries in before:
        if owner not in called and (new := _entries(value) - entries):
            raise TraceError(f"its code changes `{name or min(new)[0]}`, and a graph changes nothing of Python's")
