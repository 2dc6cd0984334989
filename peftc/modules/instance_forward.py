"""Finds forwards that were assigned to an instance, as in `module.forward = …`.

A *hook* (accelerate's, or a wrapper that keeps the forward it replaced) calls the module's code
in the end. It stays; what it calls is replaced with the code. A *patch* is a method with code of
its own. That code counts as the module's code, as if it stood in a class.
"""

import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.offload import HOOK, HOOK_REGISTRY
from peftc.modules.subclasses import subclass

GENERATED = "_peftc_generated"  # marks the forwards of generated classes
FORWARD = "forward"


class _Instance(dict[str, Any]):
    """Stands for the attributes of a module, whose forward may not be assigned yet."""


@dataclass(frozen=True)
class ForwardReference:
    """A place that holds a forward: as the function, or as its method of a module if `bound`.

    `holder` is a dictionary, a partial, a function with defaults, or a cell; `key` the place in it.
    """

    holder: Any
    key: Any
    bound: bool

    @property
    def is_attribute(self) -> bool:
        """Whether the forward is assigned to the module itself."""
        return isinstance(self.holder, _Instance)

    def set(self, module: nn.Module, function: Callable[..., Any]) -> None:
        value = MethodType(function, module) if self.bound else function
        holder = vars(module) if self.is_attribute else self.holder
        if isinstance(holder, partial):
            call: Any = holder
            args = tuple(value if i == self.key else argument for i, argument in enumerate(call.args))
            keywords = {name: value if name == self.key else argument for name, argument in call.keywords.items()}
            call.__setstate__((value if self.key == "func" else call.func, args, keywords, vars(call)))
        elif isinstance(holder, FunctionType):
            defaults: tuple[Any, ...] = holder.__defaults__ or ()
            holder.__defaults__ = (*defaults[: self.key], value, *defaults[self.key + 1 :])
        elif isinstance(holder, dict):
            holder[self.key] = value
        else:
            holder.cell_contents = value


@dataclass(frozen=True)
class InstanceForward:
    """The forward of an instance. `function`: the code that runs in the end; None if unknown.
    `references`: the places that hold that code. `hooked`: something runs around it. `wraps`: its
    `__wrapped__` is the forward of the class.
    """

    function: Callable[..., Any] | None
    references: tuple[ForwardReference, ...] = ()
    hooked: bool = True
    wraps: bool = True


def instance_forward(module: nn.Module, value: Any = None) -> InstanceForward | None:
    """The forward that is assigned to a module, or `value` as if it were; None without one."""
    value = vars(module).get(FORWARD) if value is None else value
    if value is None:
        return None
    instance = _Instance({FORWARD: value})
    if references := tuple(_Search(module, _class_forwards(module)).references(value, instance, FORWARD)):
        return InstanceForward(type(module).forward, references, hooked=not references[0].is_attribute)
    wrapped: Any = getattr(value, "__wrapped__", None)
    if _is_method(wrapped, module) and not hasattr(wrapped, "__wrapped__"):
        references = tuple(_Search(module, frozenset({wrapped.__func__})).references(value, instance, FORWARD))
        return InstanceForward(wrapped.__func__ if references else None, references)
    if (method := _method_function(value, module)) is not None and wrapped is None:
        # code that calls a class's forward would call itself as that of a subclass
        names = _names(method.__code__)
        if FORWARD not in names or not names & {"type", "__class__", "super"}:
            return InstanceForward(method, (ForwardReference(instance, FORWARD, True),), hooked=False)
    return InstanceForward(None, wraps=_innermost(value) in _class_forwards(module))


def _class_forwards(module: nn.Module) -> frozenset[Any]:
    """The forward of a module's class; for an edited module also that of its base class."""
    kind: Any = getattr(type(module), "_peftc_kind", None)
    classes = (type(module),) if kind is None else (type(module), kind.base)
    forwards = [forward for cls in classes if (forward := getattr(cls, FORWARD, None)) is not None]  # scripts have none
    return frozenset({*forwards, *map(_innermost, forwards)})


def rebind_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Makes an instance's forward run `function` instead of the module's code."""
    forward = instance_forward(module)
    for reference in forward.references if forward is not None else ():
        reference.set(module, function)


class _PatchedType(type):
    """The type of classes made for a patch; they are pickled by class and function."""


@cache
def _patched_class(cls: type[nn.Module], function: Callable[..., Any]) -> type[nn.Module]:
    return subclass(cls, {FORWARD: function}, _PatchedType)


def _reduce_patched(cls: Any) -> tuple[Any, ...]:
    return (_patched_class, (cls.__bases__[0], vars(cls)[FORWARD]))


copyreg.pickle(_PatchedType, _reduce_patched)


def code_class(module: nn.Module) -> type[nn.Module]:
    """The class whose forward is a module's code: its own, or a subclass that has the patch."""
    forward, cls = instance_forward(module), type(module)
    if forward is None or forward.function is None or forward.function in _class_forwards(module):
        return cls
    return _patched_class(cls, forward.function)


