"""Functions of equations that the random forms do not have: choices among features, positions, keys
and values, rows of a table, and parameters that tasks have in common.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError
from peftc.equation_code import functions
from tests import zoo

TOLERANCE = 1e-10
PREFIX = """form rows_before(n) {
    param key[heads(out), n, d_head(out)] = normal(0.02)
    param value[heads(out), n, d_value(out)] = normal(0.02)
    f = (key, value)
}
"""


def compiled(text: str, name: str = "bert", **options: Any) -> nn.Module:
    model = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{text}\n", model, seed=1, **options)
    return model


def shaken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(peftc.parameters(model).values()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).to(parameter))
    return model


def logits(model: nn.Module, name: str = "bert") -> Tensor:
    return model(**zoo.inputs(name, model)).logits


def code_of(text: str, name: str = "bert") -> set[str]:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{text}\n", zoo.build(name, torch.float64))
    return {diagnostic.code for diagnostic in error.value.diagnostics}


def test_the_largest_features() -> None:
    x = torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.0, 5.0, -2.0, 1.0]])
    assert torch.equal(functions.top_k(x, 2), torch.tensor([[3.0, 0.0, 2.0, 0.0], [0.0, 5.0, 0.0, 1.0]]))
    weights = functions.softmax(x, 2)
    torch.testing.assert_close(weights[0, [0, 2]], torch.softmax(x[0, [0, 2]], -1))
    assert torch.equal(weights != 0, functions.top_k(x, 2) != 0)


def test_a_mixture_of_experts_chooses_some() -> None:
    text = """form experts(x, n, best, r) {
    param A[n, r, d(x)] = kaiming
    param B[n, d(out), r] = kaiming
    param W[n, d(x)] = kaiming
    param pick[n, 1, n] = 0
    let gate = softmax(W @ x, best)
    f = sum(i in n, (pick[i] @ gate) * (B[i] @ A[i] @ x))
}
edit e at layer[*].ffn { h += experts(x, n=3, best=2, r=2) }"""
    forms: list[Any] = [m for name, m in compiled(text).named_modules() if name.endswith("experts")]
    for form in forms:
        x = torch.randn(2, 3, form.A.shape[-1], dtype=torch.float64)
        with torch.no_grad():
            form.pick.copy_(torch.eye(3, dtype=torch.float64)[:, None])  # the i-th gate
        weights = torch.softmax(x @ form.W.T, -1)
        best = weights * (weights >= weights.topk(2).values[..., -1:])
        best = best / best.sum(-1, keepdim=True)
        expected = sum(best[..., i : i + 1] * (x @ form.A[i].T @ form.B[i].T) for i in range(3))
        torch.testing.assert_close(form(x), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_keys_and_values(name: str) -> None:
    edit = "edit e at layer[*].attn.self {{ kv = concat({}, kv) }}"
    own = compiled(f"{PREFIX}{edit.format('rows_before(n=3)')}", name)
    built_in = compiled(edit.format("prefix(len=3)"), name)
    ours, theirs = peftc.parameters(own), peftc.parameters(built_in)
    assert [p.shape for p in ours.values()] == [p.shape for p in theirs.values()]
    torch.testing.assert_close(logits(shaken(own), name), logits(shaken(built_in), name), rtol=0, atol=TOLERANCE)
    plans = [
        peftc.plan(f"peft 2\n{PREFIX}{edit.format(form)}\n", own) for form in ("rows_before(n=3)", "prefix(len=3)")
    ]
    assert plans[0].edits[0].trained == plans[1].edits[0].trained
    assert str(plans[0].edits[0].reason).replace("rows_before", "prefix") == plans[1].edits[0].reason


def test_keys_and_values_of_tasks() -> None:
    text = f"{PREFIX}edit e at layer[*].attn.self per task {{ kv = concat(rows_before(n=3), kv) }}"
    model = shaken(compiled(text, tasks=("a", "b")))
    rows = zoo.inputs("bert", model)
    outputs: dict[str, Tensor] = {}
    for task in ("a", "b"):
        with peftc.task(model, task):
            outputs[task] = logits(model)
    names = ["a", "b"] * (len(rows["input_ids"]) // 2 + 1)
    with peftc.task(model, task_ids=names[: len(rows["input_ids"])]):
        mixed = logits(model)
    for i, row in enumerate(mixed):
        torch.testing.assert_close(row, outputs[names[i]][i], rtol=0, atol=TOLERANCE)


JOIN = "edit e at layer[*].attn.self { kv = concat(rows_before(n=3), kv) }"
ADD = "edit e at layer[*].attn.q { h += g(x) }"


@pytest.mark.parametrize(
    ("form", "edit", "code"),
    [
        (PREFIX, ADD.replace("g(x)", "rows_before(n=3)"), "P310"),
        (PREFIX.replace("(key, value)", "(key, value @ key)"), JOIN, "P301"),
        (PREFIX.replace("value[heads(out), n", "value[heads(out), n + 1"), JOIN, "P301"),
        (PREFIX.replace("n, d_head(out)]", "n, d_head(out) + 1]"), JOIN, "P301"),
        ("form g(x) { param A[d(out), d(x)] = 0 f = (A, A) @ x }", ADD, "P105"),
        ("form g(x) { param A[d(out), d(x)] = 0 f = sum(A, x) }", ADD, "P108"),
        ("form g(x) { param A[d(out), d(x)] = 0 f = sum(i in 2, A @ x) }", ADD, "P114"),
        ("form g(x) { param A[2, d(out), d(x)] = 0 f = sum(i in 3, A[i] @ x) }", ADD, "P106"),
        ("form g(x) { param A[2, d(out), d(x)] = 0 f = sum(i in 1000, A[i - i] @ x) }", ADD, "P318"),
        ("form g(x) { param A[d(out), d(x)] common = 0 f = A @ x }", ADD, "P023"),
    ],
)
def test_what_has_no_meaning(form: str, edit: str, code: str) -> None:
    assert code in code_of(f"{form}\n{edit}")


def test_rows_of_a_table() -> None:
    text = "form g(x, r) { param T[d(x), r] = normal param U[d(out), r] = normal f = U @ rows(T, x) }\n"
    model = compiled(text + "edit e at embed { h += g(x, r=3) }")
    form: Any = next(m for n, m in model.named_modules() if n.endswith(".g"))
    ids = zoo.inputs("bert", model)["input_ids"]
    torch.testing.assert_close(form(ids), form.T[ids] @ form.U.T, rtol=0, atol=TOLERANCE)


def test_common_parameters_are_those_of_all_tasks() -> None:
    text = """form g(h) {{
    param A[d(h)] per edit{} = 1
    param b[d(out)] = 0
    f = A * h + b
}}
edit e at layer[*].attn.norm per task {{ h += g(h) }}"""
    counts = {
        common: sum(p.numel() for p in peftc.parameters(compiled(text.format(common), tasks=("a", "b"))).values())
        for common in ("", " common")
    }
    assert counts[""] - counts[" common"] == zoo.config("bert").hidden_size


def test_positions() -> None:
    text = """form g(h, first = none, last = none) {{
    param A[d(h)] = 1
    f = positions(A * h, first, last)
}}
edit e at layer[*] {{ h += g(h{}) }}"""
    everywhere, first, all_first = (
        logits(compiled(text.format(arguments))) for arguments in ("", ", first=1", ", first=100")
    )
    assert not torch.allclose(everywhere, first)
    torch.testing.assert_close(everywhere, all_first, rtol=0, atol=TOLERANCE)
    plan = peftc.plan(f"peft 2\n{text.format(', last=1')}\n", zoo.build("bert", torch.float64))
    assert "positions" in str(plan.edits[0].reason)


HALF = {
    "cayley": "form g(w) { param Q[cols(w) / 4, 6] = 0 f = w @ blocks(cayley(skew(Q))) }",
    "solve": "form g(w) { param Q[cols(w) / 4, 6] = 0 f = w @ blocks(solve(eye(skew(Q)) + skew(Q), eye(skew(Q)))) }",
    "inverse": "form g(w) { param Q[cols(w) / 4, 6] = 0 f = w @ blocks(inverse(eye(skew(Q)) + skew(Q))) }",
    "fourier": "form g(w) { param C[rows(w), cols(w)] = 0 f = w + fourier(C) }",
    "circulant": "form g(x) { param c[d(x)] = 0 f = circulant(c) @ x }",
    "circulants": "form g(x) { param c[2, d(x) / 8, 8] = normal(0.01) f = t(circulant(c)) @ (circulant(c) @ x) }",
    "svd": "form g(w) { param A[rows(w), 2] = svd(w, 2).u f = w + A @ t(A) - initial(A @ t(A)) }",
    "qr": "form g(w) { param A[rows(w), cols(w)] = qr(w).q f = w + A - initial(A) }",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    equation = "h += g(x, dtype={0})" if "g(x)" in HALF[name] else "w = g(w, dtype={0})"
    word = str(dtype).rpartition(".")[2]
    model: Any = zoo.build("bert", torch.float32).eval()
    before = logits(model)
    peftc.compile(f"peft 2\n{HALF[name]}\nedit e at layer[*].attn.q {{ {equation.format(word)} }}\n", model, seed=1)
    torch.testing.assert_close(logits(model), before, rtol=0.1, atol=0.1)
    result = logits(model.to(dtype))
    assert result.dtype == dtype
    assert bool(result.isfinite().all())


def test_a_mean_over_the_batch_is_that_of_all_tokens() -> None:
    text = """form centred(x) {
    param A[d(out), d(x)] = kaiming
    let mean = mean(A @ x, batch)
    f = A @ x - mean
}
edit e at layer[*].ffn { h += centred(x) }"""
    model = shaken(compiled(text.replace("let mean", "let centre").replace("- mean", "- centre")))
    forms: list[Any] = [m for name, m in model.named_modules() if name.endswith("centred")]
    x = torch.randn(2, 3, forms[0].A.shape[-1], dtype=torch.float64)
    values = (x @ forms[0].A.T).reshape(6, -1)
    expected = (values - values.mean(0)).reshape(2, 3, -1)
    torch.testing.assert_close(forms[0](x), expected, rtol=0, atol=TOLERANCE)
    both = logits(model)
    inputs = zoo.inputs("bert", model)
    alone = model(**{name: value[:1] for name, value in inputs.items()}).logits
    assert (both[:1] - alone).abs().max() > 1e-3  # examples depend on each other
    assert "P301" in code_of(
        "form f1(w) { param a[rows(w), cols(w)] = 0 f = mean(a, batch) } edit e at head { w += f1(w) }"
    )


def test_rows_at_places_need_places_of_the_site() -> None:
    line = "param v[2, cols(w)] = 0\n param n[2] = 0\n f = w - rows_at(w, {}) + scatter(v, here, rows(w))"
    for places, scope in (("n", ""), ("here", " per edit")):
        form = f"form g(w, select = random) {{\n fixed here[2]{scope} = selection(select)\n {line.format(places)}\n}}"
        assert "P105" in code_of(f"{form}\nedit e at layer[*].attn.q {{ w = g(w) }}")
