"""Layers as research code has them: their roles are those of the tables, and edits at them compute
what a reference computes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.foreign_checks.checks import checked
from benchmarks.foreign_models.case import Case
from benchmarks.foreign_models.hand_written.unseen import CASES
from peftc.tracing.operations import python_target

aten: Any = torch.ops.aten


@pytest.mark.parametrize("edits", ["c", "d"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.partition("/")[2])
def test_roles_and_edits_are_those_of_the_table(case: Case, edits: str) -> None:
    result = checked(case, edits, dynamo=False)
    assert result["roles"] == {"verdict": "exact"}
    assert result["edits"][edits]["verdict"] == "pass", result["edits"]


@pytest.mark.parametrize(
    ("operator", "target"),
    [
        (aten.add.Tensor, ("call_function", torch.add)),
        (aten.add, ("call_function", torch.add)),
        (aten.gelu.default, ("call_function", torch.nn.functional.gelu)),
        (aten.linear.default, ("call_function", torch.nn.functional.linear)),
        (aten.linalg_vector_norm.default, ("call_function", torch._C._linalg.linalg_vector_norm)),  # pyright: ignore
        (aten.view.default, ("call_method", "view")),
        (aten.mul_.Tensor, ("call_method", "mul_")),
        (torch.add, ("call_function", torch.add)),
    ],
    ids=lambda one: "" if isinstance(one, tuple) else str(one).partition(" of ")[0],  # without an address
)
def test_operators_are_called_as_python_calls_them(operator: Any, target: tuple[str, Any]) -> None:
    assert python_target(operator, (torch.zeros(2),)) == target


def test_operators_without_a_function_stay() -> None:
    assert python_target(aten._to_copy.default, (torch.zeros(2),)) == ("call_function", aten._to_copy.default)
    assert python_target(aten.add.Tensor, ()) == ("call_function", aten.add.Tensor)
