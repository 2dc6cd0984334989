"""`module.forward = …`: a forward that stands in an instance hides the one of its class.

A *hook* (accelerate's, or a wrapper that keeps the forward it has replaced) calls the code of the module in the end: it stays
where it is, and what it calls is exchanged with the code. A *patch* is a method with code of its own: that is the module's code
then, as if it stood in a class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from peftc.modules.offload import HOOK

GENERATED = "_peftc_generated"  # marks the forwards of generated classes
FORWARD = "forward"


class Top(dict[str, Any]):
    """In the place of the attributes of a module, for a forward that may not be one of them yet."""


@dataclass(frozen=True)
class Link:
    """A place that holds a forward: the function, or its method of a module where `bound`."""

    holder: Any
    key: Any
    bound: bool

    @property
    def top(self) -> bool:
        """Whether it is what stands in the instance itself."""
        return isinstance(self.holder, Top)

    def set(self, module: nn.Module, function: Callable[..., Any]) -> None:
        value = MethodType(function, module) if self.bound else function
        if isinstance(self.holder, partial):
            set_in_partial(self.holder, self.key, value)
        elif isinstance(self.holder, FunctionType):
            defaults: tuple[Any, ...] = self.holder.__defaults__ or ()
            self.holder.__defaults__ = (*defaults[: self.key], value, *defaults[self.key + 1 :])
        elif isinstance(self.holder, dict):
            self.holder[self.key] = value
        else:
            self.holder.cell_contents = value


def set_in_partial(holder: Any, key: Any, value: Any) -> None:
    """Exchanges the function (`func`), an argument (by number) or a keyword of a `partial`."""
    args = tuple(value if i == key and key != "func" else a for i, a in enumerate(holder.args))
    keywords = {k: value if k == key else v for k, v in holder.keywords.items()}
    holder.__setstate__((value if key == "func" else holder.func, args, keywords, vars(holder)))


@dataclass(frozen=True)
class InstanceForward:
    """What stands in an instance. `function`: the code that runs in the end, None where that cannot be told. `links`: the
    places that hold it. `hooked`: whether something runs around it. `wraps`: it says that it wraps the forward of the class.
    """

    function: Callable[..., Any] | None
    links: tuple[Link, ...] = ()
    hooked: bool = True
    wraps: bool = True


def instance_forward(module: nn.Module, value: Any = None) -> InstanceForward | None:
    """The forward that stands in a module, or `value` as one that might; None where there is none."""
    value = vars(module).get(FORWARD) if value is None else value
    if value is None:
        return None
    top = Top({FORWARD: value})
    if links := tuple(_Search(module, class_forwards(module)).of(value, top, FORWARD)):
        return InstanceForward(type(module).forward, links, hooked=not links[0].top)
    inner: Any = getattr(value, "__wrapped__", None)
    if _is_method(inner, module) and not hasattr(inner, "__wrapped__"):
        links = tuple(_Search(module, frozenset({inner.__func__})).of(value, top, FORWARD))
        return InstanceForward(inner.__func__ if links else None, links)
    if (method := _method(value, module)) is not None and inner is None and not _calls_class(method):
        return InstanceForward(method, (Link(top, FORWARD, True),), hooked=False)
    return InstanceForward(None, wraps=_innermost(value) in class_forwards(module))


def class_forwards(module: nn.Module) -> frozenset[Any]:
    """The forward of a module's class; of an edited one, that of the class before, too."""
    kind: Any = getattr(type(module), "_peftc_kind", None)
    base = () if kind is None else (kind.base.forward, _innermost(kind.base.forward))
    return frozenset({type(module).forward, _innermost(type(module).forward), *base})


def rebind_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Lets what stands in a module as its forward run `function` in the place of the code that it runs."""
    found = instance_forward(module)
    for link in found.links if found is not None else ():
        holder = vars(module) if link.top else link.holder
        Link(holder, link.key, link.bound).set(module, function)


# Patches as classes ----------------------------------------------------------------------------------------------


class _PatchedType(type):
    """The type of classes that stand for a patched instance; they are pickled by class and function."""


@cache
def patched_class(cls: type[nn.Module], function: Callable[..., Any]) -> type[nn.Module]:
    """A subclass under the same names, whose forward is the patch."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return cast("type[nn.Module]", _PatchedType(cls.__name__, (cls,), {**names, FORWARD: function}))


