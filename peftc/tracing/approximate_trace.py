"""Traces that are read and never run: code that looks at data is followed on guesses, once round each of its loops.

An experts' forward asks which experts were hit and goes round for each of them. What one round does with the weights is
what all rounds do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from transformers.integrations.moe import ExpertsInterface

from peftc.fakes.data_answers import fake_data_answers
from peftc.tracing.context_managers import patched
from peftc.tracing.tracer import RegionTrace, RegionTracer


class ApproximateTracer(RegionTracer):
    """Decisions on values of tensors are taken as False: no expert is the one to be left out."""

    def __init__(self) -> None:
        super().__init__(lambda name: has_own_code(self.root.get_submodule(name)))

    def fork(self, condition: fx.Node, likely: bool = True) -> bool:
        return False

    def format_value(self, value: Any, spec: str) -> str:
        with fake_data_answers():
            return format(value, spec)

    def compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        with fake_data_answers():
            return super().compute(kind, target, args, kwargs)


def approximate_trace(module: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
    """What a module's code does with its arguments, experts in their own plain implementation."""
    with patched(ExpertsInterface, "get_interface", lambda _: lambda self, name, default: default):
        return ApproximateTracer().trace_region(module, arguments)


def has_own_code(module: nn.Module) -> bool:
    """Whether a module's code has to be entered to see what becomes of its children and its matrices."""
    return next(module.children(), None) is not None
