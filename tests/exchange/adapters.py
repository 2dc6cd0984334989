"""Edited models with random values, and the same base in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import close, randomise


def edited(name: str, spec: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A compiled model of the zoo with random values."""
    model = zoo.build(name, dtype, **options)
    peftc.compile(f"peft 2\n{spec}\n", model, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        randomise(peftc.parameters(model))
    return model


def in_peft(name: str, folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """PEFT's model of a folder, on the same base."""
    return peft.PeftModel.from_pretrained(zoo.build(name, dtype, **options), str(folder)).eval()


def assert_same_outputs(ours: nn.Module, theirs: nn.Module, name: str) -> None:
    for padding in (None, "right"):
        inputs = zoo.inputs(name, ours, padding=padding)
        with torch.no_grad():
            close(theirs(**inputs).logits, ours(**inputs).logits, name)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
