"""Edits of the matrices of single experts, which are slices of one stacked parameter: the laws that
hold for every edit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import peftc
from peftc.diagnostics import PeftcError
from tests.experts.models import MODELS, fresh, logits, original, perturb

ROLES = "layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].gate | layer[*].ffn.experts[*].down"
GATELESS = "layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down"


def spec(name: str, equation: str = "w += lowrank(r=2, alpha=4)") -> str:
    return f"peft 1\nedit e at {GATELESS if name == 'nemotron_h' else ROLES} {{ {equation} }}\n"


@pytest.mark.parametrize("name", MODELS)
def test_identity_gradients_fold_save_and_remove(name: str, tmp_path: Path) -> None:
    model, inputs = fresh(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        base = logits(model, inputs)
    cls = type(model)
    peftc.compile(spec(name), model, sample=inputs)
    with torch.no_grad():
        assert torch.equal(logits(model, inputs), base)

    perturb(peftc.parameters(model))
    edited = logits(model, inputs)
    assert not torch.allclose(edited, base)
    edited.square().sum().backward()
    hit = [p for p in peftc.parameters(model).values() if p.grad is not None and bool(p.grad.any())]
    assert len(hit) > len(peftc.parameters(model)) // 2  # not every expert is sent a token

    peftc.save(model, tmp_path / "adapter")
    folded, _ = fresh(name)
    peftc.load(tmp_path / "adapter", folded, sample=inputs)
    with torch.no_grad():
        assert torch.equal(logits(folded, inputs), edited)
    peftc.fold(folded, sample=inputs)
    assert type(folded) is cls
    with torch.no_grad():
        assert (logits(folded, inputs) - edited).abs().max() < 1e-10

    peftc.remove(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "dbrx"])
def test_an_edit_of_one_expert_changes_only_its_tokens(name: str) -> None:
    """w = 0 at one role of one expert zeroes that expert's output, and no other's."""
    model, inputs = fresh(name)
    with torch.no_grad():
        base = logits(model, inputs)
    peftc.compile("peft 1\nedit e at layer[-1].ffn.experts[1].down { w = w * scalar(init=0) }", model, sample=inputs)
    with torch.no_grad():
        edited = logits(model, inputs)
    same = (edited - base).abs().amax(-1) < 1e-12
    assert bool(same.any())
    assert not bool(same.all())


@pytest.mark.parametrize(
    ("name", "stored", "rows"),
    [
        ("mixtral", "model.layers.0.mlp.experts", slice(48, 96)),
        ("gpt_oss", "model.layers.0.mlp.experts", slice(1, 96, 2)),
        ("llama4_text", "model.layers.0.feed_forward.experts", slice(48, 96)),
    ],
)
def test_gate_and_up_are_distinguished(name: str, stored: str, rows: slice) -> None:
    """Setting `up` to zero zeroes the rows that the model's code uses as `up`."""
    edited, inputs = fresh(name)
    peftc.compile("peft 1\nedit e at layer[0].ffn.experts[*].up { w = w * scalar(init=0) }", edited, sample=inputs)
    by_hand, _ = fresh(name)
    fused = by_hand.get_parameter(f"{stored}.gate_up_proj")
    with torch.no_grad():
        (fused if fused.shape[1] == 96 else fused.transpose(1, 2))[:, rows] = 0
        assert torch.equal(logits(edited, inputs), logits(by_hand, inputs))


def test_counts_are_those_of_the_rows() -> None:
    model, inputs = original("mixtral")
    plan = peftc.plan(spec("mixtral"), model, sample=inputs)
    compiled = peftc.compile(spec("mixtral"), fresh("mixtral")[0], sample=inputs)
    banks = [p for n, p in model.named_parameters() if "experts" in n]
    assert plan.totals.changed == sum(p.numel() for p in banks)
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(compiled).values())
    one = peftc.plan("peft 1\nedit e at layer[0].ffn.experts[2].up { w += lowrank(r=2) }", model, sample=inputs)
    assert one.totals.changed == 48 * 32
    assert one.totals.trained == 2 * (48 + 32)


def test_a_whole_parameter_is_trained_and_put_back() -> None:
    model, inputs = fresh("mixtral")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    text = "peft 1\ntrain t = [w] at layer[0].ffn.experts[*].up | layer[0].ffn.experts[*].gate"
    peftc.compile(text, model, sample=inputs)
    (parameter,) = peftc.parameters(model).values()
    assert parameter.requires_grad
    assert parameter.shape == (4, 96, 32)
    perturb(peftc.parameters(model))
    peftc.remove(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_some_rows_of_a_parameter_cannot_be_trained() -> None:
    model, inputs = original("mixtral")
    with pytest.raises(PeftcError, match="P309") as excinfo:
        peftc.plan("peft 1\ntrain t = [w] at layer[*].ffn.experts[*].up", model, sample=inputs)
    (diagnostic, *_) = excinfo.value.diagnostics
    assert diagnostic.help is not None
    assert "at layer[*].ffn.experts[*].gate | layer[*].ffn.experts[*].up" in diagnostic.help


def test_a_hidden_state_of_an_expert_is_refused_with_an_alternative() -> None:
    model, inputs = original("mixtral")
    with pytest.raises(PeftcError, match="P205") as excinfo:
        peftc.plan("peft 1\nedit e at layer[*].ffn.experts[*].up { h += lora(x, r=2) }", model, sample=inputs)
    (diagnostic, *_) = excinfo.value.diagnostics
    assert diagnostic.help is not None
    assert "w += lowrank(" in diagnostic.help


def test_two_edits_of_one_expert_apply_in_order() -> None:
    model, inputs = fresh("gpt_oss")
    text = """peft 1
edit a at layer[*].ffn.experts[*].gate { w += lowrank(r=1) }
edit b at layer[*].ffn.experts[0..1].gate | layer[*].ffn.experts[*].up { w = w * scalar(init=1) }
edit c at layer[*].ffn.experts[1].gate { w += lowrank(r=2) }"""
    peftc.compile(text, model, sample=inputs)
    perturb(peftc.parameters(model))
    with torch.no_grad():
        edited = logits(model, inputs)
        peftc.fold(model, sample=inputs)
        assert (logits(model, inputs) - edited).abs().max() < 1e-10


def test_directions_and_magnitudes_start_at_the_rows_of_the_base() -> None:
    model, inputs = fresh("gpt_oss")
    with torch.no_grad():
        base = logits(model, inputs)
        peftc.compile(spec("gpt_oss", "w = magnitude(w + lowrank(r=2))"), model, sample=inputs)
        assert torch.allclose(logits(model, inputs), base, atol=1e-12)


@pytest.mark.parametrize(
    "equations", ["b += image(w)  w += lowrank(r=2)", "w += lowrank(r=2)  b += image(w)"], ids=["before", "after"]
)
def test_a_bias_computed_from_a_weight_respects_the_order(equations: str) -> None:
    """Equations apply in order, and so does folding: both agree in either order."""
    model, inputs = fresh("gpt_oss")
    base = logits(model, inputs)
    peftc.compile(f"peft 1\nedit e at layer[*].ffn.experts[*].down {{ {equations} }}", model, seed=0)
    perturb(peftc.parameters(model))
    with torch.no_grad():
        want = logits(model, inputs)
        peftc.fold(model)
        assert (logits(model, inputs) - want).abs().max() <= 1e-10
    assert (want - base).abs().max() > 1e-3
