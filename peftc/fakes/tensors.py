"""Fake tensors: shapes, dtypes and devices without data."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Container
from itertools import chain
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from peftc.fakes.library_hooks import HOOKS, copy_functions, copy_library_hooks
from peftc.fakes.packed_linears import as_linear
from peftc.fakes.repeated_layers import IMMUTABLE, copied_class
from peftc.fakes.shape_mode import ShapeMode
from peftc.modules.instance_forward import FORWARD, class_and_attributes
from peftc.modules.memory import MEMORY, Memory, memory_of
from peftc.modules.offload import is_dispatched, offloaded_ties
from peftc.modules.packed import PACKED, packed_dtype, packed_shape, packed_shapes
from peftc.modules.sharded_tensors import is_partitioned
from peftc.modules.torch_attributes import ATTRIBUTES, TABLES
from peftc.modules.walk import modules_in

T = TypeVar("T")

# The copy shares functions and modules of Python, as imports do; `copy.deepcopy` refuses some.
# Seen in: no transformers model, but rotary-embedding-torch (`self.f = staticmethod(f)`)
_SHARED = IMMUTABLE | {staticmethod, classmethod, ModuleType}
_NO_MODULES = IMMUTABLE | {dict, OrderedDict, set, list, tuple}


def new_mode() -> FakeTensorMode:
    """A mode in which fake tensors can meet real ones, such as constants that a forward makes."""
    return ShapeMode()


def fake_mode(model: nn.Module) -> FakeTensorMode:
    """The mode of a skeleton: enter it to call that. Raises: ValueError for other models."""
    for tensor in chain(model.parameters(), model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    raise ValueError(f"{type(model).__name__} is not a skeleton: none of its tensors is fake")


def as_fake(
    tensor: torch.Tensor,
    mode: FakeTensorMode,
    widen: bool = False,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A fake tensor or parameter of the same layout and `requires_grad`; of meta tensors on CPU.

    Call it outside of modes. `widen`: float32 instead of half precision.
    """
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    is_plain_meta = tensor.is_meta and not isinstance(tensor, FakeTensor)
    device = device or (torch.device("cpu") if is_plain_meta else tensor.device)
    return fake_like(tensor, mode, _dtype(tensor.dtype, widen), device, () if is_plain_meta else memory_of(tensor))


def _dtype(dtype: torch.dtype, widen: bool) -> torch.dtype:
    return torch.float32 if widen and dtype in (torch.float16, torch.bfloat16) else dtype


def fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype, device: torch.device, memory: tuple[Memory, ...]
) -> torch.Tensor:
    """A new fake tensor or parameter of the layout and `requires_grad` of another tensor."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    if is_partitioned(tensor):
        meta = torch.empty(cast(Any, tensor).ds_shape, dtype=dtype, device="meta")
    fake = mode.wrap(meta, device) if isinstance(mode, ShapeMode) else FakeTensor(mode, meta, device)
    if tensor.requires_grad:
        fake.requires_grad_()
    if memory:
        vars(fake)[MEMORY] = memory
    if type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter):  # the latter is slow
        vars(fake)["_is_param"] = True  # makes a tensor subclass an instance of `nn.Parameter`
    return fake


def _stand_in(weight: Any, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A fake parameter (out, in) in the place of a fake packed one."""
    meta = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), weight.requires_grad)
    fake = fake_like(meta, weight.fake_mode, dtype, weight.fake_device, ())
    vars(fake)[PACKED] = True
    return fake


def fake_copy(value: T, mode: FakeTensorMode | None = None, *, widen: bool = False, whole: bool = False) -> T:
    """A deep copy of a model, a cache or arguments in which every tensor is fake.

    It keeps ties, training flags and `requires_grad`, and has neither hooks nor assigned forwards.
    `whole`: of a whole model. It has the hooks of the libraries that define it, since flags of
    theirs say that they are there. If accelerate has dispatched it, the copy is on the CPU.
    """
    mode = mode or new_mode()
    with _disable_current_modes():  # an active mode would intercept every tensor that is made
        if isinstance(value, nn.Module):
            return cast(T, copy_model(value, mode, widen, whole)[0])
        with _CopyAsFake(mode, widen, None):
            return copy.deepcopy(value)


def copy_model(
    model: nn.Module, mode: FakeTensorMode, widen: bool, whole: bool, leaves: Container[int] = ()
) -> tuple[nn.Module, dict[int, Any]]:
    """As `fake_copy`, with the copies of everything in the model, by `id`. `leaves`: repeated
    layers, by `id`, whose children are left out. Call it outside of modes.
    """
    dispatched = whole and is_dispatched(model, leaves)
    copier = _CopyAsFake(mode, widen, torch.device("cpu") if dispatched else None)
    modules = modules_in(model, leaves)
    memo: dict[int, Any] = {}
    for module in modules:
        # `Parameter.__deepcopy__` does not reach the function mode, so parameters are copied here.
        own = vars(module)
        parameters = [*own["_parameters"].values()]
        for unregistered in _unregistered(module):
            parameters += unregistered.parameters()
        for p in parameters:
            if p is not None and id(p) not in memo:
                memo[id(p)] = copier.fake(p)
        if any(map(own.get, HOOKS)):
            memo |= {id(own[name]): OrderedDict[int, Any]() for name in HOOKS if own.get(name)}
    if dispatched:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        ties = offloaded_ties(model).items()
        memo |= {id(parameters[name]): memo[id(parameters[first])] for name, first in ties}
    if packed := packed_shapes(modules):
        dtype = packed_dtype(modules)
        memo |= {number: _stand_in(memo[number], shape, copier.dtype(dtype)) for number, shape in packed.items()}
    with copier:
        new = _ModuleCopier(memo, leaves).module(model)
        if whole:  # hooks in a part report to the call of the whole model, which may be running
            copy_library_hooks(model, modules, memo)
            copy_functions(modules, memo)
    return new, memo


