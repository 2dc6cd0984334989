"""Folds that are refused or fail leave the model unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.folding import FoldReport
from tests import zoo
from tests.folding.compiled import LINEAR, MIXED, compiled, logits
from tests.laws.harness import Before, close, randomise


def assert_unchanged(model: nn.Module, before: Before, parameters: dict[str, torch.Tensor]) -> None:
    before.assert_same(model)
    assert list(peftc.parameters(model)) == list(parameters)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_is_refused_before_anything_is_written(bad: float) -> None:
    model, _ = compiled("bart", MIXED)
    parameters = peftc.parameters(model)
    with torch.no_grad():
        next(p for k, p in parameters.items() if k.startswith("c/decoder.layer[2]") and "lowrank" in k).fill_(bad)
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.fold(model)
    (diagnostic,) = excinfo.value.diagnostics
    assert diagnostic.code == "P530"
    assert "k_proj.weight" in diagnostic.message
    now = Before.of(model)
    assert now.classes == before.classes
    for key, value in before.state.items():
        assert torch.equal(now.state[key].nan_to_num(7.0), value.nan_to_num(7.0))


def test_too_large_for_half_precision_is_refused() -> None:
    model, _ = compiled("llama", "edit e at layer[*].attn.q { h *= vector(init=1) }", torch.float16)
    with torch.no_grad():
        next(iter(peftc.parameters(model).values())).fill_(1e6)
    with pytest.raises(peftc.PeftcError, match="infinite entries in float16"):
        peftc.fold(model)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_a_tied_matrix_is_refused_by_name(name: str) -> None:
    model, _ = compiled(name, "edit e at head { h += lora(x, r=2) }\nedit f at layer[*].attn.q { h += lora(x, r=2) }")
    want = logits(name, model)
    report = peftc.fold(model)
    assert [f.edit for f in report.folded] == ["f"]
    assert "tied" in report.refused[0].reason
    close(logits(name, model), want)


def test_weights_that_are_not_loaded_are_refused() -> None:
    model, _ = compiled("llama", LINEAR)
    model.get_submodule("model.layers.2").to("meta")
    with pytest.raises(peftc.PeftcError, match="P527"):
        peftc.fold(model)


def test_a_quantised_weight_stays() -> None:
    model = zoo.build("llama").requires_grad_(False)
    peftc.compile("peft 1\n" + LINEAR, model, seed=0)
    linear = model.get_submodule("model.layers.1.self_attn.k_proj")
    linear.weight = nn.Parameter((linear.weight * 100).to(torch.int8), requires_grad=False)
    report = peftc.fold(model)
    assert [f.edit for f in report.folded] == ["a", "b"]
    assert "`model.layers.1.self_attn.k_proj.weight` is quantised (int8)" in report.refused[0].reason


class NoBias(nn.Linear):
    """A Linear that ignores its bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight)


def test_a_linear_that_ignores_its_bias_gets_none() -> None:
    model = zoo.build("llama", torch.float64)
    model.get_submodule("model.layers.0.self_attn.q_proj").__class__ = NoBias
    peftc.compile("peft 1\nedit e at layer[*].attn.q { h += vector(init=0) }\n" + LINEAR, model, seed=0)
    randomise(peftc.parameters(model))
    want = logits("llama", model)
    report = peftc.fold(model)
    close(logits("llama", model), want)
    reasons = {r.edit: r.reason for r in report.refused}
    assert "has no bias" in reasons["e"]


def test_an_unknown_edit_and_one_that_does_not_fold() -> None:
    model, _ = compiled("bart", MIXED)
    before, parameters = Before.of(model), peftc.parameters(model)
    with pytest.raises(peftc.PeftcError, match=r"P532.*no edit `bb`(.|\n)*did you mean"):
        peftc.fold(model, only=["bb"])
    with pytest.raises(peftc.PeftcError, match=r"P531.*`p` does not fold: .*prefix"):
        peftc.fold(model, only=["a", "p"])
    assert_unchanged(model, before, parameters)


def test_inside_disabled_nothing_is_folded_or_saved(tmp_path: Any) -> None:
    model, _ = compiled("bart", MIXED)
    with peftc.disabled(model):
        with pytest.raises(peftc.PeftcError, match="P529"):
            peftc.fold(model)
        with pytest.raises(peftc.PeftcError, match="P529"):
            peftc.save(model, tmp_path)


class Injected(Exception):
    pass


@pytest.mark.parametrize("where", ["warm", "apply", "planned", "prepare"])
def test_a_failure_in_the_middle_leaves_the_compiled_model(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.installation import builder, compiled_model, reinstall

    spec = MIXED + "\nedit d at layer[*].attn.q { h += vector(init=0) }"
    model, _ = compiled("llama", spec)
    before, parameters, want = Before.of(model), peftc.parameters(model), logits("llama", model)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Injected

    with monkeypatch.context() as patch:
        match where:
            case "warm":
                patch.setattr(reinstall, "warm", fail)
            case "planned":
                patch.setattr(compiled_model, "plan_on", fail)
            case _:
                patch.setattr(builder.InstallationBuilder, where, fail)
        with pytest.raises(Injected):
            peftc.fold(model)
    assert_unchanged(model, before, parameters)
    assert torch.equal(logits("llama", model), want)
    assert isinstance(peftc.fold(model), FoldReport)
    close(logits("llama", model), want)
