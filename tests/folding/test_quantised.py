"""Edits of a quantised base (torchao): applied on the dequantised weights, and folded into them on
request.
"""

from __future__ import annotations

import copy
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import randomise

TORCHAO = Path(sys.prefix) / "torchao"  # where `make` installs it: every process that finds it on its path imports it
if not TORCHAO.is_dir():
    pytest.skip("torchao is not installed", allow_module_level=True)

Q = "model.layers.0.self_attn.q_proj"
EQUATIONS = ("h += lora(x, r=2)", "w = magnitude(w + lowrank(r=2))")


@cache
def _quantised(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.path.append(str(TORCHAO))
        try:
            torchao = import_module("torchao.quantization")
        finally:
            sys.path.remove(str(TORCHAO))
        model = zoo.build(name, torch.float32).eval()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def quantised(name: str = "llama") -> Any:
    return copy.deepcopy(_quantised(name))


def spec(equation: str) -> str:
    return f"peft 1\nedit e at layer[*].attn.q | layer[*].ffn.down {{ {equation} }}"


def logits(model: Any) -> torch.Tensor:
    return model(**zoo.inputs("llama", model)).logits


@pytest.mark.parametrize("equation", EQUATIONS)
def test_trained_on_quantised_weights_and_folded_on_demand(equation: str) -> None:
    """Equal to the same edits of a base with the dequantised weights."""
    model, plain = quantised(), quantised()
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.dequantize())
    for one in (model, plain):
        peftc.compile(spec(equation), one, seed=0)
        randomise(peftc.parameters(one))
    want = logits(plain)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    logits(model).pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in peftc.parameters(model).values())

    with torch.no_grad():
        before = logits(model)
        report = peftc.fold(model)  # is not asked to write out weights
        assert [(one.edit, "quantised" in one.reason) for one in report.refused] == [("e", True)]
        assert torch.equal(logits(model), before)
        peftc.fold(model, dequantize=True)
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    assert type(model.get_parameter(f"{Q}.weight")) is torch.nn.Parameter
    assert type(model.get_parameter(f"{Q.replace('q_proj', 'k_proj')}.weight")) is not torch.nn.Parameter


def test_wider_on_demand() -> None:
    """Widened weights are dequantised, and only if that is requested."""
    model, inputs = quantised("bert"), zoo.inputs("bert", _quantised("bert"))
    peftc.compile("peft 1\nedit e at layer[*].ffn { h += adapter(x, r=3, act=gelu) }", model, seed=0).eval()
    randomise(peftc.parameters(model))
    with torch.no_grad():
        want = model(**inputs)[0]
        report = peftc.fold(model, widen=True)
        assert [(one.edit, "`dequantize=True`" in one.reason) for one in report.refused] == [("e", True)]
        report = peftc.fold(model, widen=True, dequantize=True)
        assert [one.edit for one in report.folded] == ["e"]
        torch.testing.assert_close(model(**inputs)[0], want, rtol=1e-5, atol=1e-5)
    layer: Any = model.get_submodule("bert.encoder.layer.0")
    assert type(layer.intermediate.dense.weight) is type(layer.output.dense.weight) is torch.nn.Parameter
    assert layer.intermediate.dense.weight.dtype == torch.float32


def test_the_recipe_changes_nothing_at_first_and_is_saved(tmp_path: Path) -> None:
    model = quantised()
    with torch.no_grad():
        base = logits(model)
        peftc.compile(Path("specs/qlora.peft"), model, seed=0, settings={"r": 4})
        assert torch.equal(logits(model.eval()), base)
        randomise(peftc.parameters(model))
        peftc.save(model, tmp_path)
        loaded = peftc.load(tmp_path, quantised())
        assert torch.equal(logits(loaded.eval()), logits(model))
        assert torch.equal(logits(peftc.remove(model)), base)


def test_training_a_quantised_weight_is_refused() -> None:
    model = quantised()
    with pytest.raises(peftc.PeftcError, match="P542"):
        peftc.compile("peft 1\ntrain e = [w] at layer[*].attn.q", model)
    peftc.compile("peft 1\nedit e at layer[*].attn.q { w += sparse(density=0.1) }", model)
    with pytest.raises(peftc.PeftcError, match="P542"):
        peftc.calibrate(model, [zoo.inputs("llama", model, labels=True)])
