"""P326: a warning if, and only if, no gradient reaches a parameter when training starts."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import peftc
from peftc.equations.checks.first_gradients import never_trains
from peftc.equations.definition import TextForm
from peftc.forms.module import FormModule
from tests import zoo
from tests.equations.test_random_forms import ARGS, case_of, sample, text_of
from tests.forms.cases import CASES

# Whose derivatives may be 0 for another reason than a factor: equal features, bounds, what cancels.
OTHERS = re.compile(r"softmax|_norm|clamp|_noise|solve|cayley")


def has_gradient(module: FormModule, inputs: list[Tensor]) -> bool:
    """Whether autograd gives a parameter a gradient that is not 0, at one of these inputs."""
    parameters = list(module.parameters())
    for i, x in enumerate(inputs):
        value = module(x)
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(i), dtype=value.dtype)
        if value.requires_grad:
            gradients = torch.autograd.grad((value * weights).sum(), parameters, materialize_grads=True)
            if any(bool(gradient.any()) for gradient in gradients):
                return True
    return False


@pytest.mark.parametrize("kind", ["hidden", "affine", "weight"])
def test_random_forms_train_where_autograd_says_so(kind: str) -> None:
    counts = {True: 0, False: 0}
    for seed in range(220):
        case = case_of(kind, seed)
        if not list(case.module.parameters()):
            continue
        assert isinstance(case.row, TextForm)
        trains = has_gradient(case.module, [sample(seed), sample(seed + 1_000)])
        warned = never_trains(case.row.at(case.row.fill(ARGS), case.dims))
        text = text_of(kind, seed)
        assert not (warned and trains), f"a false alarm:\n{text}"
        assert warned or trains or OTHERS.search(text), f"no warning:\n{text}"
        counts[warned] += 1
    assert all(counts.values())


def test_no_built_in_form_is_warned_of() -> None:
    for case in CASES:
        if isinstance(case.form, TextForm) and case.form.count(case.args, case.dims).trained:
            assert not never_trains(case.form.at(case.args, case.dims)), str(case)


PAIR = """form pair(x, r) {
    param A[r, d(x)] = zeros
    param B[d(out), r] = zeros
    f = B @ A @ x
}"""
WARNED = {
    "both factors": f"{PAIR}\nedit e at layer[*].ffn {{ h += pair(x, r=2) }}",
    "beside a form that trains": f"{PAIR}\nedit e at layer[*].ffn {{ h += lora(x, r=2) + pair(x, r=2) }}",
    "through a let": """form f(x) {
        param a[d(x)] = zeros
        let u = a * x
        f = u * u
    }
    edit e at layer[*].ffn { h += f(x) }""",
    "relu at 0": """form f(x, r) {
        param A[r, d(x)] = zeros
        fixed B[d(out), r] = kaiming
        f = B @ relu(A @ x)
    }
    edit e at layer[*].ffn { h += f(x, r=2) }""",
    "with a loss": f"""{PAIR.replace("f = ", "loss_small = total(A * A) + total(B * B)  f = ")}
    edit e at layer[*].ffn {{ h += pair(x, r=2) }}""",
    "an argument": """form f(x, one, two) {
        param A[d(x)] = one
        param B[d(x)] = two
        f = A * B * x
    }
    edit e at layer[*].ffn { h += f(x, one=0, two=0) }""",
    "forms that multiply each other": "edit e at layer[*].ffn { h += scalar(init=0) * lora(x, r=2) }",
    "of one let": "edit e at layer[*].ffn { let g = scalar(init=0)  h += g * lora(x, r=2) }",
    "parameters that sites have in common": ("edit e at layer[*].ffn.down { w += scalar(init=0) * fastfood(d=9) }"),
    "shared": f"{PAIR}\nlet one = shared(pair(r=2))\nedit e at layer[*].ffn {{ h += one(x) }}",
}
NOT_WARNED = {
    "one factor": "edit e at layer[*].ffn { h += lora(x, r=2) }",
    "a scale": "edit e at layer[*].ffn { h *= vector(init=1) }",
    "a scale of zeros": "edit e at layer[*].ffn { h *= vector(init=0) }",
    "a bias of zeros": "edit e at layer[*].ffn { h += vector(init=0) }",
    "a gate at 0": "edit e at layer[*].ffn { h += scalar(init=0) * adapter(x, r=2) }",
    "a gate at 0 beside others": """form f(x) {
        param g[1] = zeros
        param a[d(x)] = zeros
        param b[d(x)] = zeros
        f = g * (a * x) + b
    }
    edit e at layer[*].ffn { h += f(x) }""",
    "tokens of zeros": """form tokens(n) {
        param P[n, d(out)] = zeros
        f = P
    }
    edit e at embed { h = concat(tokens(n=3), h) }""",
    "a bias of zeros under relu": """form f(x, r) {
        param A[r, d(x)] = kaiming
        param b[r] = zeros
        param B[d(out), r] = zeros
        f = B @ relu(A @ x + b)
    }
    edit e at layer[*].ffn { h += f(x, r=2) }""",
    "parameters that sites have in common": "edit e at layer[*].ffn.down { w += scalar(init=1) * fastfood(d=9) }",
    "shared with an edit in which it trains": """let one = shared(scalar(init=0))
    edit e at layer[*].ffn { h += one() * lora(x, r=2) }
    edit f at layer[*].attn { h += one() * adapter(x, r=2) }""",
}


def warned(spec: str, model: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peftc.plan(f"peft 2\n{spec}", model)
    return [str(one.message) for one in caught]


@pytest.fixture(scope="module")
def llama() -> Any:
    return zoo.build("llama")


@pytest.mark.filterwarnings("ignore::peftc.PeftcWarning")
@pytest.mark.parametrize("name", WARNED)
def test_what_never_trains_is_warned_of(name: str, llama: Any) -> None:
    (message,) = warned(WARNED[name], llama)
    assert "warning[P326]" in message
    model = peftc.compile(f"peft 2\n{WARNED[name]}", zoo.build("llama"), seed=0)
    assert (name == "beside a form that trains") == trains(model)


@pytest.mark.parametrize("name", NOT_WARNED)
def test_what_trains_is_not_warned_of(name: str, llama: Any) -> None:
    assert not warned(NOT_WARNED[name], llama)
    assert trains(peftc.compile(f"peft 2\n{NOT_WARNED[name]}", zoo.build("llama"), seed=0))


def test_a_number_that_is_0_is_meant(llama: Any) -> None:
    assert not warned("edit e at layer[*].ffn { h += layer * lora(x, r=2) }", llama)


def trains(model: Any) -> bool:
    """Whether a step of a loss reaches a parameter."""
    loss = model(**zoo.inputs("llama", model))[0].square().sum() + sum(peftc.losses(model).values())
    loss.backward()
    return any(p.grad is not None and bool(p.grad.any()) for p in peftc.parameters(model).values())
