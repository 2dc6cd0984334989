"""Answers data-dependent questions of code that runs on fake tensors.

A mixture of experts asks which experts were hit, packed inputs how long each piece is. In a sample
forward only shapes matter, so any answer will do. But small values that depend on no weight or
activation, such as grids of patches, answer for themselves: their data is kept beside the fake
tensors, and each operation on these is repeated on the data.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch.utils._pytree import tree_leaves, tree_map

from peftc.concurrency.interrupts import shielded
from peftc.diagnostics.model_line import running_frame

aten = torch.ops.aten
LARGEST = 1 << 20  # elements of a constant
# How often one run of a function may ask one question, such as whether an expert was hit. A loop
# such as `while error > bound` would ask for ever.
MOST_ANSWERS = 1 << 11
_KEY = "peftc_constant"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments or results."""
    leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def constant_of(value: Any) -> Any:
    """The data of a constant tensor, or None. A tensor that is not fake is its own constant."""
    if not isinstance(value, torch.Tensor):
        return None
    if not isinstance(value, FakeTensor):
        return value if value.numel() <= LARGEST and not value.is_meta else None
    return vars(value).get(_KEY)


def fake_constant(data: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    fake = mode.from_tensor(data)
    vars(fake)[_KEY] = data
    return fake


class ConstantPropagation:
    """The constants of one forward."""

    def __init__(self) -> None:
        # Something unknown was written into them. Kept, so that no other tensor gets their memory.
        self.overwritten: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        data = constant_of(value)
        return None if data is None or memory_id(data) in map(memory_id, self.overwritten) else data

    def all(self, args: Any) -> bool:
        return all(self.of(t) is not None for t in tensors_in(args))

    def compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The operation on the data of constants, on the CPU."""
        kwargs = {name: torch.device("cpu") if name == "device" and v is not None else v for name, v in kwargs.items()}
        args, kwargs = tree_map(lambda v: self.of(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keeps the data of an operation's results, or notes which constants it overwrites."""
        if any(isinstance(a, FakeTensor) and _KEY not in vars(a) for a in args) and not func._schema.is_mutable:
            return  # the quick way out for nearly every operation
        results = list(tensors_in(out))
        if not results or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return
        if not self.all((args, kwargs)):
            if func._schema.is_mutable:
                self.overwritten += [data for t in tensors_in(args) if (data := self.of(t)) is not None]
            return
        if any(t.numel() > LARGEST or not isinstance(t, FakeTensor) for t in results):
            return
        data = list(tensors_in(self.compute(func, args, kwargs)))
        if len(data) == len(results):
            for fake, value in zip(results, data, strict=True):
                vars(fake)[_KEY] = value


def memory_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@shielded
def fake_data_answers() -> Generator[None]:
    """Inside the block, questions about the data of fake tensors of a `ShapeMode` have answers.

    Constants answer for themselves. Else a number is 1, a truth value is True, a selection is one
    element. Code that asks without end is told 0 and False.
    """
    before, _thread.answers = _thread.answers, _thread.answers or DataAnswers()
    try:
        with fake_tensor_errors_unlogged(), _ScalarAnswers(), fake_tensor_patches():
            yield
    finally:
        _thread.answers = before


@shielded
def fake_tensor_errors_unlogged() -> Generator[None]:
    """Inside the block, torch does not log operations on fake tensors that fail."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it repeats what exceptions say
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@shielded
def no_data_answers() -> Generator[None]:
    """Inside the block, data questions raise, even within `fake_data_answers`."""
    before, _thread.answers = _thread.answers, None
    try:
        yield
    finally:
        _thread.answers = before


def current_data_answers() -> "DataAnswers | None":
    """What answers the data questions of this thread."""
    return _thread.answers


@shielded
def truth_answers(value: bool) -> Generator[None]:
    """Inside the block, each truth value that is not known is `value`, and not True."""
    before, _thread.truth = _thread.truth, value
    try:
        yield
    finally:
        _thread.truth = before


def truth_questions() -> int:
    """How many truth values this thread has had no data for."""
    return _thread.questions


def _truth(*_: object) -> bool:
    _thread.questions += 1
    return _thread.truth != _waits()


def _waits() -> bool:
    """Whether the model's code asks again and again, and so may wait for another answer."""
    frame = running_frame()
    if frame is None or _thread.answers is None:
        return False
    asked, question = _thread.answers.asked, (frame.f_code, frame.f_lasti)
    last, times = asked.get(question, (None, 0))
    asked[question] = frame, times + 1 if last is frame else 1
    return asked[question][1] > MOST_ANSWERS


class _ThreadState(threading.local):
    answers: "DataAnswers | None" = None
    truth = True
    questions = 0
    patches = 0  # open blocks of `fake_tensor_patches` in this thread


_thread = _ThreadState()
_patching = threading.Lock()
_patches = 0  # open blocks of `fake_tensor_patches` in all threads
_get_fastpath_enabled = torch.backends.mha.get_fastpath_enabled
_original_to: Any = nn.Module.to


@shielded
def fake_tensor_patches() -> Generator[None]:
    """Inside the block, modules of fake tensors can run, by two patches for this thread.

    `.to(dtype)` is a no-op if the dtype matches: parameters without data cannot be replaced.
    Transformer modules of torch call their children, no fused kernel, and nest no tensors.
    """
    global _patches, _original_to
    module = cast("Any", nn.Module)
    with _patching:
        if not _patches:
            _original_to = module.to
        _patches += 1
        if module.to is not _to:  # to assign an attribute of nn.Module empties the method caches of all its subclasses
            module.to, torch.backends.mha.get_fastpath_enabled = _to, _fast_path
    _thread.patches += 1
    try:
        yield
    finally:
        _thread.patches -= 1
        with _patching:
            _patches -= 1
            if not _patches:
                module.to, torch.backends.mha.get_fastpath_enabled = _original_to, _get_fastpath_enabled


def _fast_path() -> bool:
    return not _thread.patches and _get_fastpath_enabled()


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    if _thread.patches:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        floating = [t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()]
        if device is None and dtype is not None and all(t.dtype == dtype for t in floating):
            return self
    return _original_to(self, *args, **kwargs)


class _ScalarAnswers(TorchFunctionMode):
    """Answers scalars in f-strings, as in `f"expert_{number}"`, and in lists for tensors; and gives
    arrays of any values to code that leaves PyTorch.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _thread.answers and func is torch.Tensor.__format__ and not args[0].ndim:
            return format(args[0].item(), *args[1:])
        if _thread.answers and func is torch.tensor and isinstance(args[0], list):
            numbers = tree_map(lambda n: n.item() if isinstance(n, torch.Tensor) and not n.ndim else n, args[0])
            args = (numbers, *args[1:])
        if _thread.answers and func in _AS_ARRAY and isinstance(args[0], FakeTensor):
            return _array(args[0])
        return func(*args, **(kwargs or {}))


class DataAnswers:
    """Computes operations on fake tensors, with answers where their results depend on data."""

    def __init__(self) -> None:
        self.constants = ConstantPropagation()
        # Which run of a function has asked a question last, and how often.
        self.asked: dict[tuple[CodeType, int], tuple[FrameType, int]] = {}

    def result(self, dispatch: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation, which `dispatch(func, args, kwargs)` computes otherwise."""
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_mm(*args, **kwargs)
        if func is aten.split_with_sizes.default:
            args = (args[0], _split_sizes(*args, **kwargs), *args[2:])
        if func in _ANSWERS:
            return self.answer(dispatch, func, args, kwargs)
        out = dispatch(func, args, kwargs)
        self.constants.follow(func, args, kwargs, out)
        return out

    def answer(self, dispatch: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake = next((t for t in tensors_in(args) if isinstance(t, FakeTensor)), None)
        if fake is not None and self.constants.all((args, kwargs)):
            out = self.constants.compute(func, args, kwargs)
            return tree_map(lambda t: fake_constant(t, fake.fake_mode) if isinstance(t, torch.Tensor) else t, out)
        if func is aten.index.Tensor and fake is not None:
            args = (args[0], [self.integer_index(index, fake) for index in args[1]])
        try:
            return dispatch(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return _ANSWERS[func](*args, **kwargs)

    def integer_index(self, index: Any, like: FakeTensor) -> Any:
        """The positions that a constant mask of one dimension selects; any other index as it is."""
        mask = self.constants.of(index)
        if mask is None or mask.dtype != torch.bool or mask.ndim != 1:
            return index
        return fake_constant(self.constants.compute(torch.nonzero, (mask,), {})[:, 0], like.fake_mode)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # The shapes do not depend on the dtype, but the check of shapes requires bfloat16.
    halves = [aten._to_copy.default(t, dtype=torch.bfloat16) for t in (a, b)]
    return aten._to_copy.default(aten._grouped_mm.default(*halves, *args, **kwargs), dtype=a.dtype)


def _split_sizes(tensor: torch.Tensor, sizes: list[int], dim: int = 0) -> list[int]:
    # Sizes that are made-up answers need not add up: the last one gets the rest.
    return [*sizes[:-1], tensor.shape[dim] - sum(sizes[:-1])] if sizes else sizes


_AS_ARRAY = (torch.Tensor.numpy, torch.Tensor.__array__)


def _array(tensor: torch.Tensor) -> Any:
    with _disable_current_modes():
        return torch.full(tensor.shape, _scalar(tensor), dtype=tensor.dtype, device="cpu").numpy()


def _scalar(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return _truth()
    number = 0 if _waits() else 1
    return float(number) if tensor.is_floating_point() else number


def _index(tensor: torch.Tensor, indices: list[torch.Tensor | None], *rest: Any) -> torch.Tensor:
    integers: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            integers += [index.new_zeros((1,), dtype=torch.long) for _ in range(index.ndim)]
        else:
            integers.append(index)
    return aten.index.Tensor(tensor, integers)


def _unique(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    values, counts = tensor.new_empty((1,)), tensor.new_empty((1,), dtype=torch.long)
    return values, tensor.new_empty(tensor.shape, dtype=torch.long), counts


def _bincount(tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    dtype = torch.long if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    return tensor.new_empty((max(1, minlength),), dtype=dtype)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _truth,
    aten.is_nonzero.default: _truth,
    aten.nonzero.default: lambda tensor: tensor.new_empty((1, tensor.ndim), dtype=torch.long),
    aten.index.Tensor: _index,
    aten.masked_select.default: lambda tensor, mask: tensor.new_empty((1,)),
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: lambda repeats, **_: repeats.new_empty(repeats.shape),
}
