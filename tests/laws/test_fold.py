"""Folding, beyond what `test_laws.py` says of every recipe: what is left, what is refused and why,
how it rounds.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import Case, randomise
from tests.laws.recipe import TIED
from tests.laws.recipes import NAMED
from tests.matrix import checkerboard


@pytest.mark.parametrize(
    ("name", "method"),
    checkerboard(
        ("bart", "t5", "gpt2", "llama"), ("lora", "dora", "ia3", "gamma", "rslora-everywhere", "vera", "said"), 4
    ),
)
def test_a_fully_folded_model_is_plain(name: str, method: str) -> None:
    """Its classes are the base's own, its state dict has the base's keys and shapes, and it is
    trainable as before.
    """
    made = Case(NAMED[method], name).at_random()
    peftc.fold(made.model)
    now = {key: type(module) for key, module in made.model.named_modules()}
    assert now == made.before.classes
    state = made.model.state_dict()
    new = set(state) - set(made.before.state)
    assert all(key.endswith("bias") for key in new)
    assert all(state[key].shape == value.shape for key, value in made.before.state.items())
    assert state.keys() >= made.before.state.keys()


REFUSED = {
    "houlsby": "gelu",
    "seq-bn": "relu",
    "par-bn": "relu",
    "prefix": "prefix",
    "multi-head": "relu",
    "gated-lora": "gate",
    "compacter": "gelu",
    "loreft": "",
}


@pytest.mark.parametrize("method", REFUSED)
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_refusals_say_what_prevents_it(name: str, method: str) -> None:
    plan = peftc.plan(NAMED[method].text, zoo.config(name))
    assert not plan.edits[0].foldable
    assert REFUSED[method] in plan.edits[0].reason


@pytest.mark.parametrize("name", TIED)
def test_tied_matrices_are_refused(name: str) -> None:
    made = Case(NAMED["head"], name).at_random()
    plan = peftc.plan(NAMED["head"].text, zoo.config(name))
    assert "tied" in plan.edits[0].reason
    with torch.no_grad():
        want = made.model(**made.batches[0])[0]
        before = copy.deepcopy(made.model.state_dict())
        report = peftc.fold(made.model)
        assert not report.folded
        assert all("tied" in refusal.reason for refusal in report.refused)
        assert torch.equal(made.model(**made.batches[0])[0], want)
    assert all(torch.equal(before[k], v) for k, v in made.model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nothing_is_written_where_a_change_is_not_finite(bad: float) -> None:
    made = Case(NAMED["lora"], "llama").at_random()
    with torch.no_grad():
        next(iter(made.parameters.values())).view(-1)[0] = bad
    with pytest.raises(peftc.PeftcError):
        peftc.fold(made.model)
    state = made.model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in made.before.state.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """W' = round(float32(W) + float32(Δ)): the change is never rounded by itself."""
    model = zoo.build("llama", dtype)
    peftc.compile(NAMED["lora"].text, model, seed=0)
    parameters = peftc.parameters(model)
    randomise(parameters)
    linear: nn.Linear = model.get_submodule("model.layers.0.self_attn.q_proj")  # type: ignore[assignment]
    a, b = (parameters[f"e/decoder.layer[0].attn.self.q/lora.{k}"].detach() for k in "AB")
    want = (linear.weight.detach().float() + 2.0 * (b @ a)).to(dtype)
    peftc.fold(model)
    folded = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    differ = (folded != want).float().mean()
    assert differ < 0.01  # sums of float32 may be ordered differently; a rounded Δ changes 5 %
