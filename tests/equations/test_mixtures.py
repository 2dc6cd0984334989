"""Mixtures of low-rank changes as texts: a gate weighs the forms of each token, or of each task.

Each is compared with the equations of its paper, written by hand in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo
from tests.equations.test_more_functions import logits, shaken

MIXTURE = """form experts(x, n, r, alpha = r) {
    param A[n, r, d(x)] = kaiming
    param B[n, d(out), r] = 0
    param router[n, d(x)] = kaiming
    let g = softmax(router @ x)
    f = alpha / r * sum(i in n, g[i] * B[i] @ A[i] @ x)
}
edit e at layer[*].attn.q { h += experts(x, n=3, r=2, alpha=4) }
"""
# Ponti et al. 2023, arXiv:2202.13914, Eq. 3 (Poly): skills of all tasks, and how much of each
# a task takes
POLY = """form poly(x, skills, r) {
    let n = site(out)
    param A[skills, r, d(x)] per n common = kaiming
    param B[skills, d(out), r] per n common = 0
    param z[skills] = 0
    let s = sigmoid(z)
    let p = s / total(s)
    f = sum(i in skills, p[i] * B[i]) @ sum(i in skills, p[i] * A[i]) @ x / r
}
edit e at layer[*].attn.q per task { h += poly(x, skills=3, r=2) }
"""
# Buehler and Buehler 2024, arXiv:2402.07148 (X-LoRA): one head weighs the adapters of all layers
# for each token; here of what the first layer reads, in one pass
XLORA = """form xlora(x, n, r) {
    param head[sites(out) * n, d(x)] per group = kaiming
    param A[n, r, d(x)] = kaiming
    param B[n, d(out), r] = 0
    let first = softmax(reshape(head @ x, sites(out), n))
    let scalings = below(scalings, first)
    let layer = scalings[site(out)]
    f = sum(i in n, layer[i] * B[i] @ A[i] @ x) / r
}
edit e at layer[*].attn.q { h += xlora(x, n=3, r=2) }
"""
NAMES = ("bert", "llama")
LAYER = {"bert": "encoder.layer[{}].attn.self.q", "llama": "decoder.layer[{}].attn.self.q"}


def queries(model: nn.Module) -> list[nn.Module]:
    return [m for name, m in model.named_modules() if name.endswith((".query", ".q_proj"))]


def low_rank(a: Tensor, b: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """Σ gᵢ Bᵢ Aᵢ x"""
    each = torch.einsum("nor,nri,bti->btno", b, a, x)
    return (weights[..., None] * each).sum(-2)


def by_hand(name: str, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The output of a base with `change` of the site's number and input beside its queries."""
    base = zoo.build(name, torch.float64).eval()
    for number, module in enumerate(queries(base)):

        def add(_: nn.Module, args: tuple[Tensor, ...], out: Tensor, number: int = number) -> Tensor:
            return out + change(number, args[0])

        module.register_forward_hook(add)
    return logits(base, name)


def compiled(text: str, name: str, **options: Any) -> nn.Module:
    model = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{text}", model, seed=1, **options)
    return model


def check(model: nn.Module, name: str, expected: Tensor, folder: Path) -> None:
    value = logits(model, name)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    peftc.save(model, folder)
    again = zoo.build(name, torch.float64).eval()
    assert not torch.equal(logits(again, name), value)
    base = logits(again, name)
    peftc.load(folder, again)
    assert torch.equal(logits(again, name), value)
    peftc.remove(model)
    assert torch.equal(logits(model, name), base)


