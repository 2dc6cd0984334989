"""Folding a whole model: the same function in the base's own classes. Edits that do not fold keep
working.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.folding.compiled import EDITS, LINEAR, MIXED, compiled, logits
from tests.laws.harness import Before, close
from tests.matrix import some


def random_spec(seed: int) -> str:
    """A random spec of four edits from the table. No two assign one weight."""
    source = random.Random(seed)
    near = source.choice((("attn.v",), ("attn.o", "attn"), ("ffn.hidden", "ffn.down", "ffn"), tuple(EDITS)))
    choices: list[tuple[str, str]] = []
    while len(choices) < 4:
        place, line = (where := source.choice(near)), source.choice(EDITS[where])
        if "w = " not in line or not any(p == place and "w = " in other for p, other in choices):
            choices.append((place, line))
    return "\n".join(f"edit e{i} at layer[*].{place} {{ {line} }}" for i, (place, line) in enumerate(choices))


@pytest.mark.parametrize("seed", some(range(24), 3))
def test_folding_keeps_the_function(seed: int) -> None:
    """Several edits at one Linear, foldable or not, in any order: folding all or some keeps the
    function.
    """
    name = ("llama", "gpt2", "bart", "t5")[seed % 4]
    spec = random_spec(seed)
    model, _ = compiled(name, spec)
    want = logits(name, model)
    source = random.Random(seed)
    for only in ([f"e{source.randrange(4)}"], None):
        with contextlib.suppress(peftc.PeftcError):  # one that does not fold
            peftc.fold(model, only=only)
        close(logits(name, model), want, spec)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_one_of_several_edits_folds_only_if_it_acts_last(name: str) -> None:
    """Edits at `ffn.hidden` act before those at `ffn`, whatever their order in the spec."""
    spec = "edit e at layer[*].ffn { z += lora(z, r=2) }\nedit f at layer[*].ffn.hidden { h += lora(h, r=2) }"
    model, _ = compiled(name, spec)
    want = logits(name, model)
    with pytest.raises(peftc.PeftcError, match="`e`, which is not folded, stands between"):
        peftc.fold(model, only="f")
    peftc.fold(model, only="e")
    close(logits(name, model), want)
    peftc.fold(model, only="f")
    close(logits(name, model), want)


@pytest.mark.parametrize("name", some(["bart", "t5", "gpt2", "llama"], 2))
def test_edits_that_stay_keep_working(name: str) -> None:
    """Edits that stay keep their parameters, trainable. `remove` then gives the folded base."""
    model, before = compiled(name, MIXED)
    parameters = {k: p for k, p in peftc.parameters(model).items() if k.startswith("p/")}
    want = logits(name, model)
    report = peftc.fold(model)
    assert [f.edit for f in report.folded] == ["a", "b", "c"]
    assert [r.edit for r in report.refused] == ["p"]
    assert "prefix" in report.refused[0].reason
    remaining = peftc.parameters(model)
    assert list(remaining) == list(parameters)
    assert all(remaining[key] is value for key, value in parameters.items())
    close(logits(name, model), want)
    assert {k for k, p in model.named_parameters() if p.requires_grad} == {
        k for k, p in model.named_parameters() if any(p is q for q in remaining.values())
    }
    model(**zoo.inputs(name, model))[0].sum().backward()
    assert all(p.grad is not None for p in remaining.values())
    peftc.remove(model)
    now = Before.of(model)
    assert now.classes == before.classes
    assert {k: v for k, v in now.requires_grad.items() if k in before.requires_grad} == before.requires_grad
    differing = {k for k, v in before.state.items() if not torch.equal(v, now.state[k])}
    assert differing <= {c.parameter for c in report.changes} | {
        k for k in now.state if k.startswith(("lm_head", "head"))
    }
    base = logits(name, model)
    peftc.compile("peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=2), kv) }", model, seed=0)
    with torch.no_grad():
        for key, p in peftc.parameters(model).items():
            p.copy_(remaining[key])
    close(logits(name, model), want)
    assert not torch.equal(base, want)


def test_a_partial_fold_equals_compiling_the_remaining_edits() -> None:
    model, _ = compiled("bart", MIXED)
    peftc.fold(model)
    other, _ = compiled("bart", "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }")
    assert list(model.state_dict()) == list(other.state_dict())
    assert [n for n, _ in peftc.graphs(model).items()] == [n for n, _ in peftc.graphs(other).items()]
    assert [r.code for r in peftc.graphs(model).values()] == [r.code for r in peftc.graphs(other).values()]


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_one_edit_can_be_folded_by_name(name: str) -> None:
    model, _ = compiled(name, LINEAR)
    want = logits(name, model)
    report = peftc.fold(model, only=["b"])
    assert [f.edit for f in report.folded] == ["b"]
    assert {r.edit: r.reason for r in report.refused} == {"a": "it was not asked for", "c": "it was not asked for"}
    assert {k.partition("/")[0] for k in peftc.parameters(model)} == {"a", "c"}
    close(logits(name, model), want)
    peftc.fold(model)
    close(logits(name, model), want)
    with pytest.raises(peftc.PeftcError, match="P410"):
        peftc.fold(model)


def test_a_folded_model_can_be_compiled_again_copied_and_saved(tmp_path: Any) -> None:
    model, before = compiled("llama", LINEAR)
    peftc.fold(model)
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "hf")
    assert torch.equal(logits("llama", torch.load(tmp_path / "model.pt", weights_only=False)), logits("llama", twin))
    assert list(model.state_dict()) == list(before.state)
    peftc.compile("peft 1\n" + LINEAR, model, seed=0)
    close(logits("llama", model), logits("llama", twin))  # a magnitude times w / ‖w‖ is w but for rounding
    peftc.remove(model)
    assert torch.equal(logits("llama", model), logits("llama", twin))


# Changed entries
# --------------------------------------------------------------------------------------------------


def test_a_fused_projection_changes_in_its_rows_alone() -> None:
    model, before = compiled("gpt2", "edit e at layer[1].attn.v { h += lora(x, r=2) }")
    report = peftc.fold(model)
    (change,) = report.changes
    assert change.parameter == "transformer.h.1.attn.c_attn.weight"
    assert change.entries == 32 * 32
    old, new = before.state[change.parameter], model.state_dict()[change.parameter]
    assert torch.equal(old[:, :64], new[:, :64])  # stored (in, out): the columns of q and k
    assert not torch.equal(old[:, 64:], new[:, 64:])
    same = {k for k, v in model.state_dict().items() if torch.equal(v, before.state[k])}
    assert same == set(before.state) - {change.parameter}


def test_a_new_bias_is_reported_and_used() -> None:
    model, before = compiled("llama", "edit e at layer[*].attn.q { h += vector(init=0) }")
    want = logits("llama", model)
    report = peftc.fold(model)
    assert {c.parameter for c in report.changes if c.created} == set(model.state_dict()) - set(before.state)
    assert "new biases: model.layers.0.self_attn.q_proj.bias and 2 more" in str(report)
    close(logits("llama", model), want)
    assert model.get_submodule("model.layers.0.self_attn.q_proj").bias.requires_grad


def test_a_new_bias_next_to_edits_that_stay() -> None:
    spec = (
        "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }\nedit e at layer[*].attn.q { h += vector(init=0) }"
    )
    model, before = compiled("llama", spec)
    want = logits("llama", model)
    peftc.fold(model)
    close(logits("llama", model), want)
    bias = model.get_submodule("model.layers.0.self_attn.q_proj").bias
    assert not bias.requires_grad
    peftc.remove(model)
    assert bias.requires_grad
    assert set(model.state_dict()) - set(before.state) == {f"model.layers.{i}.self_attn.q_proj.bias" for i in range(3)}


def test_a_new_bias_of_some_rows_is_zero_elsewhere() -> None:
    model, _ = compiled("gpt2", "edit e at layer[0].attn.k { h += vector(init=0) }")
    want = logits("gpt2", model)
    (change,) = peftc.fold(model).changes
    assert (change.parameter, change.entries, change.total) == ("transformer.h.0.attn.c_attn.bias", 32, 96)
    close(logits("gpt2", model), want)


def test_trained_values_stay() -> None:
    model, before = compiled(
        "bert", "train n = [w, b] at layer[*].norm\nedit e at layer[*].ffn { h += adapter(h, r=2) }"
    )
    want = logits("bert", model)
    report = peftc.fold(model)
    assert [f.edit for f in report.folded] == ["n"]
    assert all(c.entries == c.total == 32 for c in report.changes)
    close(logits("bert", model), want)
    name = report.changes[0].parameter
    value = model.state_dict()[name].clone()
    assert not model.get_parameter(name).requires_grad  # the base of what is left to train
    peftc.remove(model)
    assert torch.equal(model.state_dict()[name], value)
    assert not torch.equal(value, before.state[name])
    assert model.get_parameter(name).requires_grad


def test_parameters_that_stay_trained_are_not_folded_into() -> None:
    model, _ = compiled("bert", "train n = [b] at layer[*].attn.q\nedit e at layer[*].attn.q { h *= vector(init=1) }")
    with pytest.raises(peftc.PeftcError, match=r"trained by `n`, which stays"):
        peftc.fold(model, only="e")
    want = logits("bert", model)
    peftc.fold(model)
    close(logits("bert", model), want)


def test_shared_parameters_fold_wherever_they_are_used() -> None:
    spec = (
        "let s = shared(lora(r=2))\nedit a at layer[*].attn.q { h += s(x) }\n"
        "edit b at layer[*].attn.k { h += s(x) }\nedit c at layer[*].attn.v { h += adapter(h, r=2) }"
    )
    model, _ = compiled("bart", spec)
    want = logits("bart", model)
    shared = peftc.parameters(model)["a/s/lora.A"]
    peftc.fold(model, only=["a"])
    close(logits("bart", model), want)
    assert peftc.parameters(model)["b/s/lora.A"] is shared
    peftc.fold(model)
    close(logits("bart", model), want)
    assert {k.partition("/")[0] for k in peftc.parameters(model)} == {"c"}


# Precision
# --------------------------------------------------------------------------------------------------


def test_the_share_that_survives_rounding_is_reported() -> None:
    model = zoo.build("llama", torch.bfloat16)
    peftc.compile("peft 1\n" + LINEAR, model, seed=0)
    with torch.no_grad():
        for key, p in peftc.parameters(model).items():
            if key.endswith(".B"):
                p.fill_(1e-4)
    report = peftc.fold(model, only=["a"])
    assert all(0 < c.survived < 0.9 and c.dtype == "bfloat16" for c in report.changes)
    assert "survived rounding to bfloat16" in str(report)


def test_several_folds_are_rounded_once() -> None:
    """Two small changes that bfloat16 would round away one by one."""
    spec = "\n".join(f"edit e{i} at layer[*].attn.q {{ w += lowrank(r=2) }}" for i in range(8))
    model = zoo.build("llama", torch.bfloat16)
    peftc.compile("peft 1\n" + spec, model, seed=0)
    parameters = peftc.parameters(model)
    with torch.no_grad():
        for key, p in parameters.items():
            p.fill_(0.02 if key.endswith(".B") else 0.01)
    linear = "model.layers.0.self_attn.q_proj"
    before = model.get_submodule(linear).weight.detach().clone()
    (one,) = (p for k, p in parameters.items() if k.startswith("e0/decoder.layer[0].") and k.endswith(".B"))
    (other,) = (p for k, p in parameters.items() if k.startswith("e0/decoder.layer[0].") and k.endswith(".A"))
    delta = 8 * (one @ other).detach()
    peftc.fold(model)
    after = model.get_submodule(linear).weight
    assert (after != (before.float() + delta).to(torch.bfloat16)).float().mean() < 0.01
    assert (after != before).float().mean() > 0.05
