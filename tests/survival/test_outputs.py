"""Hidden states and attentions: complete, with the base's shapes and the effect of the edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.matrix import checkerboard
from tests.survival.harness import GENERATING, SOME, SPECIES, compiled, freshly_compiled, layers, model_inputs

pairs = pytest.mark.parametrize(("name", "spec"), SOME)
FLAGS = {"output_hidden_states": True, "output_attentions": True}


def build(name: str, **options: Any) -> Any:
    return zoo.build(name, torch.float64, attn_implementation="eager", **options)


def results(model: nn.Module) -> dict[str, list[Tensor]]:
    """Records the in- and outputs of each layer with hooks."""
    outputs: dict[str, list[Tensor]] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Any, name: str) -> None:
        outputs[name] = [args[0] if args else kwargs["hidden_states"], out if isinstance(out, Tensor) else out[0]]

    for name, layer in layers(model):
        layer.register_forward_hook(lambda *a, name=name: hook(*a, name), with_kwargs=True)
    return outputs


def groups(out: Any, what: str) -> dict[str, tuple[Tensor, ...]]:
    fields = {key: out[key] for key in out if key.endswith(what)}
    assert fields
    assert all(isinstance(value, tuple) and value for value in fields.values())
    return fields


@pairs
def test_hidden_states_are_the_layers_outputs(name: str, spec: str) -> None:
    model, base = compiled(name, spec, attn_implementation="eager"), build(name)
    inputs = model_inputs(name, model, padding="right")
    outputs = results(model)
    with torch.no_grad():
        out, plain = model(**inputs, **FLAGS), base(**inputs, **FLAGS)
    actual, expected = groups(out, "hidden_states"), groups(plain, "hidden_states")
    assert {key: [s.shape for s in states] for key, states in actual.items()} == {
        key: [s.shape for s in states] for key, states in expected.items()
    }
    for key, states in actual.items():
        mine = [
            pair for layer, pair in outputs.items() if ("encoder" in layer) == ("encoder" in key) or len(actual) == 1
        ]
        assert len(states) == len(mine) + 1
        for state, (before, _) in zip(states, mine, strict=False):
            assert torch.equal(state, before), key
        assert torch.equal(states[0], expected[key][0])  # the embedding is not edited
        assert all(not torch.equal(a, b) for a, b in zip(states[1:], expected[key][1:], strict=True)), key


@pairs
def test_attentions_are_distributions_over_all_keys(name: str, spec: str) -> None:
    model, base = compiled(name, spec, attn_implementation="eager"), build(name)
    inputs = model_inputs(name, model, padding="right")
    with torch.no_grad():
        out, plain = model(**inputs, **FLAGS), base(**inputs, **FLAGS)
    actual, expected = groups(out, "attentions"), groups(plain, "attentions")
    assert actual.keys() == expected.keys()
    more = 3 if spec == "mam" else 0  # prefix rows come first
    for key in actual:
        assert len(actual[key]) == len(expected[key]) == {"encoder_attentions": 2}.get(key if name == "bart" else "", 3)
        for i, (one, two) in enumerate(zip(actual[key], expected[key], strict=True)):
            assert one.shape == (*two.shape[:-1], two.shape[-1] + more)
            assert torch.allclose(one.sum(-1), torch.ones(()).to(one))
            assert i == 0 or not torch.equal(one[..., more:], two)


@pytest.mark.parametrize("name", SPECIES)
def test_outputs_recorded_before_compiling_are_still_recorded(name: str) -> None:
    """transformers registers its recording hooks in the first call that needs them, by
    isinstance.
    """
    model = build(name)
    inputs = model_inputs(name, model, padding="right")
    with torch.no_grad():
        want = model(**inputs, **FLAGS)
        peftc.compile("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }", model, seed=0)
        got = model(**inputs, **FLAGS)
    for what in ("hidden_states", "attentions"):
        for key, values in groups(want, what).items():
            assert len(got[key]) == len(values)
            assert all(torch.equal(a, b) for a, b in zip(got[key], values, strict=True)), key


@pytest.mark.parametrize("name", SPECIES)
def test_only_requested_outputs_are_recorded(name: str) -> None:
    model = compiled(name, "lora", attn_implementation="eager")
    inputs = model_inputs(name, model, padding="right")
    model(**inputs, **FLAGS)
    out = model(**inputs)
    assert not [key for key in out if key.endswith(("hidden_states", "attentions")) and "last" not in key]
    plain = build(name)(**inputs, return_dict=False)
    assert len(model(**inputs, return_dict=False)) == len(plain)


@pytest.mark.parametrize(("name", "spec"), checkerboard(GENERATING, ("lora", "mam", "weights")))
def test_outputs_of_generate(name: str, spec: str) -> None:
    model, base = freshly_compiled(name, spec, attn_implementation="eager"), build(name)
    inputs = zoo.inputs(name, model)
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    got, want = (m.generate(**inputs, **options, **FLAGS) for m in (model, base))
    more = 3 if spec == "mam" else 0
    for key in ("decoder_hidden_states", "decoder_attentions", "cross_attentions", "hidden_states", "attentions"):
        if want.get(key) is None:
            continue
        assert len(got[key]) == 3
        for steps, plain in zip(got[key], want[key], strict=True):
            for one, two in zip(steps, plain, strict=True):
                wide = more if "attentions" in key else 0
                assert one.shape == (*two.shape[:-1], two.shape[-1] + wide)


@pairs
def test_isinstance_checks_still_hold(name: str, spec: str) -> None:
    model, base = compiled(name, spec), zoo.build(name)
    generated = 0
    for path, module in base.named_modules():
        mine = model.get_submodule(path)
        generated += type(mine).forward is not type(module).forward
        assert isinstance(mine, type(module)) or "Norm" in type(module).__name__ or "Router" in type(module).__name__
        assert (type(mine).__name__, type(mine).__qualname__) == (type(module).__name__, type(module).__qualname__)
    assert generated >= 3
    assert model._no_split_modules == base._no_split_modules
