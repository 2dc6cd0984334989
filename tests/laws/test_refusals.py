"""Mistakes that need a model to be seen: each has a code and a span, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import Before
from tests.laws.recipes import NAMED

MISTAKES = {  # what is wrong: (spec, family of the code, the text that is underlined)
    "unknown form": ("edit e at layer[*].ffn { h += adaptor(x, r=4) }", "P1", "adaptor"),
    "unknown argument": ("edit e at layer[*].ffn { h += adapter(x, r=4, depth=2) }", "P1", "depth"),
    "missing argument": ("edit e at layer[*].attn.q { h += lora(x) }", "P1", "lora"),
    "unknown activation": ("edit e at layer[*].ffn { h += adapter(x, r=4, act=rleu) }", "P1", "rleu"),
    "unknown site": ("edit e at layer[*].attn.croos { h += adapter(x, r=4) }", "P2", "croos"),
    "unknown state": ("edit e at layer[*].ffn { g += adapter(x, r=4) }", "P", "g"),
    "state of another site": ("edit e at layer[*].ffn { kv = concat(prefix(len=3), kv) }", "P", "kv"),
    "dead arm": ("edit e at layer[*].attn.q | layer[*].attn.vproj { h += lora(x, r=4) }", "P2", "vproj"),
    "index out of range": ("edit e at layer[0, 99].ffn { h += adapter(x, r=4) }", "P2", "99"),
    "dead glob": ('edit e at "model.nothing.*" { h += lora(x, r=4) }', "P2", "nothing"),
    "rank too big": ("edit e at layer[*].attn.q { h += lora(x, r=4096) }", "P3", "4096"),
    "alpha zero": ("edit e at layer[*].attn.q { h += lora(x, r=4, alpha=0) }", "P", "0"),
    "alpha negative": ("edit e at layer[*].attn.q { h += lora(x, r=4, alpha=-5) }", "P", "-5"),
    "dropout one": ("edit e at layer[*].attn.q { h += lora(x, r=4, dropout=1) }", "P", "1"),
    "dropout negative": ("edit e at layer[*].attn.q { h += lora(x, r=4, dropout=-0.5) }", "P", "-0.5"),
    "rank zero": ("edit e at layer[*].ffn { h += adapter(x, r=0) }", "P", "0"),
    "shape mismatch": ("edit e at layer[*].ffn.up { h += x }", "P3", "x"),
    "prefix of a hidden state": ("edit e at layer[*].ffn { h += prefix(len=3) }", "P3", "prefix"),
    "two assignments": (
        "edit e at layer[*].ffn { h = adapter(x, r=4) }\nedit f at layer[*].ffn { h = adapter(x, r=2) }",
        "P3",
        "h",
    ),
    "failed expectation": (
        "edit e at layer[*].ffn { h += adapter(x, r=4) }\nexpect trained <= 10",
        "P",
        "trained <= 10",
    ),
    "expectation of an edit that is not there": (
        "edit e at layer[*].ffn { h += adapter(x, r=4) }\nexpect foldable(qv)",
        "P",
        "qv",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_mistake_has_a_code_and_a_span_and_changes_nothing(name: str, mistake: str) -> None:
    body, family, underlined = MISTAKES[mistake]
    text = "peft 1\n" + body
    model = zoo.build(name)
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError) as caught:
        peftc.compile(text, model, seed=0)
    errors = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert errors
    first = errors[0]
    assert first.code.startswith(family), first
    shown = text[first.span.start : first.span.end]
    assert underlined in shown, f"{shown!r} is underlined: {first.message}"
    assert len(shown) <= len(underlined) + 45, f"{shown!r} is more than it takes: {first.message}"
    before.assert_same(model)


def test_several_mistakes_are_reported_at_once() -> None:
    text = (
        "peft 1\n"
        "edit a at layer[*].ffn { h += adaptor(x, r=4) }\n"
        "edit b at layer[*].attn.q { h += lora(x, r=4, alhpa=3) }\n"
        "edit c at layer[*].attn.q { h += lora(x, r=4, dropout=7) }\n"
    )
    with pytest.raises(peftc.PeftcError) as caught:
        peftc.compile(text, zoo.build("bert"))
    lines = {text.count("\n", 0, d.span.start) for d in caught.value.diagnostics}
    assert lines == {1, 2, 3}


class Injected(RuntimeError):
    pass


class Bomb:
    """Fails at the k-th thing that a compilation does to a module: setting an attribute, or registering one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
        self.left, self.armed = k, False
        for name in ("__setattr__", "register_module", "register_parameter", "add_module", "__delattr__"):
            self._wrap(monkeypatch, name)
        monkeypatch.setattr(nn.Module, "requires_grad_", self._counted(nn.Module.requires_grad_))
        monkeypatch.setattr(torch.Tensor, "requires_grad_", self._counted(torch.Tensor.requires_grad_))

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(nn.Module, name, self._counted(getattr(nn.Module, name)))

    def _counted(self, original: Any) -> Any:
        def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.left -= 1
                if self.left == 0:
                    raise Injected
            return original(module, *args, **kwargs)

        return counted


@pytest.mark.parametrize("method", ["mam", "dora", "prefix-mlp"])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_failure_in_the_middle_of_an_install_leaves_the_model_as_it_was(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step fails, class, parameters, hooks and requires_grad are what they were; then a compilation works."""
    model = zoo.build(name)
    before = Before.of(model)
    given = zoo.inputs(name, model)
    with torch.no_grad():
        want = model(**given)[0]
    k, failures = 1, 0
    while compile_until(k, NAMED[method].text, model, monkeypatch):
        failures += 1
        assert not is_compiled(model)
        before.assert_same(model)
        k = k + 1 if k < 12 else int(k * 1.7)
    assert failures >= 3, "nothing was made to fail"
    assert is_compiled(model)
    peftc.remove(model)
    before.assert_same(model)
    with torch.no_grad():
        assert torch.equal(model(**given)[0], want)


def compile_until(k: int, text: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compiles with a failure at step k; False where it ended before that step."""
    with monkeypatch.context() as patch:
        bomb = Bomb(patch, k)
        bomb.armed = True
        try:
            peftc.compile(text, model, seed=0)
        except Exception:
            return True
        finally:
            bomb.armed = False
    assert bomb.left > 0, "a failure was swallowed"
    return False


def is_compiled(model: nn.Module) -> bool:
    try:
        return bool(peftc.parameters(model))
    except peftc.PeftcError:
        return False


def test_an_edit_where_attention_cannot_take_it_is_refused_when_it_runs() -> None:
    """A prefix under an implementation that takes no mask is an error with a code, never a wrong result."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    model = zoo.build("llama")
    peftc.compile(NAMED["prefix"].text, model, seed=0)
    AttentionInterface.register("varlen_only", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = "varlen_only"
    with pytest.raises(peftc.PeftcError):
        model(**zoo.inputs("llama", model))