def unpatched_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of the modules whose `code_class` is `cls`."""
    return cast("type[nn.Module]", cls.__bases__[0]) if isinstance(cls, _PatchedType) else cls


def class_and_attributes(module: nn.Module) -> tuple[type[nn.Module], Mapping[str, Any]]:
    """Class and attributes for a copy without hooks; a patch becomes the class's forward."""
    forward, attributes = instance_forward(module), vars(module)
    if forward is None or forward.function is None:
        return type(module), attributes
    hidden = {FORWARD, HOOK, HOOK_REGISTRY, *(r.key for r in forward.references if r.holder is attributes)}
    return code_class(module), {name: value for name, value in attributes.items() if name not in hidden}


class _Search:
    """Finds references to `forwards` in all that a function can call: attributes of the module that
    its code names, its closure, its defaults, arguments of partials, attributes of callables and of
    objects that have a forward.
    """

    def __init__(self, module: nn.Module, forwards: frozenset[Any]) -> None:
        self.module, self.forwards, self.seen = module, forwards, set[int]()

    def references(self, value: Any, holder: Any, key: Any) -> Iterator[ForwardReference]:
        if isinstance(value, MethodType):
            if value.__self__ is self.module and self.is_forward(value.__func__):
                yield ForwardReference(holder, key, True)
            elif value.__self__ is self.module or not isinstance(value.__self__, nn.Module):
                yield from self.inside(value.__func__)
                yield from self.inside(value.__self__)
        elif isinstance(value, FunctionType) and self.is_forward(value):
            yield ForwardReference(holder, key, False)
        else:
            yield from self.inside(value)

    def is_forward(self, function: Any) -> bool:
        return function in self.forwards or hasattr(function, GENERATED)

    def inside(self, value: Any) -> Iterator[ForwardReference]:
        if id(value) in self.seen or isinstance(value, (nn.Module, type)):
            return
        self.seen.add(id(value))
        if isinstance(value, FunctionType):
            yield from self.inside_function(value)
        elif isinstance(value, partial):
            call = cast("partial[Any]", value)
            yield from self.references(call.func, call, "func")
            for key, item in (*enumerate(call.args), *call.keywords.items()):
                yield from self.references(item, call, key)
        elif hasattr(value, "__dict__") and (callable(value) or FORWARD in vars(value)):  # diffusers' hooks
            for key, item in list(vars(value).items()):
                yield from self.references(item, vars(value), key)

    def inside_function(self, function: FunctionType) -> Iterator[ForwardReference]:
        attributes = vars(self.module)
        for name in sorted(_names(function.__code__) & attributes.keys() - {FORWARD}):
            if callable(attributes[name]):
                yield from self.references(attributes[name], attributes, name)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from self.references(content, cell, None)
        for i, default in enumerate(function.__defaults__ or ()):
            yield from self.references(default, function, i)
        for key, default in (function.__kwdefaults__ or {}).items():
            yield from self.references(default, function.__kwdefaults__, key)


def _names(code: CodeType) -> set[str]:
    nested = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)


def _is_method(value: Any, module: nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module


def _method_function(value: Any, module: nn.Module) -> FunctionType | None:
    """The function of a method of the module, or of `partial(function, module)`."""
    function: Any = value.__func__ if _is_method(value, module) else None
    if isinstance(value, partial) and len(value.args) == 1 and value.args[0] is module and not value.keywords:
        function = cast("partial[Any]", value).func
    return function if isinstance(function, FunctionType) else None


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function)


def with_generated_forward(module: nn.Module, value: Any) -> Any:
    """An assigned forward (a hook), made to call the generated one. Raises: P425 for any other."""
    forward: Any = type(module).forward
    wrapper = instance_forward(module, value)
    if wrapper is None or (wrapper.function is not forward and not hasattr(inspect.unwrap(value), GENERATED)):
        name = type(module).__name__
        message = f"a `forward` is assigned to an edited {name} which does not call the one that it has"
        help_ = "take the edits out with `peftc.remove`, assign it, and compile again"
        raise PeftcError(Diagnostic("P425", message, help=help_))
    if not wrapper.hooked:
        return MethodType(forward, module)
    for reference in wrapper.references:
        reference.set(module, forward)
    return value


def replace_base(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """A class with `old` replaced by `new` among its bases (FSDP derives classes)."""
    if old is new:
        return cls
    if cls is old or old not in cls.__mro__:
        return new
    bases = tuple(replace_base(b, old, new) if old in b.__mro__ else b for b in cls.__bases__)
    meta: Any = type(cls)
    return meta(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
