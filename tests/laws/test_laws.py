"""The laws that hold for every recipe on every architecture."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import peftc
from tests.laws.harness import Case, close, compare, loss, visible
from tests.laws.recipes import CASES


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[1]}-{c[0].name}")
def case(request: Any) -> Case:
    torch.set_num_threads(1)
    return Case(*request.param)


def test_identity_at_init(case: Case) -> None:
    """Where a recipe promises identity, logits are the base's bit for bit; where not,
    they differ.
    """
    assert all(edit.identity for edit in case.plan.edits) == case.recipe.identity
    case.at_init()
    with torch.no_grad():
        now = [case.model(**inputs)[0] for inputs in case.batches]
    same = [torch.equal(a, b) for a, b in zip(now, case.base_logits, strict=True)]
    assert all(same) if case.recipe.identity else not any(same)


def test_every_parameter_name_starts_with_an_edit_of_the_spec(case: Case) -> None:
    assert {key.partition("/")[0] for key in case.parameters} == set(case.recipe.edits)
    assert all(p.dtype == torch.float64 for p in case.parameters.values())


def test_counts_are_those_of_the_compiled_model(case: Case) -> None:
    """Trained: entries with a gradient. Stored: the same, except for a prefix that an MLP generates
    and that is saved as rows.
    """
    for edit in case.plan.edits:
        own = [p for key, p in case.parameters.items() if key.partition("/")[0] == edit.name]
        assert edit.trained == sum(p.numel() for p in own)
        assert edit.stored == edit.trained or "reparam" in case.recipe.spec
    assert case.plan.totals.trained == sum(p.numel() for p in case.model.parameters() if p.requires_grad)


def test_equals_the_reference(case: Case) -> None:
    """Logits, and gradients of the edit parameters, in float64, with and without a padding mask."""
    case.at_random()
    ref, weights = case.reference()

    def run(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        outs, totals = zip(*(loss(model, inputs) for inputs in case.batches), strict=True)
        return torch.cat(outs), sum(totals[1:], totals[0])

    compare(case, run, ref, weights)
    assert any(
        (visible(case.model, g, case.model(**g)[0]) - visible(case.model, g, b)).abs().max() > 1e-3
        for g, b in zip(case.batches, case.base_logits, strict=True)
    )


def test_the_base_gets_no_gradient_and_does_not_change(case: Case) -> None:
    case.at_random()
    own = {id(p) for p in case.parameters.values()}
    trained = [p for p in case.model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == own
    optimiser = torch.optim.AdamW(case.model.parameters(), lr=0.1, weight_decay=0.1)
    loss(case.model, case.batches[1])[1].backward()
    assert all(p.grad is None for p in case.model.parameters() if id(p) not in own)
    start = {k: p.detach().clone() for k, p in case.parameters.items()}
    optimiser.step()
    assert not any(torch.equal(start[k], p) for k, p in case.parameters.items())
    now = case.model.state_dict()
    trained_keys = {k for k, p in case.model.named_parameters() if id(p) in own}  # by `train`
    assert all(torch.equal(now[k], v) for k, v in case.before.state.items() if k not in trained_keys)


def test_disabled_is_the_base(case: Case) -> None:
    case.at_random()
    with torch.no_grad(), peftc.disabled(case.model):
        inside = case.model(**case.batches[1])[0]
    assert torch.equal(inside, case.base_logits[1])
    with torch.no_grad():
        outside = case.model(**case.batches[1])[0]
    assert not torch.equal(outside, inside)


def test_a_copy_is_another_model(case: Case) -> None:
    case.at_random()
    other = copy.deepcopy(case.model)
    with torch.no_grad():
        want = case.model(**case.batches[1])[0]
        assert torch.equal(other(**case.batches[1])[0], want)
        for parameter in peftc.parameters(other).values():
            parameter.add_(0.1)
        assert not torch.equal(other(**case.batches[1])[0], want)
        assert torch.equal(case.model(**case.batches[1])[0], want)


def test_verdicts_on_folding(case: Case) -> None:
    """The planner derives from the equations what folds. A refusal has a reason."""
    assert [edit.name for edit in case.plan.edits] == list(case.recipe.edits)
    for edit in case.plan.edits:
        expected = case.recipe.folds is None or case.recipe.foldable(edit.name, case.name)
        assert edit.foldable == expected or case.recipe.folds is None, edit.reason
        assert edit.foldable or edit.reason


def test_folded_equals_unfolded(case: Case) -> None:
    """Exact in float64 for every edit with the verdict that it folds; the report names the others.
    As many entries change as the plan counts.
    """
    stay = {edit.name for edit in case.plan.edits if not edit.foldable}
    if stay == set(case.recipe.edits):
        return
    case.at_random()
    folded = copy.deepcopy(case.model)
    with torch.no_grad():
        report = peftc.fold(folded)
        for inputs, base in zip(case.batches, case.base_logits, strict=True):
            got = folded(**inputs)[0]
            close(visible(folded, inputs, got), visible(case.model, inputs, case.model(**inputs)[0]), "folded")
            assert not torch.equal(got, base)
    if not stay:
        now, was = folded.state_dict(), case.before.state
        changes = (int((v != was[k]).sum()) if k in was else v.numel() for k, v in now.items())
        assert sum(changes) == case.plan.totals.changed
    assert {refusal.edit for refusal in report.refused} == stay
    if stay:
        assert {key.partition("/")[0] for key in peftc.parameters(folded)} == stay
    else:
        with pytest.raises(peftc.PeftcError, match="P410"):  # a plain model again
            peftc.parameters(folded)


def test_remove_restores_every_bit(case: Case) -> None:
    case.at_random()
    other = copy.deepcopy(case.model)
    assert peftc.remove(other) is other
    case.before.assert_same(other)
    with torch.no_grad():
        for inputs, want in zip(case.batches, case.base_logits, strict=True):
            assert torch.equal(other(**inputs)[0], want)
