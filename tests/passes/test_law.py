"""A compiled spec equals its equations as passes: outputs, gradients, copies and generation."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.matrix import checkerboard
from tests.passes.recipes import RECIPES

SPECS = Path(__file__).parents[2] / "specs"
FAMILIES = ("llama", "bart", "gpt2")
TOLERANCE = 1e-10


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(peftc.parameters(model).items()):
            assert parameter.requires_grad, name
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def pass_names(model: nn.Module) -> dict[str, str]:
    """The names of parameters, without that of the form: `qv/decoder.layer[0].attn.self.q/A`."""
    return {f"{n.rpartition('/')[0]}/{n.rpartition('.')[2]}": n for n in peftc.parameters(model)}


def copy_values(source: nn.Module, target: nn.Module) -> None:
    names, values, own = pass_names(source), peftc.parameters(source), peftc.parameters(target)
    assert pass_names(target).keys() == names.keys()
    with torch.no_grad():
        for key, name in pass_names(target).items():
            assert own[name].shape == values[names[key]].shape, key
            own[name].copy_(values[names[key]])


@pytest.mark.parametrize(("recipe", "family"), checkerboard(list(RECIPES), FAMILIES, 3))
def test_a_spec_equals_its_equations_as_passes(recipe: str, family: str) -> None:
    settings, passes = RECIPES[recipe]
    base = zoo.build(family, torch.float64)
    spec, own = copy.deepcopy(base), copy.deepcopy(base)
    peftc.compile(SPECS / f"{recipe}.peft", spec, settings=settings, seed=0)
    randomise(spec)
    for name, (selector, function) in passes.items():
        peftc.apply(function, own, at=selector, name=name, seed=0)
    copy_values(spec, own)
    batch = zoo.inputs(family, base, padding="right", labels=True)
    before = base(**batch).logits
    with torch.no_grad():
        expected = spec(**batch).logits
        torch.testing.assert_close(own(**batch).logits, expected, rtol=0, atol=TOLERANCE)
    assert (expected - before).abs().max() > 1e-6
    for model in (spec, own):
        model.train()
        model(**batch).loss.backward()
        model.eval()
    gradients = peftc.parameters(own)
    for key, name in pass_names(spec).items():
        grad = peftc.parameters(spec)[name].grad
        torch.testing.assert_close(gradients[pass_names(own)[key]].grad, grad, rtol=0, atol=TOLERANCE)
    assert all(p.grad is None for n, p in own.named_parameters() if "peftc" not in n)
    duplicate = copy.deepcopy(own)
    torch.testing.assert_close(duplicate(**batch).logits, expected, rtol=0, atol=TOLERANCE)
    prompt = {k: v for k, v in zoo.inputs(family, base, padding="left").items() if "decoder" not in k}
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    tokens = [model.generate(**prompt, **options).logits for model in (spec, own)]
    for one, other in zip(*tokens, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    with peftc.disabled(own):
        assert torch.equal(own(**batch).logits, before)
    peftc.remove(own)
    assert torch.equal(own(**batch).logits, before)
    assert pickle.dumps(list(own.state_dict())) == pickle.dumps(list(base.state_dict()))
