"""The ways to call a model, with dropout and random numbers that are equal in two models."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from peftc.concurrency.interrupts import shielded

DROPOUTS = frozenset(
    {"dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"}
)
ATTENTION_DROPOUT = "dropout_p"
RANDOM = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "bernoulli", "randint", "randperm"}
    | {"bernoulli_", "uniform_", "normal_", "exponential_"}
)


@dataclass(frozen=True)
class ForwardMode:
    """A way to call a model. Dropout is the identity, or with `scale` the factor 1 - p."""

    name: str
    train: bool = False
    gradients: bool = False
    inference: bool = False
    scale: bool = False

    @contextmanager
    def applied_to(self, model: nn.Module) -> Generator[None]:
        with ExitStack() as stack:
            stack.enter_context(training_mode(model, self.train))
            stack.enter_context(torch.inference_mode() if self.inference else torch.set_grad_enabled(self.gradients))
            if self.train:
                stack.enter_context(Deterministic(self.scale))
            yield


EVALUATION = ForwardMode("eval")
WITH_GRADIENTS = ForwardMode("eval, with gradients", gradients=True)
TRAINING = ForwardMode("train, dropout 0", train=True, gradients=True)
WITH_DROPOUT = ForwardMode("train, dropout as a factor", train=True, scale=True)
INFERENCE = ForwardMode("inference_mode", inference=True)
ALL_BUT_EVALUATION = (WITH_GRADIENTS, TRAINING, WITH_DROPOUT, INFERENCE)


class Deterministic(TorchFunctionMode):
    """Replaces dropout by the identity, or the factor 1 - p, and seeds each random function."""

    def __init__(self, scale: bool = False) -> None:  # the factor shows on which side of a dropout a value is read
        super().__init__()
        self.scale = scale

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name.rstrip("_") in DROPOUTS:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            rate = kwargs.pop(ATTENTION_DROPOUT, args[4] if len(args) > 4 else 0.0)
            arguments = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            return self._scaled(func(*arguments, **kwargs), rate)
        # An attention function written in Python: the dropout inside it is not intercepted.
        if isinstance(func, FunctionType) and ATTENTION_DROPOUT in signature(func).parameters:
            bound = signature(func).bind(*args, **kwargs)
            bound.arguments[ATTENTION_DROPOUT] = 0.0
            return func(*bound.args, **bound.kwargs)
        if name in RANDOM:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any) -> Any:
        return self._scaled(input, p if kwargs.get("train", training) else 0.0)

    def _scaled(self, value: Any, rate: float) -> Any:
        return value * (1 - rate) if self.scale and rate else value


@shielded
def without_checkpointing() -> Generator[None]:
    """Inside the block `torch.utils.checkpoint` recomputes nothing."""
    # A reentrant checkpoint passes gradients only to its arguments, not to parameters of hooks.

    class CheckpointFunction:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    def generator(*args: Any, **kwargs: Any) -> Generator[None]:
        yield

    module: Any = checkpoint
    originals = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = CheckpointFunction, generator
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = originals


@shielded
def training_mode(model: nn.Module, train: bool) -> Generator[None]:
    """Inside the block a model trains or not. What its forward does to buffers is undone: two
    models are equal only with equal running statistics.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(b, b.detach().clone()) for b in model.buffers()] if train else []  # seen in: BatchNorm
    model.train(train)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
