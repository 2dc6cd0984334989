"""Tensors that a command fills, and that all sites of an edit have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.refusals import refused

SPEC = """peft 2
form fed(x, r) {
    fixed A[r, d(x)] per edit = buffer
    param B[d(out), r] = kaiming
    f = B @ A @ x
}
edit e at layer[*].attn.q { h += fed(x, r=2) }
"""


def compiled() -> Any:
    return peftc.compile(SPEC, zoo.build("gpt2").double(), seed=0)


def buffer(model: Any) -> torch.nn.Module:
    (module,) = (module for module in model.modules() if "A" in getattr(module, "_buffers", {}))
    return module


def test_they_are_required_for_training() -> None:
    model = compiled().train()
    refused("P544", lambda: model(**zoo.inputs("gpt2", model)))


def test_they_are_saved_once(tmp_path: Path) -> None:
    model = compiled()
    module = buffer(model)
    with torch.no_grad():
        module.get_buffer("A").normal_()
        module.get_buffer("filled").fill_(True)
    peftc.save(model, tmp_path / "own")
    loaded = peftc.load(tmp_path / "own", zoo.build("gpt2").double()).train()
    assert torch.equal(buffer(loaded).get_buffer("A"), module.get_buffer("A"))
    inputs = zoo.inputs("gpt2", model)
    torch.testing.assert_close(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(loaded(**inputs).logits, zoo.build("gpt2").double().eval()(**inputs).logits)
    loaded.train()(**inputs)  # filled