@pytest.mark.parametrize("name", NAMES)
def test_a_router_weighs_experts_for_each_token(name: str, tmp_path: Path) -> None:
    model = compiled(MIXTURE, name)
    assert torch.equal(logits(model, name), logits(zoo.build(name, torch.float64).eval(), name))
    p = peftc.parameters(shaken(model))

    def change(number: int, x: Tensor) -> Tensor:
        a, b, router = (p[f"e/{LAYER[name].format(number)}/experts.{t}"] for t in ("A", "B", "router"))
        return 2 * low_rank(a, b, torch.softmax(x @ router.T, -1), x)

    check(model, name, by_hand(name, change), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_tasks_take_of_the_same_skills(name: str, tmp_path: Path) -> None:
    model = compiled(POLY, name, tasks=["a", "b"])
    p = peftc.parameters(shaken(model))
    sites = len(queries(zoo.build(name)))
    assert sum(key.endswith(".z") for key in p) == 2 * sites
    assert sum("poly.A_" in key for key in p) == sites  # not of each task

    def change(number: int, x: Tensor) -> Tensor:
        z = p[f"e/{LAYER[name].format(number)}/poly.tasks.b.z"]
        a, b = p[f"e/e.poly/poly.A_{number}"], p[f"e/e.poly/poly.B_{number}"]
        share = z.sigmoid() / z.sigmoid().sum()
        return x @ (share @ a.flatten(1)).reshape(a[0].shape).T @ (share @ b.flatten(1)).reshape(b[0].shape).T / 2

    with peftc.task(model, "b"):
        value = logits(model, name)
    torch.testing.assert_close(value, by_hand(name, change), rtol=0, atol=1e-10)
    with peftc.task(model, "a"):
        assert not torch.equal(logits(model, name), value)
    peftc.save(model, tmp_path)
    again = zoo.build(name, torch.float64).eval()
    peftc.load(tmp_path, again)
    with peftc.task(again, "b"):
        assert torch.equal(logits(again, name), value)


@pytest.mark.parametrize("name", NAMES)
def test_one_head_weighs_the_experts_of_all_layers(name: str, tmp_path: Path) -> None:
    model = compiled(XLORA, name)
    p = peftc.parameters(shaken(model))
    (head,) = (value for key, value in p.items() if key.endswith("head"))
    scalings: list[Tensor] = []

    def change(number: int, x: Tensor) -> Tensor:
        if not number:
            scalings[:] = torch.softmax((x @ head.T).unflatten(-1, (-1, 3)), -1).unbind(-2)
        a, b = (p[f"e/{LAYER[name].format(number)}/xlora.{t}"] for t in ("A", "B"))
        return low_rank(a, b, scalings[number], x) / 2

    check(model, name, by_hand(name, change), tmp_path)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("(router @ x)[3] * x", "P106"),
        ("(router @ x)[0, 0] * x", "P301"),
        ("x[i] * (router @ x)[0]", "P105"),  # a random part of what tokens have
    ],
)
def test_a_feature_that_is_not_there(value: str, code: str) -> None:
    draw = "let i = random(3)" if "[i]" in value else ""
    text = (
        f"form g(x) {{ param router[3, d(x)] = kaiming {draw} f = {value} }}\nedit e at layer[*].attn.q {{ h += g(x) }}"
    )
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{text}", zoo.build("bert"))
    assert {d.code for d in error.value.diagnostics} == {code}


