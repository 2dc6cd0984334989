"""Answers for what fake tensors cannot tell, so that code which looks at data can be run for its shapes alone.

Mixtures of experts ask which experts were hit, masks whether they mask anything, packed inputs how long each piece is. Where
only the shapes of a result matter (a sample forward, a child that stays a leaf of a trace), any answer will do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from peftc.concurrency.interrupts import shielded
from peftc.fakes.constant_propagation import Known, tensors, with_data

aten = torch.ops.aten
_honest = threading.local()
_settling = threading.local()  # how many `settled` blocks this thread is in
_patching = threading.Lock()
_closed = threading.local()
_get_fastpath_enabled = torch.backends.mha.get_fastpath_enabled
_blocks: list[None] = []  # one for each `fast_paths_closed` of any thread
_replaced: list[Any] = []  # `nn.Module.to`, once for each such block of any thread: the last one that ends puts it back


@shielded
def fake_data_answers() -> Generator[None]:
    """Inside the block questions about the data of fake tensors are answered: as it is where it is known, else any number by
    1, any truth by True, any selection by one element.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # an operation that fails is told by its exception
    before, log.disabled = log.disabled, True
    try:
        with _Guesses(), _Words(), _told(False), settled():
            yield
    finally:
        log.disabled = before


@shielded
def fast_paths_closed() -> Generator[None]:
    """Inside the block torch's transformer modules call their children, and make no nested tensors, in this thread."""
    before = getattr(_closed, "fast_paths", False)
    with _patching:
        _blocks.append(None)
        torch.backends.mha.get_fastpath_enabled = _fast_path
    _closed.fast_paths = True
    try:
        yield
    finally:
        _closed.fast_paths = before
        with _patching:
            _blocks.pop()
            torch.backends.mha.get_fastpath_enabled = _fast_path if _blocks else _get_fastpath_enabled


def _fast_path() -> bool:
    return not getattr(_closed, "fast_paths", False) and _get_fastpath_enabled()


def honest() -> contextlib.AbstractContextManager[None]:
    """Inside the block, even within `guessing`, such questions raise."""
    return _told(True)


@shielded
def _told(honest: bool) -> Generator[None]:
    before, _honest.value = getattr(_honest, "value", False), honest
    try:
        yield
    finally:
        _honest.value = before


@shielded
def settled() -> Generator[None]:
    """Inside the block a module that is told to have the dtype that it has stays as it is: the parameters of a copy without
    data cannot be exchanged. And no kernel of torch stands for the children of a module.
    """
    module, depth = cast("Any", nn.Module), getattr(_settling, "depth", 0)
    with _patching:
        _replaced.append(_replaced[-1] if _replaced else module.to)
        module.to = _to
    _settling.depth = depth + 1
    try:
        with fast_paths_closed():
            yield
    finally:
        _settling.depth = depth
        with _patching:
            before = _replaced.pop()
            module.to = _to if _replaced else before


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    if getattr(_settling, "depth", 0):
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        held = [t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()]
        if device is None and dtype is not None and all(t.dtype == dtype for t in held):
            return self
    return (_replaced[-1] if _replaced else nn.Module.to)(self, *args, **kwargs)


class _Words(TorchFunctionMode):
    """A number in a text, as in the name of a module: `f"expert_{number}"`; and numbers in a list that becomes a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__format__ and not args[0].ndim and not _honest.value:
            return format(args[0].item(), *args[1:])
        if func is torch.tensor and isinstance(args[0], list) and not _honest.value:
            args = (
                tree_map(lambda n: n.item() if isinstance(n, torch.Tensor) and not n.ndim else n, args[0]),
                *args[1:],
            )
        return func(*args, **(kwargs or {}))


class _Guesses(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.known = Known()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _honest.value:
            return func(*args, **kwargs)
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_mm(*args, **kwargs)
        if func is aten.split_with_sizes.default:
            args = (args[0], _sizes(*args, **kwargs), *args[2:])
        if func in _ANSWERS:
            return self.answer(func, args, kwargs)
        out = func(*args, **kwargs)
        self.known.follow(func, args, kwargs, out)
        return out

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is asked of data: as it is, else guessed."""
        fake = next((t for t in tensors(args) if isinstance(t, FakeTensor)), None)
        if fake is not None and self.known.all((args, kwargs)):
            out = self.known.real(func, args, kwargs)
            return tree_map(lambda t: with_data(t, fake.fake_mode) if isinstance(t, torch.Tensor) else t, out)
        if func is aten.index.Tensor and fake is not None:
            args = (args[0], [self.places(index, fake) for index in args[1]])
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return _ANSWERS[func](*args, **kwargs)

    def places(self, index: Any, like: FakeTensor) -> Any:
        """A mask of one dimension as the places that it selects, where it is known."""
        data = self.known.of(index)
        if data is None or data.dtype != torch.bool or data.ndim != 1:
            return index
        return with_data(self.known.real(torch.nonzero, (data,), {})[:, 0], like.fake_mode)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # The shapes do not depend on the dtype, but the check of shapes asks for bfloat16.
    return aten._grouped_mm.default(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs).to(a.dtype)


def _sizes(tensor: torch.Tensor, sizes: list[int], dim: int = 0) -> list[int]:
    """Sizes that were guessed, with what they leave over in the last one."""
    return [*sizes[:-1], tensor.shape[dim] - sum(sizes[:-1])] if sizes else sizes


def _scalar(tensor: torch.Tensor) -> Any:
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((1, tensor.ndim), dtype=torch.long)


def _index(tensor: torch.Tensor, indices: list[torch.Tensor | None], *rest: Any) -> torch.Tensor:
    """Masks select one element."""
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            plain += [index.new_zeros((1,), dtype=torch.long) for _ in range(index.ndim)]
        else:
            plain.append(index)
    return aten.index.Tensor(tensor, plain)


def _unique(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return (
        tensor.new_empty((1,)),
        tensor.new_empty(tensor.shape, dtype=torch.long),
        tensor.new_empty((1,), dtype=torch.long),
    )


def _unique_consecutive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return _unique(tensor)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: lambda *_: True,
    aten.is_nonzero.default: lambda *_: True,
    aten.nonzero.default: _nonzero,
    aten.index.Tensor: _index,
    aten.masked_select.default: lambda tensor, mask: tensor.new_empty((1,)),
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.bincount.default: lambda tensor, *_: tensor.new_empty((1,), dtype=torch.long),
    aten.repeat_interleave.Tensor: lambda repeats, **_: repeats.new_empty(repeats.shape),
}
