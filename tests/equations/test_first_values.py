"""First values that are computed from the base's weight, and values that keep them: PiSSA and OLoRA
are texts, and compute what PEFT computes.
"""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo

R = 3
PISSA = """form pissa(w, r) {
    require r <= min(rows(w), cols(w))
    param A[r, cols(w)] = t(svd(w, r).v * sqrt(svd(w, r).s))
    param B[rows(w), r] = svd(w, r).u * sqrt(svd(w, r).s)
    let change = B @ A
    f = w + change - initial(change)
}"""
OLORA = """form olora(w, r) {
    require r <= min(rows(w), cols(w))
    param A[r, cols(w)] = corner(qr(w).r, r, cols(w))
    param B[rows(w), r] = corner(qr(w).q, rows(w), r)
    f = w + B @ A - initial(B) @ initial(A)
}"""
METHODS = {"pissa": PISSA, "olora": OLORA}


def spec_of(method: str) -> str:
    return f"peft 2\n{METHODS[method]}\nedit e at layer[*].attn.q | layer[*].attn.v {{ w = {method}(w, r={R}) }}\n"


def peft_model(method: str, base: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=R, lora_alpha=R, target_modules=["q_proj", "v_proj"], init_lora_weights=method)
    model = peft.get_peft_model(copy.deepcopy(base).float(), config)  # pyright: ignore[reportArgumentType]
    return model.to(torch.float64)


def logits(model: nn.Module) -> Tensor:
    return model(**zoo.inputs("llama", model)).logits


