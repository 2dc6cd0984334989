"""Transforms and orders of vectors, and what a form knows of its weight and its layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import peftc
from peftc.equation_code import functions
from tests import zoo

FORM = """form shuffled(x, n) {
    require n >= d(x)
    fixed order[d(x)] = permutation
    fixed s[d(x)] = signs
    param A[d(out), d(x)] = normal
    param g[d(x)] = 1
    f = A @ (permuted(s * g, order) * x)
}"""


@pytest.mark.parametrize("n", [1, 2, 8, 16, 32, 256])
def test_walsh_is_the_product_with_the_hadamard_matrix(n: int) -> None:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < n:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    v = torch.randn(n, dtype=torch.float64)
    torch.testing.assert_close(functions.walsh(v), hadamard @ v, rtol=0, atol=1e-12)


def test_an_order_is_drawn_again_and_folds() -> None:
    text = f"peft 2\n{FORM}\nedit e at layer[*].attn.q {{ h += shuffled(x, n=99) }}"
    model: Any = peftc.compile(text, zoo.build("llama", torch.float64), seed=0).eval()
    batch = zoo.inputs("llama", model)
    base: Any = zoo.build("llama", torch.float64).eval()
    forms = [module for module in model.modules() if hasattr(module, "order")]
    for layer, form in zip(base.model.layers, forms, strict=True):
        assert form.order.dtype == torch.int64
        assert sorted(form.order.tolist()) == list(range(len(form.order)))
        assert set(form.s.tolist()) == {-1.0, 1.0}
        change = form.A.detach() * (form.s * form.g.detach())[form.order]

        def add(_module: Any, inputs: Any, h: torch.Tensor, change: torch.Tensor = change) -> torch.Tensor:
            return h + F.linear(inputs[0], change)

        layer.self_attn.q_proj.register_forward_hook(add)
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=1e-11)
    peftc.fold(model)
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=1e-10)


def test_a_form_of_half_precision_may_begin_with_an_order() -> None:
    text = f"peft 2\n{FORM}\nedit e at layer[*].attn.q {{ h += shuffled(x, n=99) }}"
    model: Any = peftc.compile(text, zoo.build("llama", torch.bfloat16), seed=0).eval()
    assert torch.isfinite(model(**zoo.inputs("llama", model)).logits).all()


def test_a_form_knows_its_weight_and_its_layer() -> None:
    form = """form level(n) {
        param a[layers(out)] per edit = 0
        param b[entries(out)] = 0
        let values = a[layer(out)] + b
        f = reshape(values, rows(out), cols(out)) if cols(out) != none
        f = values if cols(out) == none
    }"""
    text = f"peft 2\n{form}\nedit e at layer[*].attn.q | layer[*].norm {{ w += level(n=power_of_two(3)) }}"
    text = (
        text.replace("n=power_of_two(3)", "n=4")
        .replace("form level(n)", "form level(n = 1)")
        .replace("let values = a", "let values = n / n * a")
    )
    base: Any = zoo.build("llama", torch.float64).eval()
    model: Any = peftc.compile(text, zoo.build("llama", torch.float64), seed=0).eval()
    parameters = peftc.parameters(model)
    (shared,) = (p for key, p in parameters.items() if key.endswith(".a"))
    assert len(shared) == len(base.model.layers)
    with torch.no_grad():
        shared.copy_(torch.arange(1, len(shared) + 1))
        for i, layer in enumerate(base.model.layers):
            for module in (layer.self_attn.q_proj, layer.input_layernorm, layer.post_attention_layernorm):
                module.weight += i + 1
    batch = zoo.inputs("llama", model)
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("param o[d(x)] = permutation param g[d(x)] = 1 f = permuted(g, o) * x", "P105"),
        ("fixed o[2, d(x)] = permutation param g[d(x)] = 1 f = permuted(g, o) * x", "P105"),
        ("param o[d(x)] = 1 param g[d(x)] = 1 f = permuted(g, o) * x", "P105"),
        ("fixed o[d(x)] = permutation param g[n] = 1 f = permuted(g, o) * x", "P301"),
        ("param g[3] = 1 f = mean(walsh(g)) * n * x", "P301"),
        ("param g[3] = 1 f = mean(pad(g, n)) * x", "P106"),
        ("param g[entries(x)] = 1 f = g * n * x", "P310"),
        ("param g[d(x), n] = 1 f = mean(walsh(g)) * x", "P301"),
    ],
)
def test_refusals(lines: str, code: str) -> None:
    text = f"peft 2\nform g(x, n = 2) {{ {lines} }}\nedit e at layer[0].attn.o {{ h += g(x) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value
