"""Lines `loss_NAME = …` of a form, tensors that a program fills, features in other dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import peftc
from peftc.equation_code.buffer_module import BufferModule
from tests import zoo

FORM = """form mixed(x, n, weight = 0.5) {
    fixed A[n, d(out), d(x)] = buffer
    param s[n, n] = identity(0.25)
    let y = reshape(reshape(A, n * d(out), d(x)) @ x, n, d(out))
    let sums = reshape(mean(y), n)
    loss_spread = weight * total(s * s) / n
    f = t(reshape(A, n * d(out), d(x))) @ reshape(reshape(s @ sums, n, 1) * y, n * d(out))
}"""
SPEC = f"peft 2\n{FORM}\nedit e at layer[*].attn.o {{ h += mixed(x, n=3) }}"


def compiled(**options: Any) -> Any:
    return peftc.compile(SPEC, zoo.build("llama", torch.float64), seed=0, **options).eval()


def forms_of(model: Any) -> list[BufferModule]:
    return [module for module in model.modules() if isinstance(module, BufferModule)]


def fill(model: Any) -> None:
    for i, form in enumerate(forms_of(model)):
        buffer = form.get_buffer("A")
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(i)))
        form.get_buffer("filled").fill_(True)


def test_a_term_of_the_loss_is_that_of_all_sites_and_has_gradients() -> None:
    model = compiled()
    own = list(peftc.parameters(model).values())
    for parameter in own:
        assert torch.equal(parameter, torch.full((3, 3), 0.25) + 0.75 * torch.eye(3))
        with torch.no_grad():
            parameter.add_(torch.rand_like(parameter))
    terms = peftc.losses(model)
    torch.testing.assert_close(terms, {"e.spread": sum(0.5 * p.square().sum() / 3 for p in own)})
    terms["e.spread"].backward()
    for parameter in own:
        torch.testing.assert_close(parameter.grad, parameter.detach() / 3)


def test_buffers_are_read_saved_and_never_trained(tmp_path: Path) -> None:
    model, base = compiled(), zoo.build("llama", torch.float64).eval()
    batch = zoo.inputs("llama", model)
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=0)
    with pytest.raises(peftc.PeftcError, match="P544"):
        model.train()(**batch)
    fill(model)
    assert all(key.endswith(".s") for key in peftc.parameters(model))
    any_base: Any = base
    for layer, form in zip(any_base.model.layers, forms_of(model), strict=True):
        a, s = form.get_buffer("A"), form.s.detach()

        def add(_module: Any, inputs: Any, h: Tensor, a: Tensor = a, s: Tensor = s) -> Tensor:
            y = torch.stack([F.linear(inputs[0], one) for one in a], -2)
            weights = F.linear(y.mean(-1), s)
            return h + sum(F.linear(weights[..., i, None] * y[..., i, :], a[i].T) for i in range(3))

        layer.self_attn.o_proj.register_forward_hook(add)
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(model.train()(**batch).logits, base(**batch).logits, rtol=0, atol=1e-10)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama", torch.float64))
    torch.testing.assert_close(again.train()(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    plan = peftc.plan(SPEC, zoo.build("llama"))
    assert plan.totals.stored > plan.totals.trained
    assert plan.edits[0].reason is not None, "it does not fold"


def test_a_batch_of_several_tasks_has_the_buffers_of_each_row() -> None:
    text = SPEC.replace("attn.o {", "attn.o per task {")
    model: Any = peftc.compile(text, zoo.build("llama", torch.float64), seed=0, tasks=("a", "b")).eval()
    fill(model)
    batch = zoo.inputs("llama", model)
    count = len(batch["input_ids"])
    tasks = ["a" if i % 2 else "b" for i in range(count)]
    with peftc.task(model, task_ids=tasks):
        mixed = model(**batch).logits
    for name in ("a", "b"):
        rows = [i for i in range(count) if tasks[i] == name]
        with peftc.task(model, name):
            torch.testing.assert_close(mixed[rows], model(**batch).logits[rows], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("param a[d(x)] = 0 loss_a = a * n f = a * x", "P301"),
        ("param a[d(x)] = 0 loss_a = n f = a * x", "P301"),
        ("param a[d(x)] = 0 loss_a = mean(x) * n f = a * x", "P301"),
        ("param a[d(x)] = 0 loss_a = total(a) loss_a = n * total(a) f = a * x", "P111"),
        ("param a[d(x)] = 0 loss_a += n * total(a) f = a * x", "P012"),
        ("param a[d(x)] = 0 loss_ = n * total(a) f = a * x", "P107"),
        ("param a[d(x)] = 0 f = n * total(x) * a", "P301"),
        ("param a[d(x)] = buffer f = n * a * x", "P105"),
        ("param a[d(x)] = 0 f = a * reshape(x, 2, n)", "P301"),
    ],
)
def test_refusals(lines: str, code: str) -> None:
    text = f"peft 2\nform g(x, n = 2) {{ {lines} }}\nedit e at layer[0].attn.o {{ h += g(x) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value
