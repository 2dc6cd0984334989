"""A second operation on a compiled model sees what was changed since the first: code, modules,
configuration. What has not changed is not analysed again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

import peftc
from peftc.installation import cached_analysis, compiled_model
from peftc.installation.record import installation_of
from peftc.recognition.analysis import analyse
from tests import zoo

FIRST = "peft 1\nedit a at layer[*].attn.v { h += lora(x, r=2) }\n"
SECOND = "peft 1\nedit f at layer[*].ffn { h += lora(x, r=2) }\n"
INSIDE = "peft 1\nedit m at layer[*].ffn.up { h *= vector(init=1) }\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n"


def doubled(self: LlamaMLP, x: Tensor) -> Tensor:
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotated(x: Tensor) -> Tensor:
    return 0.5 * torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def patch_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LlamaMLP, "forward", doubled)


def patch_code(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LlamaMLP.forward, "__code__", doubled.__code__)


def patch_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama, "rotate_half", rotated)


def patch_instance(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = doubled.__get__(layer.mlp)


def replace_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()


def change_config(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.config._attn_implementation = "eager"


def switch_mode(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.train()


CHANGES = [patch_class, patch_code, patch_function, patch_instance, replace_module, change_config, switch_mode]


@pytest.fixture
def analyses(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each analysis."""
    count = list[None]()
    analyse = compiled_model.base_analysis

    def counted(*args: Any, **kwargs: Any) -> Any:
        count.append(None)
        return analyse(*args, **kwargs)

    monkeypatch.setattr(compiled_model, "base_analysis", counted)
    return count


def outputs(model: nn.Module) -> Tensor:
    return model(**zoo.inputs("llama", model))[0]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [FIRST, INSIDE])
def test_a_second_spec_acts_on_the_code_that_is_there(
    change: Callable[[Any, pytest.MonkeyPatch], None], first: str, analyses: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, base = peftc.compile(first, zoo.build("llama"), seed=0), zoo.build("llama")
    outputs(model)
    done = len(analyses)
    change(model, monkeypatch)
    change(base, monkeypatch)
    peftc.compile(SECOND, model, seed=0, name="second")
    assert (len(analyses) > done) == (change is not switch_mode)
    assert torch.equal(outputs(model), outputs(base.train(model.training)))
    peftc.remove(model, "second")
    assert torch.equal(outputs(model), outputs(base))
    assert torch.equal(outputs(peftc.remove(model)), outputs(base))


def test_an_unchanged_model_is_analysed_once(analyses: list[None]) -> None:
    model = peftc.compile(FIRST, zoo.build("llama"), seed=0)
    outputs(model)
    done = len(analyses)
    peftc.compile(SECOND, model, seed=0, name="second")
    peftc.remove(model, "second")
    assert len(analyses) == done


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_second_model_of_the_same_structure_is_not_analysed_again(
    change: Callable[[Any, pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless anything differs that an analysis depends on."""
    done: list[None] = []

    def counted(*args: Any) -> Any:
        done.append(None)
        return analyse(*args)

    monkeypatch.setattr(cached_analysis, "MOST", 8)
    monkeypatch.setattr(cached_analysis, "_recent", [])
    monkeypatch.setattr(cached_analysis, "analyse", counted)
    first = peftc.compile(SECOND, zoo.build("llama"), seed=0)
    same, base = zoo.build("llama"), zoo.build("llama")
    for model in (same, base):
        if change is not None:
            change(model, monkeypatch)
    peftc.compile(SECOND, same, seed=0)
    assert len(done) == (1 if change in (None, switch_mode) else 2)
    if change is None:
        assert torch.equal(outputs(same), outputs(first))
    assert torch.equal(outputs(peftc.remove(same)), outputs(base))


def test_an_analysis_keeps_no_model_and_there_are_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_analysis, "MOST", 2)
    monkeypatch.setattr(cached_analysis, "_recent", [])
    models = [zoo.build(name) for name in ("llama", "bert", "gpt2")]
    for model in models:
        peftc.sites(model)
    assert [entry[0][2] for entry in cached_analysis._recent] == ["bert", "gpt2"]  # type: ignore[index]
    peftc.sites(models[1])
    assert [entry[0][2] for entry in cached_analysis._recent] == ["gpt2", "bert"]  # type: ignore[index]
    alive = [weakref.ref(model) for model in models]
    del models, model
    gc.collect()
    assert not any(reference() for reference in alive)


def test_an_edited_class_is_generated_anew_when_its_code_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peftc.compile(INSIDE, zoo.build("llama"), seed=0)
    before = dict(installation_of(model).regions)
    monkeypatch.setattr(modeling_llama, "rotate_half", rotated)
    peftc.compile(SECOND, model, seed=0, name="second")
    for name, generated in installation_of(model).regions:
        if name.endswith("attn"):
            assert generated is not before[name]


def test_equal_models_share_a_plan_and_the_classes_that_no_call_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has parameters of its own, and computes what it computes alone."""
    monkeypatch.setattr(cached_analysis, "MOST", 0)
    alone = [peftc.compile(spec, zoo.build("llama"), seed=1) for spec in (FIRST, INSIDE)]
    monkeypatch.setattr(cached_analysis, "MOST", 8)
    monkeypatch.setattr(cached_analysis, "_recent", [])
    for spec, other in zip((FIRST, INSIDE), alone, strict=True):
        models = [peftc.compile(spec, zoo.build("llama"), seed=1) for _ in range(2)]
        records = list(map(installation_of, models))
        assert records[0].planned is records[1].planned
        for (name, one), (_, two) in zip(*(record.regions for record in records), strict=True):
            assert (one is two) == (not one.inline), name
        parameters = [dict(peftc.parameters(model)) for model in (*models, other)]
        assert all(a is not b for a, b in zip(parameters[0].values(), parameters[1].values(), strict=True))
        for name, parameter in parameters[2].items():
            assert torch.equal(parameters[0][name], parameter)
            assert torch.equal(parameters[1][name], parameter)
        with torch.no_grad():
            for parameter in parameters[0].values():
                parameter += 1
        assert torch.equal(outputs(models[1]), outputs(other))
        peftc.remove(models[0])
        assert torch.equal(outputs(models[1]), outputs(other))
        assert torch.equal(outputs(models[0]), outputs(zoo.build("llama")))


def test_specs_that_differ_in_their_text_alone_have_spans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_analysis, "MOST", 8)
    monkeypatch.setattr(cached_analysis, "_recent", [])
    model = zoo.build("llama")
    texts = [FIRST, FIRST.replace("\n", "\n\n# comment\n", 1)]
    hashes = [peftc.plan(text, model).spec.sha256 for text in texts]
    assert hashes[0] != hashes[1]
