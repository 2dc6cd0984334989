"""Fake tensors: shapes, dtypes and devices without data."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from peftc.modules.instance_forward import without_instance_forward
from peftc.modules.memory import MEMORY, memory_of
from peftc.modules.offload import is_dispatched

T = TypeVar("T")

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_COPYING = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_PLAIN = frozenset({bool, int, float, str, type(None), type, torch.dtype, torch.device})


class _CopyAsFake(TorchFunctionMode):
    """Answers `Tensor.__deepcopy__` with a fake tensor, so that `copy.deepcopy` copies structure only."""

    def __init__(self, mode: FakeTensorMode, widen: bool, device: torch.device | None) -> None:
        super().__init__()
        self.mode, self.widen, self.device = mode, widen, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__deepcopy__":
            tensor, memo = args
            memo[id(tensor)] = fake = as_fake(tensor, self.mode, self.widen, self.device)
            return fake
        return func(*args, **(kwargs or {}))


def new_mode() -> FakeTensorMode:
    """A mode in which real tensors may meet fake ones (constants that a forward makes)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode(model: nn.Module) -> FakeTensorMode:
    """The mode of a skeleton: enter it to call the skeleton.

    Raises: ValueError where the model holds no fake tensor.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    raise ValueError(f"{type(model).__name__} is not a skeleton: none of its tensors is fake")


def as_fake(
    tensor: torch.Tensor, mode: FakeTensorMode, widen: bool = False, device: torch.device | None = None
) -> torch.Tensor:
    """A fake tensor (or parameter) of the same shape, strides, dtype, device (cpu for meta) and `requires_grad`; made outside of modes.

    `widen`: float32 in place of half precision. `device`: another one.
    """
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    own = torch.device("cpu") if tensor.is_meta and not isinstance(tensor, FakeTensor) else tensor.device
    dtype = torch.float32 if widen and tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    fake = FakeTensor(mode, meta, device or own).requires_grad_(
        tensor.requires_grad
    )  # dispatching takes ten times as long
    if memory := memory_of(tensor):
        vars(fake)[MEMORY] = memory  # so that what shares memory is known of a skeleton, too
    if isinstance(tensor, nn.Parameter):
        vars(fake)["_is_param"] = True  # what makes a parameter of a tensor that is not a plain one
    return fake


def fake_copy(value: T, mode: FakeTensorMode | None = None, *, widen: bool = False, whole: bool = False) -> T:
    """A deep copy of a model, a cache or arguments in which every tensor is fake.

    Tied tensors stay tied; hooks stay behind, accelerate's and those of a wrapped `forward`, too; a `forward` that stands in an
    instance becomes that of its class. Training flags and `requires_grad` are kept. The original is not touched and
    none of its data is read, so the cost does not depend on the size of the tensors.

    Args: `whole`: a whole model, which is on one device in the copy where accelerate has spread it.
    """
    mode = mode or new_mode()
    with _disable_current_modes():  # a mode that is active would be asked of each tensor that is made
        return _fake_copy(value, mode, widen, whole)


def _fake_copy(value: T, mode: FakeTensorMode, widen: bool, whole: bool) -> T:
    spread = whole and isinstance(value, nn.Module) and is_dispatched(value)
    device = torch.device("cpu") if spread else None
    memo: dict[int, Any] = {}
    if isinstance(value, nn.Module):
        memo = {id(p): as_fake(p, mode, widen, device) for p in value.parameters()}  # a parameter copies itself unasked
        for module in value.modules():
            held = [m for m in vars(module).values() if isinstance(m, nn.Module)]  # held without being registered
            memo |= {id(p): as_fake(p, mode, widen, device) for m in held for p in m.parameters() if id(p) not in memo}
            memo |= {id(vars(module)[name]): OrderedDict[int, Any]() for name in _HOOKS if vars(module).get(name)}
    with _CopyAsFake(mode, widen, device):
        return cast(T, copied(value, memo)) if isinstance(value, nn.Module) else copy.deepcopy(value, memo)


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy(module, memo)`, but in a tenth of the time where a module is copied as all modules are."""
    if id(module) in memo:
        return memo[id(module)]
    cls = own_class(module)
    generated = hasattr(cls, "_peftc_kind") or hasattr(cls, "_peftc_over")  # copy themselves, but as all modules do
    special = not generated and any(getattr(cls, n, None) is not getattr(nn.Module, n, None) for n in _COPYING)
    if special and cls is type(module):
        return copy.deepcopy(module, memo)
    patched, attributes = without_instance_forward(module)
    cls = patched if cls is type(module) else cls
    memo[id(module)] = new = cls.__new__(cls)
    vars(new).update((name, part(value, memo)) for name, value in attributes.items() if not shared(name))
    return new


def own_class(module: nn.Module) -> type[nn.Module]:
    """A module's class without the one that FSDP2 puts in front of it, which refuses to be copied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharding: type | tuple[()] = getattr(fsdp, "FSDPModule", ())
    return next(c for c in type(module).__mro__ if not issubclass(c, sharding))


def shared(attribute: str) -> bool:
    """Whether torch keeps there how it shares a module among processes, which is no part of the module."""
    return attribute.startswith("__composable_api")


def part(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of an attribute of a module."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, nn.Module):
        return copied(value, memo)
    if id(value) not in memo and kind in (dict, OrderedDict):
        memo[id(value)] = new = kind()
        new.update((name, part(item, memo)) for name, item in value.items())
        return new
    return copy.deepcopy(value, memo)
