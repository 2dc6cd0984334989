"""A mode of fake tensors that computes the results of common operations by rules of its own, and
answers questions about data inside `fake_data_answers`.

PyTorch's mode takes a tenth of a millisecond for an operation, and one or more the first time:
it derives a key of its arguments and runs a decomposition in Python. A rule needs the shapes,
strides and dtypes alone. Whatever a rule does not cover, PyTorch computes.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from peftc.concurrency.interrupts import shielded
from peftc.fakes.data_answers import current_data_answers
from peftc.fakes.shape_rules import IN_PLACE, META_KERNELS, NEW_TENSORS, RULES, Layout

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE, _LIFT = torch.ops.prim.device.default, torch.ops.aten.lift_fresh.default
_patching = threading.RLock()


class ShapeMode(FakeTensorMode):
    """PyTorch's mode, quicker for common operations on tensors of one device without data."""

    def __init__(self) -> None:
        with _stacks_without_text():
            super().__init__(allow_non_fake_inputs=True)  # such as constants that a forward makes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile traces no code in this mode; to keep it out takes time for each operation

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answers = None if func is _DEVICE else current_data_answers()
        if answers is None:
            return self.dispatch(func, types, args, kwargs)
        return answers.result(lambda func, *rest: self.dispatch(func, types, *rest), func, tuple(args), {**kwargs})

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = self.result(func, args, kwargs or {})
        return super().dispatch(func, types, args, kwargs or {}) if result is None else result

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation by a rule, or None."""
        if func is _DEVICE:
            tensor = args[0]
            return tensor.fake_device if type(tensor) is FakeTensor and not self.in_kernel_invocation else None
        if func is _LIFT and type(args[0]) is Tensor and args[0].device == _CPU and args[0].numel() <= 1:
            return self.constant(args[0])
        if func in RULES:
            device = self.device_of(args, kwargs)
            layouts = None if device is None else RULES[func](args, kwargs)
            if device is None or layouts is None:
                return None
            results = tuple(self.empty(layout, device) for layout in layouts)
            return results[0] if len(results) == 1 else results
        if func in IN_PLACE:
            layouts = None if self.device_of(args, kwargs) is None else IN_PLACE[func](args, kwargs)
            first = args[0]
            return first if layouts == (((*first.shape,), first.stride(), first.dtype),) else None
        if func in META_KERNELS:
            device = self.device_of(args, kwargs)
            if device is None or kwargs.get("device") not in (None, device) or not META_KERNELS[func](args, kwargs):
                return None
            return self.run(func, args, {**kwargs, "device": _META} if kwargs.get("device") else kwargs, device)
        if func in NEW_TENSORS and kwargs.get("device") in (None, _CPU) and not kwargs.get("pin_memory"):
            return self.run(func, args, {**kwargs, "device": _META}, _CPU)
        return None

    def device_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
        """The device of all tensors; None if they have several, or one of them has data."""
        device = None
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor):
                    if type(tensor) is not FakeTensor or tensor.fake_mode is not self or tensor.constant is not None:
                        return None
                    if tensor.layout is not torch.strided or device not in (None, tensor.fake_device):
                        return None
                    device = tensor.fake_device
        return device

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
        """What the kernel for tensors without data returns, as fake tensors; None if it fails."""
        try:
            with in_kernel_invocation_manager(self):
                result = func(*args, **kwargs)
        except Exception:  # PyTorch's mode raises the same, with its message, or knows better
            return None
        if isinstance(result, Tensor):
            return self.wrap(result, device)
        return type(result)([self.wrap(r, device) if isinstance(r, Tensor) else r for r in result])

    def constant(self, data: Tensor) -> FakeTensor:
        """A fake tensor that knows its only entry, if any, as long as nothing is written to it."""
        fake = self.empty((tuple(data.shape), data.stride(), data.dtype), _CPU)
        if data.numel():
            fake.constant = data.clone()
            self.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake

    def empty(self, layout: Layout, device: torch.device) -> FakeTensor:
        shape, strides, dtype = layout
        return self.wrap(torch.empty_strided(shape, strides, dtype=dtype, device=_META), device)

    def wrap(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """`FakeTensor(self, meta, device)` in a quarter of the time."""
        make: Callable[..., Any] = Tensor._make_subclass  # pyright: ignore[reportPrivateUsage]
        fake = make(FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)  # pyright: ignore[reportPrivateUsage]
        vars(fake).update(_attributes(device), fake_mode=self)
        return fake


@shielded
def _stacks_without_text() -> Generator[None]:
    """Inside, a stack reads the lines of its code when it is printed: PyTorch's mode keeps the one
    that makes it, and would read all its files.
    """
    with _patching:
        original = traceback.extract_stack
        traceback.extract_stack = _stack_without_text
        try:
            yield
        finally:
            traceback.extract_stack = original


def _stack_without_text(f: FrameType | None = None, limit: int | None = None) -> traceback.StackSummary:
    """`traceback.extract_stack` in any thread."""
    frames = traceback.walk_stack(f or sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    stack = traceback.StackSummary.extract(frames, limit=limit, lookup_lines=False)
    stack.reverse()
    return stack


@cache
def _attributes(device: torch.device) -> dict[str, Any]:
    """The attributes of a new fake tensor, its device among them."""
    return dict(vars(FakeTensor(ShapeMode(), torch.empty((), device=_META), device)))
