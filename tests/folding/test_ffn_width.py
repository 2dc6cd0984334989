"""Parallel bottlenecks folded into wider ffns: the same function, without edits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import Before, close, randomise

ACTS = {"bart": "gelu", "bert": "gelu", "t5": "relu", "gpt2": "gelu_tanh", "opt": "relu"}
SPEC = """peft 1
edit wide at layer[*].ffn {{ h += scalar(init=1) * adapter(x, r=3, act={act}) / 2 }}
edit line at layer[*].ffn {{ h += 4 * adapter(x, r=2, act=none, bias=false) }}
edit low at layer[*].ffn.up {{ h += lora(x, r=2) }}
edit cut at layer[*].ffn.hidden {{ h *= vector(init=1) }}"""


def compiled(name: str, spec: str) -> Any:
    model = peftc.compile(spec, zoo.build(name, torch.float64), seed=0).eval()
    randomise(peftc.parameters(model))
    return model


def logits(name: str, model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**zoo.inputs(name, model))[0]


@pytest.mark.parametrize("name", ACTS)
def test_exact_and_an_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    model = compiled(name, SPEC.format(act=ACTS[name]))
    want = logits(name, model)
    base = sum(p.numel() for p in zoo.build(name).parameters())
    report = peftc.fold(model, widen=True)
    assert not report.refused
    assert {one.edit for one in report.folded} == {"wide", "line", "low", "cut"}
    close(logits(name, model), want, "folded")
    assert not any("peftc" in n for n, _ in model.named_modules())
    layers = len([p for p in peftc.sites(model).sites if p.path.endswith("].ffn")])
    d, biases = 32, {"t5": 3 + 4 + 32 + model.config.d_ff if name == "t5" else 0}.get(name, 3 + 4)
    assert sum(p.numel() for p in model.parameters()) - base == layers * ((3 + 4) * 2 * d + biases)
    if name == "t5":  # new biases: transformers has no place for them
        assert report.folded[-1].changes
        return
    model.save_pretrained(tmp_path)
    close(logits(name, type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()), want, "loaded")


@pytest.mark.parametrize("act", ["silu", "softplus", "gelu_tanh"])
def test_edits_with_another_activation_stay(act: str) -> None:
    model = compiled("bart", SPEC.format(act=act))
    want = logits("bart", model)
    report = peftc.fold(model, widen=True)
    assert {one.edit for one in report.folded} == {"line", "low", "cut"}
    assert f"is not {act}" in report.refused[0].reason
    close(logits("bart", model), want, "folded in part")


def test_edits_of_a_gate_or_without_a_sum_stay() -> None:
    for name, equation in (
        ("llama", "h += adapter(x, r=2, act=silu)"),
        ("bert", "h += adapter(h, r=2, act=gelu)"),
        ("bert", "h = 2 * h + adapter(x, r=2, act=gelu)"),
        ("bert", "h += adapter(x, r=2, act=gelu, norm_in=true)"),
        ("bart", "h += adapter(res, r=2, act=relu)"),
    ):
        model = compiled(name, f"peft 1\nedit e at layer[*].ffn {{ {equation} }}")
        want = logits(name, model)
        report = peftc.fold(model, widen=True)
        assert [one.edit for one in report.refused] == ["e"]
        assert "not wider" in report.refused[0].reason
        assert torch.equal(logits(name, model), want)


@pytest.mark.parametrize(
    ("other", "blocked"),
    [
        ("edit o at layer[*].ffn.down { h += adapter(h, r=2, act=tanh) }", True),
        ("edit o at layer[*].ffn { h *= gate(x) }", False),  # after the ffn, on the sum
        ("train o = [w] at layer[*].ffn.up", False),  # folds first; its parameter stays trainable
    ],
)
def test_next_to_an_edit_that_stays(other: str, blocked: bool) -> None:
    model = compiled("bert", f"peft 1\nedit e at layer[*].ffn {{ h += adapter(x, r=2, act=gelu) }}\n{other}")
    want = logits("bert", model)
    report = peftc.fold(model, widen=True)
    assert ("e" in {one.edit for one in report.folded}) != blocked, report
    close(logits("bert", model), want, "beside")


def test_after_an_edit_that_is_no_sum() -> None:
    spec = "peft 1\nedit o at layer[*].ffn { h *= gate(x) }\nedit e at layer[*].ffn { h += adapter(x, r=2, act=gelu) }"
    model = compiled("bert", spec)
    want = logits("bert", model)
    assert not peftc.fold(model, widen=True).folded
    assert torch.equal(logits("bert", model), want)


def test_all_or_nothing() -> None:
    model = compiled("bart", "peft 1\nedit e at layer[*].ffn { h += adapter(x, r=2, act=gelu) }")
    with torch.no_grad():
        list(peftc.parameters(model).values())[-1][0] = float("nan")
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError, match="P530"):
        peftc.fold(model, widen=True)
    after = Before.of(model)
    assert after.classes == before.classes
    assert all(v.shape == after.state[k].shape for k, v in before.state.items())
    assert not peftc.fold(copy.deepcopy(model)).folded  # is not the default
