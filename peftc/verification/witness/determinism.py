"""Dropout and random numbers that are the same in two models, in whatever order they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator
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
RATE = "dropout_p"  # of attention functions
RANDOM = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "bernoulli", "randint", "randperm"}
    | {"bernoulli_", "uniform_", "normal_", "exponential_"}
)


class Deterministic(TorchFunctionMode):
    """Inside of it, dropout does nothing or, where `scale`, gives (1 - p) x: its mean without the correction. So it shows
    whether a value was taken before or after a dropout. Random numbers depend on the function and the shape alone.
    """

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name.rstrip("_") in DROPOUTS:
            return self.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            rate = kwargs.pop("dropout_p", args[4] if len(args) > 4 else 0.0)
            kept = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            return self.thinned(func(*kept, **kwargs), rate)
        if isinstance(func, FunctionType) and RATE in signature(func).parameters:  # its own code is not intercepted
            bound = signature(func).bind(*args, **kwargs)
            bound.arguments[RATE] = 0.0
            return func(*bound.args, **bound.kwargs)
        if name in RANDOM:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def dropout(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **rest: Any) -> Any:
        return self.thinned(input, p if rest.get("train", training) else 0.0)

    def thinned(self, value: Any, rate: float) -> Any:
        return value * (1 - rate) if self.scale and rate else value


@shielded
def without_checkpoints() -> Generator[None]:
    """Inside the block nothing is computed twice for gradients: what `torch.utils.checkpoint` would run again is run once. A reentrant
    checkpoint gives gradients to nothing but its arguments, and a hook brings parameters that are none of them.
    """
    module: Any = checkpoint
    reentrant, around = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = _Once, _nothing_around
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = reentrant, around


class _Once:
    """Stands for `torch.utils.checkpoint.CheckpointFunction`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Generator[None]:
    yield


@shielded
def training(model: nn.Module, on: bool) -> Generator[None]:
    """Inside the block all modules are in training mode, or in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.train(on)
    try:
        yield
    finally:
        for module, flag in before.items():
            module.training = flag