def make_fake(model: nn.Module) -> nn.Module:
    """The model itself with fake tensors in the place of its own; as `fake_copy`, which takes five
    times as long. Nothing else may use the model, or tensors in its attributes.
    """
    modules = modules_in(model)
    if any(_needs_copy(module) for module in modules):
        return fake_copy(model)
    with _disable_current_modes():
        copier = _CopyAsFake(new_mode(), False, None)
        registries = [vars(module)[name] for module in modules for name in ("_parameters", "_buffers")]
        tensors = {id(t): t for registry in registries for t in registry.values() if t is not None}
        memo: dict[int, Any] = {id(module): module for module in modules}
        memo |= {number: copier.fake(tensor) for number, tensor in tensors.items()}
        parts = _ModuleCopier(memo)
        with copier:
            for registry in registries:
                registry.update((name, memo[id(t)]) for name, t in registry.items() if t is not None)
            for module in modules:
                own = vars(module)
                own.update((name, OrderedDict()) for name in HOOKS if own.get(name))
                others = [(name, value) for name, value in own.items() if name not in ATTRIBUTES]
                own.update((name, parts.attribute(value)) for name, value in others)
    return model


def _needs_copy(module: nn.Module) -> bool:
    """Whether a module has a forward of its own, or modules that are not registered."""
    return FORWARD in vars(module) or bool(_unregistered(module))


def _unregistered(module: nn.Module) -> list[nn.Module]:
    """The modules among the plain attributes of a module."""
    own = vars(module)
    values = [own[name] for name in own if name not in ATTRIBUTES]
    return [value for value in values if type(value) not in _NO_MODULES and isinstance(value, nn.Module)]


class _CopyAsFake(TorchFunctionMode):
    """Makes `Tensor.__deepcopy__` return a fake tensor, so that deep copies have no data."""

    def __init__(self, mode: FakeTensorMode, widen: bool, device: torch.device | None) -> None:
        super().__init__()
        self.mode, self.widen, self.device = mode, widen, device

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return as_fake(tensor, self.mode, self.widen, self.device)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _dtype(dtype, self.widen)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__deepcopy__":
            tensor, memo = args
            memo[id(tensor)] = fake = self.fake(tensor)
            return fake
        return func(*args, **(kwargs or {}))


class _ModuleCopier:
    """`copy.deepcopy(module, memo)` in a twentieth of the time for most modules."""

    def __init__(self, memo: dict[int, Any], leaves: Container[int] = ()) -> None:
        self.memo, self.leaves = memo, leaves
        self.classes: dict[type[nn.Module], type[nn.Module] | None] = {}
        self.linears: dict[type[nn.Module], type[nn.Module]] = {}  # of packed Linears

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self.memo:
            return self.memo[id(module)]
        kind, attributes = type(module), vars(module)
        if kind not in self.classes:
            self.classes[kind] = copied_class(kind)
        if (cls := self.classes[kind]) is None:
            return self.special(module)
        if FORWARD in attributes:
            patched, attributes = class_and_attributes(module)
            cls = patched if cls is kind else cls
        if packed_shape(module) is not None:
            cls = self.linears.setdefault(cls, as_linear(cls))
        self.memo[id(module)] = new = cls.__new__(cls)
        copies = vars(new)
        for name, value in attributes.items():
            if name in TABLES and not value and type(value) is TABLES[name]:
                copies[name] = TABLES[name]()  # no other module has this table
            elif name == "_modules" and id(module) in self.leaves:
                copies[name] = {}
            elif not name.startswith("__composable_api"):  # FSDP2 keeps its state under this prefix
                copies[name] = self.attribute(value)
        return new

    def special(self, module: nn.Module) -> nn.Module:
        """A module with copy methods of its own, without the hooks that stand in instances."""
        hidden = {
            name: names
            for name, inner in module.named_modules()
            if FORWARD in vars(inner) and (names := set(vars(inner)).difference(class_and_attributes(inner)[1]))
        }
        for name, attributes in hidden.items():
            own = vars(module.get_submodule(name))
            self.memo.update((id(own[attribute]), None) for attribute in attributes)
        new = copy.deepcopy(module, self.memo)
        for name, attributes in hidden.items():
            for attribute in attributes:
                del vars(new.get_submodule(name))[attribute]
        return new

    def attribute(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SHARED:
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if kind is dict or kind is OrderedDict:
            self.memo[id(value)] = new = kind()
            for name, item in value.items():
                new[name] = self.attribute(item)
            return new
        return copy.deepcopy(value, self.memo)
