"""Adapters of a type of PEFT, which come in and go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch

import peftc
from tests import zoo
from tests.exchange.adapters import (
    assert_same_gradients,
    assert_same_norms,
    assert_same_outputs,
    in_peft,
    tensors,
)
from tests.exchange.test_import import loaded, trained

Case = tuple[str, Any, dict[str, Any]]  # a model of the zoo, a configuration, and its values


def imported(case: Case, folder: Path, tolerance: float | None = None, dtype: torch.dtype = torch.float64) -> Any:
    name, type_, options = case
    trained(name, folder / "in", dtype, type_=type_, **options)
    peftc.import_adapter(folder / "in", folder / "ours", model=zoo.build(name, dtype))
    ours = loaded(name, folder / "ours", dtype)
    assert_same_outputs(ours, in_peft(name, folder / "in", dtype), name, tolerance)
    return ours


def assert_comes_and_goes_back(
    case: Case,
    folder: Path,
    tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
    has_gradients: bool = True,
) -> None:
    name, ours = case[0], imported(case, folder, tolerance, dtype)
    theirs = peft.PeftConfig.from_pretrained(str(folder / "in"))
    assert peftc.export(ours, folder / "back").type == theirs.peft_type
    one, two = tensors(folder / "in"), tensors(folder / "back")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert_same_outputs(ours, in_peft(name, folder / "back", dtype), name, tolerance)
    again = peftc.import_adapter(folder / "back", folder / "again", model=zoo.build(name, dtype))
    assert again.spec == peftc.import_adapter(folder / "in", folder / "third", model=zoo.build(name, dtype)).spec
    if has_gradients:
        theirs = in_peft(name, folder / "in", dtype)
        assert_same_gradients(ours, theirs, name, folder / "gradients", tolerance)


def assert_comes(case: Case, folder: Path, tolerance: float | None = None, dtype: torch.dtype = torch.float64) -> None:
    name, ours = case[0], imported(case, folder, tolerance, dtype)
    assert_same_norms(ours, in_peft(name, folder / "in", dtype), name, set(tensors(folder / "in")))
