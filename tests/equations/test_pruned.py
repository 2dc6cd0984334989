"""`pruned(v, z, n)`: what is left of all sites, noise, and what a text cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError
from peftc.equation_code.functions import logistic_noise
from tests import zoo

FORM = """form cut(x, density, gain = 2) {
    let n = max(1, round(density * over_sites(d(x) * d(out))))
    param A[d(out), d(x)] = normal(0.1)
    param gain[d(out), 1] = gain
    loss_size = total(abs(A))
    f = pruned(A, tanh(gain), n) @ x
}
"""
AT = "layer[*].attn.q | layer[*].ffn.down"


def compiled(text: str, **options: Any) -> Any:
    return peftc.compile(f"peft 2\n{text}\n", zoo.build("llama", torch.float64).eval(), seed=0, **options)


def logits(model: nn.Module) -> Tensor:
    return model(**zoo.inputs("llama", model)).logits


def test_the_largest_values_of_a_map_are_left_and_folded(tmp_path: Path) -> None:
    text = f"{FORM} edit e at {AT} {{ h += cut(x, density=0.1) }}"
    model = compiled(text)
    parameters = peftc.parameters(model)
    matrices = {name: p for name, p in parameters.items() if name.endswith(".A")}
    assert all(torch.equal(p, torch.full_like(p, 2)) for name, p in parameters.items() if name.endswith(".gain"))
    loss = peftc.losses(model)
    torch.testing.assert_close(loss["e.size"], torch.stack([p.abs().sum() for p in matrices.values()]).sum())
    values = {name: p.detach() * parameters[name.replace(".A", ".gain")].tanh() for name, p in matrices.items()}
    count = round(0.1 * sum(p.numel() for p in matrices.values()))
    threshold = torch.cat([v.abs().flatten() for v in values.values()]).topk(count)[0][-1]
    assert peftc.calibrate(model) == {"e": count}
    assert peftc.losses(model) == {}
    for name, value in values.items():
        torch.testing.assert_close(matrices[name].detach(), value * (value.abs() >= threshold))
    want = logits(model)
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64).eval())
    assert torch.equal(logits(loaded), want)
    plan = peftc.plan(f"peft 2 {text}", zoo.build("llama"))
    assert plan.totals.trained == plan.totals.stored == sum(p.numel() for p in parameters.values())
    model(**zoo.inputs("llama", model, labels=True)).loss.backward()
    gradients = [p.grad for name, p in parameters.items() if name.endswith(".A")]
    assert sum(int((g != 0).sum()) for g in gradients if g is not None) <= count
    peftc.fold(model)
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-10)


def test_noise_is_logistic_while_training_and_gone_in_evaluation() -> None:
    x = torch.full((200_000,), 0.5, dtype=torch.float64)
    assert logistic_noise(x, False) is x
    torch.manual_seed(0)
    noise = logistic_noise(x, True) - x
    torch.testing.assert_close(noise.sigmoid().mean(), torch.tensor(0.5, dtype=torch.float64), rtol=0, atol=3e-3)
    torch.testing.assert_close(noise.sigmoid().var(), torch.tensor(1 / 12, dtype=torch.float64), rtol=0, atol=1e-3)
    form = "form g(x) { param a[d(x)] = 0.3 f = logistic_noise(a) * x }"
    model = compiled(f"{form} edit e at layer[*].attn.q {{ h += g(x) }}")
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("form g() { param A[rows(out), cols(out)] per edit = 0 f = pruned(A, 1, 3) }", "P105 P111"),
        ("form g() { fixed A[rows(out), cols(out)] = 0 param B[1] = 0 f = pruned(A, 1, 3) + B }", "P105"),
        ("form g() { param A[rows(out), cols(out)] = 0 f = pruned(2 * A, 1, 3) }", "P105"),
        ("form g() { param A[rows(out), cols(out)] = 0 f = pruned(A, 1, 3) + pruned(A, 2, 3) }", "P111 P111"),
        ("form g() { param A[rows(out), cols(out)] = 0 param kept[1] = 0 f = pruned(A, kept, 3) }", "P121"),
        ("form g() { param A[rows(out), cols(out)] = 0 f = pruned(A, 1, 0) }", "P106"),
        ("form g() { param A[rows(out), cols(out)] = 0 param z[2, 1, 1] = 0 f = pruned(A, z, 1) }", "P301"),
        (
            "form g() { param A[rows(out), cols(out)] = 0 let i = random(2) param B[2, 1] = 0 f = pruned(A, B[i], 1) }",
            "P111",
        ),
        ("form g() { param A[rows(out), cols(out)] = 0 save sparse(values=A) f = pruned(A, 1, 1) }", "P105"),
        ("form g() { param A[rows(out), cols(out)] = 0 f = pruned(A, 1, 1).values * A }", "P105"),
        ("form g() { param A[rows(out), cols(out)] = 0 f = clamp(A, 1, 1) }", "P106"),
        ("form g() { let n = over_sites(rows(out)) param A[rows(out), cols(out)] = 0 f = pruned(A, 1, n) }", "P318"),
    ],
)
def test_what_cannot_be_pruned(form: str, code: str) -> None:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2 {form} edit e at layer[*].attn.q {{ w += g() }}", zoo.build("llama"))
    assert " ".join(d.code for d in error.value.diagnostics) == code


def test_a_parameter_has_the_name_of_its_first_value_alone() -> None:
    for lines, is_refused in (("param s[d(x)] = s", False), ("param s[d(x)] = 2 * s", True), ("let s = 2 * s", True)):
        text = f"peft 2 form g(x, s = 3) {{ {lines} f = s * x }} edit e at layer[*].attn.q {{ h *= g(x) }}"
        if is_refused:
            with pytest.raises(PeftcError, match="P111"):
                peftc.plan(text, zoo.build("llama"))
        else:
            model = compiled(text.removeprefix("peft 2").replace("g(x) }", "g(x, s=4) }"))
            assert all(torch.equal(p, torch.full_like(p, 4)) for p in peftc.parameters(model).values())
