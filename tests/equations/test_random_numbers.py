"""`let i = random(n)`: a part at random while training, and the mean of all parts afterwards."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import peftc
from peftc.equation_code.random_module import RandomModule
from tests import zoo

FORM = """form routed(x, n) {
    param A[n, d(out), d(x)] = normal
    param s[n, d(out)] = 1
    let i = random(n)
    f = s[i] * (A[i] @ x)
}"""
SPEC = f"peft 2\n{FORM}\nedit e at layer[*].attn.q {{ h += routed(x, n=5) }}"


def compiled() -> Any:
    return peftc.compile(SPEC, zoo.build("llama", torch.float64), seed=0)


def random_forms(model: Any) -> list[RandomModule]:
    return [module for module in model.modules() if isinstance(module, RandomModule)]


def expected(model: Any, batch: dict[str, Tensor], routes: list[int | None]) -> Tensor:
    """The logits of the base with hooks that add s[i] * (A[i] x)."""
    base: Any = zoo.build("llama", torch.float64)
    for layer, form, i in zip(base.model.layers, random_forms(model), routes, strict=True):
        a, s = (p.detach().mean(0) if i is None else p.detach()[i] for p in (form.A, form.s))

        def add(_module: Any, inputs: Any, h: Tensor, a: Tensor = a, s: Tensor = s) -> Tensor:
            return h + s * F.linear(inputs[0], a)

        layer.self_attn.q_proj.register_forward_hook(add)
    return base.eval()(**batch).logits


def test_a_step_draws_one_part_and_evaluation_has_the_mean() -> None:
    model = compiled()
    batch = zoo.inputs("llama", model)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.rand_like(parameter))
    seen = set[int]()
    for step in range(4):
        peftc.step(model, step)
        routes = [int(form.get_buffer("route")) for form in random_forms(model)]
        seen |= set(routes)
        torch.testing.assert_close(model.train()(**batch).logits, expected(model, batch, [*routes]), rtol=0, atol=1e-11)
    assert len(seen) > 1
    mean = expected(model, batch, [None] * len(random_forms(model)))
    torch.testing.assert_close(model.eval()(**batch).logits, mean, rtol=0, atol=1e-11)
    peftc.fold(model)
    torch.testing.assert_close(model(**batch).logits, mean, rtol=0, atol=1e-10)


def test_copies_and_adapters_have_numbers_of_their_own(tmp_path: Path) -> None:
    model = compiled()
    batch = zoo.inputs("llama", model)
    peftc.step(model, 1)
    other = copy.deepcopy(model)
    routes = [int(form.get_buffer("route")) for form in random_forms(model)]
    for step in range(2, 5):
        peftc.step(other, step)
    assert [int(form.get_buffer("route")) for form in random_forms(model)] == routes
    pickle.loads(pickle.dumps(random_forms(model)[0]))
    peftc.save(model, tmp_path)
    loaded = peftc.load(tmp_path, zoo.build("llama", torch.float64))
    assert not any(key.endswith(".route") for key in peftc.parameters(loaded))
    torch.testing.assert_close(loaded.eval()(**batch).logits, model.eval()(**batch).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("param A[n, d(out), d(x)] = 0 f = A[random(n)] @ x", "P105"),
        ("param A[n, d(out), d(x)] = 0 let i = random(n) f = i * (A[i] @ x)", "P105"),
        ("param A[n, d(out), d(x)] = 0 let i = random(n + 1) f = A[i] @ x", "P106"),
        ("param A[2, n, d(out), d(x)] = 0 let i = random(n) f = A[0, i] @ x", "P105"),
        ("param A[n, d(out), d(x)] = 0 let i = random(n - n) f = A[i] @ x", "P318"),
        ("param A[n, d(out), d(x)] = 0 let i = random(n, n) f = A[i] @ x", "P105"),
    ],
)
def test_refusals(lines: str, code: str) -> None:
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(
            f"peft 2\nform g(x, n) {{ {lines} }}\nedit e at layer[0].attn.q {{ h += g(x, n=2) }}", zoo.build("llama")
        )
    assert [d.code for d in refused.value.diagnostics] == [code], refused.value
