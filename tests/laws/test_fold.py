"""Folding, beyond `test_laws.py`: the folded model is plain, refusals have reasons, rounding is
correct.
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
    """The base's own classes, the base's state-dict keys and shapes, and the base's
    `requires_grad`.
    """
    case = Case(NAMED[method], name).at_random()
    peftc.fold(case.model)
    now = {key: type(module) for key, module in case.model.named_modules()}
    assert now == case.before.classes
    state = case.model.state_dict()
    new = set(state) - set(case.before.state)
    assert all(key.endswith("bias") for key in new)
    assert all(state[key].shape == value.shape for key, value in case.before.state.items())
    assert state.keys() >= case.before.state.keys()


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
def test_refusals_have_reasons(name: str, method: str) -> None:
    plan = peftc.plan(NAMED[method].text, zoo.config(name))
    assert not plan.edits[0].foldable
    assert REFUSED[method] in plan.edits[0].reason


@pytest.mark.parametrize("name", TIED)
def test_tied_matrices_are_refused(name: str) -> None:
    case = Case(NAMED["head"], name).at_random()
    plan = peftc.plan(NAMED["head"].text, zoo.config(name))
    assert "tied" in plan.edits[0].reason
    with torch.no_grad():
        want = case.model(**case.batches[0])[0]
        before = copy.deepcopy(case.model.state_dict())
        report = peftc.fold(case.model)
        assert not report.folded
        assert all("tied" in refusal.reason for refusal in report.refused)
        assert torch.equal(case.model(**case.batches[0])[0], want)
    assert all(torch.equal(before[k], v) for k, v in case.model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_non_finite_change_is_not_written(bad: float) -> None:
    case = Case(NAMED["lora"], "llama").at_random()
    with torch.no_grad():
        next(iter(case.parameters.values())).view(-1)[0] = bad
    with pytest.raises(peftc.PeftcError):
        peftc.fold(case.model)
    state = case.model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in case.before.state.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """W' = round(float32(W) + float32(Δ)): the change is not rounded by itself."""
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
    assert differ < 0.01  # float32 sums may differ in order; rounding Δ alone would change 5 %
