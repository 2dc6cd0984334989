"""Mistakes that only show on a model: each has a code and a span, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import Before
from tests.laws.recipes import NAMED

MISTAKES = {  # mistake: (spec, first digits of the code, the underlined text)
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
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.compile(text, model, seed=0)
    errors = [d for d in excinfo.value.diagnostics if d.severity == "error"]
    assert errors
    first = errors[0]
    assert first.code.startswith(family), first
    excerpt = text[first.span.start : first.span.end]
    assert underlined in excerpt, f"{excerpt!r} is underlined: {first.message}"
    assert len(excerpt) <= len(underlined) + 45, f"{excerpt!r} is more than it takes: {first.message}"
    before.assert_same(model)


def test_several_mistakes_are_reported_at_once() -> None:
    text = (
        "peft 1\n"
        "edit a at layer[*].ffn { h += adaptor(x, r=4) }\n"
        "edit b at layer[*].attn.q { h += lora(x, r=4, alhpa=3) }\n"
        "edit c at layer[*].attn.q { h += lora(x, r=4, dropout=7) }\n"
    )
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.compile(text, zoo.build("bert"))
    lines = {text.count("\n", 0, d.span.start) for d in excinfo.value.diagnostics}
    assert lines == {1, 2, 3}


class Injected(RuntimeError):
    pass


class Bomb:
    """Counts the writes to the modules and parameters of one model, and fails at the k-th (never if
    k is 0).
    """

    METHODS = ("__setattr__", "__delattr__", "register_module", "register_parameter", "add_module")

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch, k: int = 0) -> None:
        self.k, self.steps = k, 0
        self.own = {id(thing) for thing in (*model.modules(), *model.parameters())}
        for name in self.METHODS:
            monkeypatch.setattr(nn.Module, name, self.counted(getattr(nn.Module, name)))
        monkeypatch.setattr(torch.Tensor, "requires_grad_", self.counted(torch.Tensor.requires_grad_))

    def counted(self, original: Any) -> Any:
        def step(thing: Any, *args: Any, **kwargs: Any) -> Any:
            if id(thing) in self.own:
                self.steps += 1
                if self.steps == self.k:
                    raise Injected
            return original(thing, *args, **kwargs)

        return step


@pytest.mark.parametrize(("name", "method"), [("bart", "mam"), ("llama", "dora"), ("llama", "prefix-mlp")])
def test_a_failure_in_the_middle_of_an_install_leaves_the_model_as_it_was(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write fails, class, parameters, hooks and requires_grad are restored, and a second
    compilation works.
    """
    model, text = zoo.build(name), NAMED[method].text
    before = Before.of(model)
    inputs = zoo.inputs(name, model)
    with torch.no_grad():
        want = model(**inputs)[0]
    with monkeypatch.context() as patch:
        bomb = Bomb(model, patch)
        peftc.compile(text, model, seed=0)
        total = bomb.steps
    peftc.remove(model)
    before.assert_same(model)
    for k in sorted({1, total // 3, 2 * total // 3, *range(max(2, total - 12), total + 1)}):
        with monkeypatch.context() as patch:
            Bomb(model, patch, k)
            with pytest.raises((Injected, peftc.PeftcError)):
                peftc.compile(text, model, seed=0)
        before.assert_same(model)
        with torch.no_grad():
            assert torch.equal(model(**inputs)[0], want)
    peftc.compile(text, model, seed=0)
    peftc.remove(model)
    before.assert_same(model)


def test_a_prefix_under_an_unsupported_attention_is_refused_at_run_time() -> None:
    """A prefix under an attention implementation without a mask is an error with a code, never a
    wrong result.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    model = zoo.build("llama")
    peftc.compile(NAMED["prefix"].text, model, seed=0)
    AttentionInterface.register("varlen_only", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = "varlen_only"
    with pytest.raises(peftc.PeftcError):
        model(**zoo.inputs("llama", model))
