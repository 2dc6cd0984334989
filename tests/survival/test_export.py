"""torch.export of compiled models: the program computes the same, and contains the edit
parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.matrix import checkerboard, some
from tests.survival.harness import SPECIES, all_close, close, compiled, model_inputs

CASES = [
    *((name, spec, False) for name, spec in checkerboard(SPECIES, ("mam", "weights"))),
    *((name, spec, False) for name, spec in checkerboard(("bart", "mixtral"), ("lora", "sequential", "gated"))),
    *((name, "mam", True) for name in some(("llama", "vit", "mixtral"), 3)),  # strict mode takes several times as long
]
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*non-leaf.*"),
    pytest.mark.filterwarnings("ignore:While compiling"),  # a warning of transformers' output recording, on any model
]


class Logits(nn.Module):
    """A model without caches as in- or outputs: programs return tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        cache = {"use_cache": False} if self.model.can_generate() else {}
        return self.model(**inputs, **cache).logits


def wrapped(name: str, spec: str, **options: Any) -> tuple[Logits, dict[str, Tensor]]:
    model = compiled(name, spec, **options)
    inputs = model_inputs(name, model, padding=None, labels=False)
    return Logits(model), inputs


@pytest.mark.parametrize(("name", "spec", "strict"), CASES)
def test_a_program_computes_the_same(name: str, spec: str, strict: bool) -> None:
    model, inputs = wrapped(name, spec)
    want = model(**inputs)
    program = torch.export.export(model, (), inputs, strict=strict)
    close(program.module()(**inputs), want)
    names = {n for n, _ in model.named_parameters()}
    assert names <= set(program.state_dict) | aliases(model)
    assert {n for n in program.state_dict if "peftc" in n} == {n for n in names if "peftc" in n}


def aliases(model: nn.Module) -> set[str]:
    """All names of parameters that have several."""
    every = list(model.named_parameters(remove_duplicate=False))
    return {n for n, p in every if sum(q is p for _, q in every) > 1}


@pytest.mark.parametrize("name", ["bart", "llama", "vit"])
def test_programs_in_training_mode_have_gradients(name: str) -> None:
    """A program exported in training mode gives edit parameters the model's gradients."""
    model, inputs = wrapped(name, "mam")
    model.train()
    model(**inputs).square().mean().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert want
    program = torch.export.export(model, (), inputs, strict=False).module()
    for p in program.parameters():
        p.grad = None
    program(**inputs).square().mean().backward()
    all_close({n: p.grad for n, p in program.named_parameters() if n in want}, want)


@pytest.mark.parametrize("name", ["t5", "llama", "bert"])
def test_programs_are_saved_and_models_stay_as_they_are(name: str, tmp_path: Path) -> None:
    model, inputs = wrapped(name, "sequential")
    want = model(**inputs)
    torch.export.save(torch.export.export(model, (), inputs, strict=False), tmp_path / "program.pt2")
    close(torch.export.load(tmp_path / "program.pt2").module()(**inputs), want)
    assert torch.equal(model(**inputs), want)
    model(**inputs).sum().backward()
    assert all(p.grad is not None for p in peftc.parameters(model.model).values())


@pytest.mark.parametrize("name", ["bart", "llama", "bert"])
def test_a_new_call_pattern_during_export(name: str) -> None:
    """Tracing it does not add to the exported program."""
    model, inputs = wrapped(name, "mam")
    masked = model_inputs(name, model.model, padding="right", labels=False)
    program = torch.export.export(model, (), masked, strict=False)
    close(program.module()(**masked), model(**masked))
    assert model(**inputs).isfinite().all()