def _reduced(cls: Any) -> tuple[Any, ...]:
    return (patched_class, (cls.__bases__[0], vars(cls)[FORWARD]))


copyreg.pickle(_PatchedType, _reduced)


def code_class(module: nn.Module) -> type[nn.Module]:
    """The class whose forward is a module's code: its own, or one that stands for its patch."""
    found, cls = instance_forward(module), type(module)
    if found is None or found.function is None or found.function in class_forwards(module):
        return cls
    return patched_class(cls, found.function)


def unpatched_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module really has whose code is of `cls`."""
    return cast("type[nn.Module]", cls.__bases__[0]) if isinstance(cls, _PatchedType) else cls


def class_and_attributes(module: nn.Module) -> tuple[type[nn.Module], Mapping[str, Any]]:
    """The class and the attributes of a copy whose hooks stay behind, and whose patch is its class."""
    found, attributes = instance_forward(module), vars(module)
    if found is None or found.function is None:
        return type(module), attributes
    gone = {FORWARD, HOOK, *(link.key for link in found.links if link.holder is attributes)}
    return code_class(module), {name: value for name, value in attributes.items() if name not in gone}


# Searching ---------------------------------------------------------------------------------------------------------


class _Search:
    """Looks for the forwards in `own` in everything that a function can call: attributes of the module that its code names,
    what it closes over, its defaults, arguments of partials, attributes of callable objects.
    """

    def __init__(self, module: nn.Module, own: frozenset[Any]) -> None:
        self.module, self.own, self.seen = module, own, set[int]()

    def of(self, value: Any, holder: Any, key: Any) -> Iterator[Link]:
        if isinstance(value, MethodType):
            if value.__self__ is self.module and self.is_own(value.__func__):
                yield Link(holder, key, True)
            elif value.__self__ is self.module or not isinstance(value.__self__, nn.Module):
                yield from self.inside(value.__func__)
                yield from self.inside(value.__self__)
        elif isinstance(value, FunctionType) and self.is_own(value):
            yield Link(holder, key, False)
        else:
            yield from self.inside(value)

    def is_own(self, function: Any) -> bool:
        return function in self.own or hasattr(function, GENERATED)

    def inside(self, value: Any) -> Iterator[Link]:
        if id(value) in self.seen or isinstance(value, (nn.Module, type)):
            return
        self.seen.add(id(value))
        if isinstance(value, FunctionType):
            yield from self.function(value)
        elif isinstance(value, partial):
            made = cast("partial[Any]", value)
            yield from self.of(made.func, made, "func")
            for key, item in (*enumerate(made.args), *made.keywords.items()):
                yield from self.of(item, made, key)
        elif callable(value) and hasattr(value, "__dict__"):
            for key, item in list(vars(value).items()):
                yield from self.of(item, vars(value), key)

    def function(self, function: FunctionType) -> Iterator[Link]:
        held = vars(self.module)
        for name in sorted(_names(function.__code__) & held.keys() - {FORWARD}):
            if callable(held[name]):
                yield from self.of(held[name], held, name)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from self.of(content, cell, None)
        for i, default in enumerate(function.__defaults__ or ()):
            yield from self.of(default, function, i)
        for key, default in (function.__kwdefaults__ or {}).items():
            yield from self.of(default, function.__kwdefaults__, key)


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _is_method(value: Any, module: nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module


def _method(value: Any, module: nn.Module) -> FunctionType | None:
    """The function of a method of a module, written as one or as `partial(function, module)`."""
    if isinstance(value, partial):
        made = cast("partial[Any]", value)
        own = len(made.args) == 1 and made.args[0] is module and not made.keywords
        return made.func if own and isinstance(made.func, FunctionType) else None
    function = value.__func__ if _is_method(value, module) else None
    return function if isinstance(function, FunctionType) else None


def _calls_class(function: FunctionType) -> bool:
    """Whether code looks up the forward of a class, so that as the forward of one it would call itself."""
    names = _names(function.__code__)
    return FORWARD in names and bool(names & {"type", "__class__", "super"})


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function)
