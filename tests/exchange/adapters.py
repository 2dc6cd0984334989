"""Edited models with random values, and the same base in PEFT."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import close, randomise

_SCALE = 1e6  # of gradients that leave as tensors: PEFT has a least norm of those of DeLoRA


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


def assert_same_outputs(ours: nn.Module, theirs: nn.Module, name: str, rounding: float | None = None) -> None:
    """To the rounding of float64, or of what PEFT computes in float32."""
    for padding in (None, "right"):
        inputs = zoo.inputs(name, ours, padding=padding)
        with torch.no_grad():
            close(theirs(**inputs).logits, ours(**inputs).logits, name, rounding)


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, name: str, folder: Path, rounding: float | None) -> None:
    """Of a loss by each tensor of PEFT's file; ours leave as its tensors do."""
    own = peftc.parameters(ours)
    values = {key: parameter.data for key, parameter in own.items()}
    peftc.export(ours, folder / "trained")
    trained = tensors(folder / "trained")
    in_file = {n: _key(n, trained) for n, _ in theirs.named_parameters() if _key(n, trained) in trained}
    of_ours, of_theirs = (
        gradients(model, parameters, zoo.inputs(name, ours))
        for model, parameters in ((ours, own), (theirs, {key: theirs.get_parameter(n) for n, key in in_file.items()}))
    )
    # Signs of R in DEFT depend on P: R goes first.
    for attribute in sorted({key.rpartition(".")[2] for key in values}, reverse=True):
        for key, parameter in own.items():
            has_gradient = key.endswith(f".{attribute}") and bool(of_ours[key].any())  # frozen ones stay
            parameter.data = _SCALE * of_ours[key] if has_gradient else values[key]
        peftc.export(ours, folder / attribute)
        for key, tensor in tensors(folder / attribute).items():
            if key in of_theirs and not torch.equal(tensor, trained[key]):
                close(tensor / _SCALE, of_theirs.pop(key), key, rounding)
    assert not any(gradient.any() for gradient in of_theirs.values())


def assert_same_norms(ours: nn.Module, theirs: nn.Module, name: str, in_file: set[str]) -> None:
    """Of all gradients together, for tensors that do not go back."""
    parameters = {n: p for n, p in theirs.named_parameters() if _key(n, in_file) in in_file}
    norms = [
        torch.stack(
            [gradient.square().sum() for gradient in gradients(model, own, zoo.inputs(name, ours)).values()]
        ).sum()
        for model, own in ((ours, peftc.parameters(ours)), (theirs, parameters))
    ]
    assert norms[1] > 0
    close(norms[0] / norms[1], torch.ones_like(norms[0]), name)


def _key(name: str, trained: Collection[str]) -> str:
    """Of a parameter in a file; PEFT has what modules have in common in each of them."""
    key = name.replace(".default", "")
    parts = key.split(".")
    ends = [f"base_model.{'.'.join(parts[-count:])}" for count in (2, 1)]
    return next((one for one in (key, *ends) if one in trained), key)


def gradients(model: nn.Module, parameters: dict[str, nn.Parameter], inputs: Any) -> dict[str, torch.Tensor]:
    """Of a loss; 0 for what is frozen."""
    model.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    model(**inputs).logits.square().mean().backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in parameters.items()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