def test_one_feature_folds() -> None:
    text = """form g(x) {
    param A[3, d(x)] = kaiming
    param u[d(out)] = 1
    let z = A @ x
    f = u * (z[0] - 2 * z[2])
}
edit e at layer[*].attn.q { h += g(x) }"""
    model = shaken(compiled(text, "bert"))
    value = logits(model)
    assert peftc.fold(model).folded
    torch.testing.assert_close(logits(model), value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_form_reads_another(name: str, tmp_path: Path) -> None:
    """`lora(lora(x))` is of the width that the equation writes inside, and folds."""
    text = "edit e at layer[*].attn.v { h += lora(lora(x, r=3), r=2) }"
    model = compiled(text, name)
    p = peftc.parameters(shaken(model))
    inner = {key: value for key, value in p.items() if "/lora." in key}
    outer = {key: value for key, value in p.items() if "/lora_2." in key}
    assert len(inner) == len(outer) == len(p) / 2
    value = logits(model, name)
    peftc.save(model, tmp_path)
    again = zoo.build(name, torch.float64).eval()
    peftc.load(tmp_path, again)
    assert torch.equal(logits(again, name), value)
    assert peftc.fold(model).folded
    torch.testing.assert_close(logits(model, name), value, rtol=0, atol=1e-9)


# The gate stands in the equation of the edit, between forms of different ranks.
ROUTER = """form router(x, n) {
    param W[n, d(x)] = kaiming
    f = softmax(W @ x)
}
"""
GATED = ROUTER + "edit e at SITES { let g = router(x, n=2)  h += g[0] * lora(x, r=2) + g[1] * lora(x, r=3, alpha=6) }\n"


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_weighs_forms_for_each_token(name: str, tmp_path: Path) -> None:
    text = GATED.replace("SITES", "layer[*].attn.q")
    plan = peftc.plan(f"peft 2\n{text}", zoo.build(name))
    sites = len(queries(zoo.build(name)))
    assert plan.totals.trained == sites * (2 * 32 + 2 * 64 + 3 * 64)
    assert plan.edits[0].identity
    assert not plan.edits[0].foldable
    assert "softmax" in (plan.edits[0].reason or "")
    model = compiled(text, name)
    assert torch.equal(logits(model, name), logits(zoo.build(name, torch.float64).eval(), name))
    p = peftc.parameters(shaken(model))

    def change(number: int, x: Tensor) -> Tensor:
        own = {key.partition(f"{LAYER[name].format(number)}/")[2]: value for key, value in p.items()}
        g = torch.softmax(x @ own["router.W"].T, -1)
        first, second = (x @ own[f"{form}.A"].T @ own[f"{form}.B"].T for form in ("lora", "lora_2"))
        return g[..., :1] * first + 2 * g[..., 1:] * second

    check(model, name, by_hand(name, change), tmp_path)


@pytest.mark.parametrize(("name", "at"), [("gpt2", "layer[*].attn.q"), ("bart", "decoder.layer[*].attn.cross")])
def test_gates_of_edits_are_those_that_hooks_compute(name: str, at: str) -> None:
    text = GATED.replace("SITES", at)
    text = text if at.endswith(".q") else text.replace("lora(x", "adapter(x").replace(", alpha=6", "")
    model = shaken(compiled(text, name))
    report = peftc.verify(model)
    assert report.ok, str(report)


def test_one_feature_for_each_token_goes_with_all() -> None:
    """A gate of one feature is the same as its feature."""
    lines = {
        "one": "let g = router(x, n=1)  h += g * lora(x, r=2) - g",
        "item": "let g = router(x, n=1)  h += g[0] * lora(x, r=2) - g[0]",
        "constant": "let g = router(x, n=1)  h += g[first] * lora(x, r=2) - g[first]",
        "let": "let g = router(x, n=1)  let a = g[0]  h += a * lora(x, r=2) - a",
    }
    texts = {key: ROUTER + f"let first = 0 edit e at layer[*].attn.q {{ {line} }}" for key, line in lines.items()}
    texts = {key: text if key == "constant" else text.replace("let first = 0 ", "") for key, text in texts.items()}
    values = [logits(shaken(compiled(text, "llama")), "llama") for text in texts.values()]
    assert all(torch.equal(values[0], value) for value in values)
    assert not torch.equal(values[0], logits(zoo.build("llama", torch.float64).eval(), "llama"))


def test_the_number_of_a_feature_may_be_that_of_the_layer() -> None:
    line = "edit e{0} at layer[{0}].attn.q {{ let g = router(x, n=3)  h += g[{1}] * lora(x, r=2) }}"
    by_layer = compiled(ROUTER + line.format("", "layer").replace("layer[]", "layer[*]"), "llama")
    each = compiled(ROUTER + "".join(line.format(i, i) for i in range(3)), "llama")
    assert torch.equal(logits(shaken(by_layer), "llama"), logits(shaken(each), "llama"))


@pytest.mark.parametrize(
    ("line", "code", "help_"),
    [
        ("let g = router(x, n=2)  h += g[2] * lora(x, r=2)", "P301", "the last one is `router(x, n=2)[1]`"),
        ("let g = router(x, n=2)  h += g[i] * lora(x, r=2)", "P105", "sum(i in n, g[i] * …)"),
        ("let g = router(x, n=2)  h += g[0, 1] * lora(x, r=2)", "P105", "sum(i in n, g[i] * …)"),
        ("let g = router(x, n=2)  h += g[-1] * lora(x, r=2)", "P105", "`g[0]` is the first feature"),
        ("let g = router(x, n=2)  h += g * lora(x, r=2)", "P301", "`router(x, n=2)[0]`"),
        ("h += softmax(W @ x)[0] * lora(x, r=2)", "P101", "`softmax` stands in equations of forms"),
        ("w += w[0] * lowrank(r=2)", "P301", "features are those of hidden states"),
    ],
)
def test_a_gate_that_is_none_teaches(line: str, code: str, help_: str) -> None:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{ROUTER}edit e at layer[*].attn.q {{ {line} }}", zoo.build("llama"))
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == code
    assert help_ in (diagnostic.help or "")
    assert diagnostic.span is not None