def stepped(model: nn.Module) -> Tensor:
    """The logits after a step of gradient descent: the same for factors with other signs."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    logits(model).square().mean().backward()
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter -= 10 * parameter.grad
        return logits(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("method", METHODS)
def test_a_method_equals_that_of_peft(method: str) -> None:
    base = zoo.build("llama", torch.float64).eval()
    theirs, ours = peft_model(method, base).eval(), copy.deepcopy(base)
    before = logits(base).detach()
    peftc.compile(spec_of(method), ours)
    assert {tuple(p.shape) for p in peftc.parameters(ours).values()} == {
        tuple(p.shape) for name, p in theirs.named_parameters() if "lora" in name
    }
    torch.testing.assert_close(logits(ours), before, rtol=0, atol=1e-12)
    tolerance = 5e-5  # PEFT decomposes in float32
    torch.testing.assert_close(logits(theirs), before, rtol=0, atol=tolerance)
    mine, other = stepped(ours), stepped(theirs)
    assert float((mine - before).abs().max()) > 100 * tolerance
    torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_it_saves_what_it_started_from_loads_and_folds(method: str, tmp_path: Path) -> None:
    model = zoo.build("llama", torch.float64).eval()
    plan = peftc.plan(spec_of(method), model)
    peftc.compile(spec_of(method), model)
    trained = peftc.parameters(model)
    count = sum(p.numel() for p in trained.values())
    assert plan.edits[0].trained == count
    assert plan.edits[0].stored == 2 * count
    with torch.no_grad():
        for i, parameter in enumerate(trained.values()):
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).to(parameter) / 10
    expected = logits(model)
    peftc.save(model, tmp_path / "adapter")
    loaded = zoo.build("llama", torch.float64).eval()
    peftc.load(tmp_path / "adapter", loaded)
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(logits(copy.deepcopy(loaded)), expected)
    peftc.fold(loaded)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-12)
    peftc.remove(model)
    torch.testing.assert_close(logits(model), logits(zoo.build("llama", torch.float64).eval()), rtol=0, atol=0)


def test_a_drawn_first_value_is_kept() -> None:
    text = """form g(x) {
    param A[d(out), d(x)] = normal
    f = (A - initial(A)) @ x
}"""
    model = zoo.build("llama", torch.float64).eval()
    before = logits(model)
    peftc.compile(f"peft 2\n{text}\nedit e at layer[*].attn.q {{ h += g(x) }}\n", model, seed=3)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.mul_(2)
    assert not torch.allclose(logits(model), before)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("param A[rows(w), r] = svd(w, 0 * r).u f = w + A @ t(A)", "P106"),
        ("param A[rows(w), r] = svd(w, r).q f = w + A @ t(A)", "P105"),
        ("param A[rows(w), r] = svd(w).u f = w + A @ t(A)", "P108"),
        ("param A[r, rows(w)] = svd(w, r).u f = w + A @ t(A)", "P318"),
        ("param A[rows(w), r] = 0 f = w + A @ t(svd(w, r).v)", "P105"),
        ("param A[rows(w), cols(w)] = initial(w) f = w + A", "P108"),
        ("param A[rows(w), cols(w)] = 0 param A_initial[1] = 0 f = w + r * A + A_initial - initial(A)", "P111"),
    ],
)
def test_what_has_no_meaning(body: str, code: str) -> None:
    text = f"peft 2\nform g(w, r) {{ {body} }}\nedit e at layer[*].attn.q {{ w = g(w, r=2) }}\n"
    with pytest.raises(PeftcError) as error:
        peftc.plan(text, zoo.build("llama", torch.float64))
    assert code in {diagnostic.code for diagnostic in error.value.diagnostics}


@pytest.mark.parametrize(
    ("form", "at", "equation"),
    [
        (
            "form g(w) { param A[2, cols(w)] = t(svd(w, 2).v) param B[rows(w), 2] = svd(w, 2).u"
            " let c = B @ A f = w + (c - initial(c)) }",
            "attn.q",
            "w = g(w)",
        ),
        ("form g(w) { param n[cols(w)] = norm(t(w)) f = w + (n - initial(n)) }", "attn.q", "w = g(w)"),
        ("form g(x) { param A[d(x)] = normal let c = A * x f = c - initial(A) * x }", "ffn", "h += g(x)"),
        ("form g(x) { param A[d(x)] = 0 f = positions(A * x, 2, none) }", "ffn", "h += g(x)"),
        ("form g(x) { param A[d(x)] = 0 f = causal_attention(x, x, A * x, 2) }", "ffn", "h += g(x)"),
        ("form g(h) { param A[d(h), d(h)] = identity f = A @ h }", "ffn", "h = g(h)"),
        ("form g(h) { param v[d(h)] = 0 f = (1 + norm(v)) * h }", "ffn", "h = g(h)"),
        ("form g(h) { param R[heads(h), d_head(h), d_head(h)] = identity f = R @ h }", "attn.heads", "h = g(h)"),
        ("form g(h) { param R[d(h) / 4, 4, 4] = identity f = blocks(R) @ h }", "ffn", "h = g(h)"),
    ],
)
def test_a_value_that_changes_nothing_at_first(form: str, at: str, equation: str) -> None:
    model = zoo.build("llama", torch.float64).eval()
    before = logits(model)
    text = f"peft 2\n{form}\nedit e at layer[*].{at} {{ {equation} }}\nexpect identity(e)\n"
    peftc.compile(text, model, seed=3)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.rand_like(parameter))
    assert not torch.allclose(logits(model), before)


@pytest.mark.parametrize(
    "form",
    [
        "form g(x) { param A[d(x)] = normal param B[d(x)] = normal f = A * x - B * x }",
        "form g(x) { param A[d(x)] = normal f = A * x - initial(A) * h }",
        "form g(x) { param A[1, 1] = identity param B[d(x), d(x)] = identity f = (A - B) @ x }",
        "form g(x) { param A[2, d(x)] = normal f = 2 * A[0] * x - initial(A[1]) * x }",
        "form g(x) { param A[4, d(x)] = normal let v = mean(reshape(A, d(x), 4)[0])"
        " f = x * v - x * mean(initial(reshape(A, 4, d(x)))[0]) }",
    ],
)
def test_values_that_differ_at_first(form: str) -> None:
    form = form.replace("(x)", "(x, h)", 1) if "* h" in form else form
    call = "g(x, h)" if "* h" in form else "g(x)"
    text = f"peft 2\n{form}\nedit e at layer[*].ffn {{ h += {call} }}\n"
    assert not peftc.plan(text, zoo.build("llama", torch.float64)).edits[0].identity


def test_each_matrix_of_a_stack_is_orthogonal() -> None:
    model = zoo.build("llama", torch.float64).eval()
    form = "form g(h) { param R[d(h) / 4, 4, 4] = orthogonal f = blocks(R) @ h }"
    peftc.compile(f"peft 2\n{form}\nedit e at layer[0].ffn {{ h = g(h) }}\n", model, seed=3)
    (stack,) = peftc.parameters(model).values()
    torch.testing.assert_close(stack @ stack.mT, torch.eye(4).double().expand_as(stack), rtol=0, atol=1e-5)
    assert not torch.allclose(stack[0], stack[1])
