"""Traces that are read and never run: branches on data are not taken, and loops over data run once.

An experts' forward asks which experts were hit, and loops over them. What one iteration does with
the weights is what all do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from transformers.integrations.moe import ExpertsInterface

from peftc.fakes.data_answers import fake_data_answers
from peftc.tracing.region_trace import RegionTrace
from peftc.tracing.tracer import RegionTracer
from peftc.tracing.tracer_base import patch_attribute


class ApproximateTracer(RegionTracer):
    """Enters every child that has children. A False outcome means that no expert is skipped."""

    def __init__(self) -> None:
        super().__init__(lambda name: next(self.root.get_submodule(name).children(), None) is not None)

    def fork(self, condition: fx.Node, likely: bool = True) -> bool:
        return False

    def format_value(self, value: Any, spec: str) -> str:
        with fake_data_answers():
            return format(value, spec)

    def compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        with fake_data_answers():
            return super().compute(kind, target, args, kwargs)


def approximate_trace(module: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
    """The trace of a module's code; experts run in their own, plain implementation."""
    with patch_attribute(ExpertsInterface, "get_interface", lambda _: lambda self, name, default: default):
        return ApproximateTracer().trace_region(module, arguments)
