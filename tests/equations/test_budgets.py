"""`budget(v, target, total, …)`: training gives up the least important entries of a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import peftc
from peftc.equation_code.budget_module import BudgetModule
from tests import zoo

TOTAL = 9
FORM = f"""form gated(x, n) {{
    param A[n, d(x)] = normal
    param B[d(out), n] = kaiming
    param c[n] = 1
    param v[n] = 1
    param e[d(out)] = 0
    loss_size = mean(total(v * v), sites)
    f = B @ (budget(v, 2, {TOTAL}, 1, 3, 2, 0.5, 0.25) * c * (A @ x)) + e
}}"""
SPEC = f"peft 2\n{FORM}\nedit e at layer[*].attn.q {{ h += gated(x, n=5) }}"


def compiled() -> Any:
    return peftc.compile(SPEC, zoo.build("llama", torch.float64), seed=0)


def forms_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BudgetModule)]


def train(model: Any) -> None:
    batch = zoo.inputs("llama", model)
    model.zero_grad()
    model(**batch).logits.pow(2).sum().backward()
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter -= 1e-4 * parameter.grad  # type: ignore[operator]


class Importance:
    """The importance of the entries of one site, written by hand for this form."""

    def __init__(self, form: Any) -> None:
        self.smoothed = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in form.named_parameters()}

    def update(self, form: Any) -> None:
        for name, p in form.named_parameters():
            mean, spread = self.smoothed[name]
            now = (p * p.grad).abs().detach()
            mean = mean / 2 + now / 2
            self.smoothed[name] = mean, spread / 4 + (now - mean).abs() * 3 / 4

    def scores(self) -> Tensor:
        a, b, c, v = (mean * spread for mean, spread in (self.smoothed[name] for name in "ABcv"))
        return v + a.mean(1) + b.mean(0) + c  # e has no entry for each of v


def test_the_least_important_entries_of_all_sites_are_given_up() -> None:
    model = compiled().train()
    forms = forms_of(model)
    by_hand = [Importance(form) for form in forms]
    count = 5 * len(forms)
    left: list[int] = []
    for step in range(TOTAL + 1):
        train(model)
        for importance, form in zip(by_hand, forms, strict=True):
            if step < TOTAL - 3:
                importance.update(form)
        peftc.step(model, step)
        alive = torch.cat([form.v.detach() != 0 for form in forms])
        left.append(int(alive.sum()))
        scores = torch.cat([importance.scores() for importance in by_hand])
        if step in (2, 4, TOTAL - 3):  # the rounds
            assert set(alive.nonzero()[:, 0].tolist()) == set(scores.topk(left[-1])[1].tolist()), step
    assert left[1] == count > left[2]
    assert left[2] >= left[4] >= left[6] == left[-1] == 2 * len(forms)


def test_a_run_goes_on_from_a_file(tmp_path: Path) -> None:
    whole = compiled().train()
    for step in range(5):
        train(whole)
        peftc.step(whole, step)
    peftc.save(whole, tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama", torch.float64)).train()
    for model in (whole, again):
        for step in range(5, TOTAL):
            train(model)
            peftc.step(model, step)
    ours, theirs = peftc.parameters(whole), peftc.parameters(again)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_term_of_the_loss_is_a_mean_over_sites() -> None:
    model = compiled()
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.rand_like(parameter))
    want = torch.stack([form.v.square().sum() for form in forms_of(model)]).mean()
    torch.testing.assert_close(peftc.losses(model), {"e.size": want})


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("param v[n] = 0 f = budget(2 * v, 1, 9, 0, 0, 1, 0.5, 0.5) * x", "P105"),
        ("param v[n] per edit = 0 f = budget(v, 1, 9, 0, 0, 1, 0.5, 0.5) * x", "P105"),
        ("fixed v[n] = signs f = budget(v, 1, 9, 0, 0, 1, 0.5, 0.5) * x", "P105"),
        ("param v[n, n] = 0 f = budget(v, 1, 9, 0, 0, 1, 0.5, 0.5) @ x", "P105"),
        ("param v[n] = 0 f = budget(v, 1, 9, 0, 0, 1, 0.5) * x", "P108"),
        ("param v[n] = 0 f = budget(v, n / 3, 9, 0, 0, 1, 0.5, 0.5) * x", "P106"),
        (
            "param v[n] = 0 param u[n] = 0 let y = budget(u, 1, 9, 0, 0, 1, 0.5, 0.5) "
            "f = budget(v, 1, 9, 0, 0, 1, 0.5, 0.5) * y * x",
            "P111",
        ),
        (
            "param v[n] = 0 param A[2, n] = 0 let i = random(2) f = budget(v, 1, 9, 0, 0, 1, 0.5, 0.5) * A[i] * x",
            "P111",
        ),
        ("param v[n] = 0 loss_a = mean(v, sites) f = v * x", "P301"),
        ("param v[n] = 0 loss_a = 2 * mean(total(v), sites) f = v * x", "P107"),
    ],
)
def test_refusals(lines: str, code: str) -> None:
    text = f"peft 2\nform g(x, n) {{ {lines} }}\nedit e at layer[0].attn.q {{ h *= g(x, n=16) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value
