"""Parts of features, arguments of calls of one `shared`, and the coupling, which has both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.equations.table import FORMS
from tests import zoo
from tests.equations.models import run
from tests.laws.harness import randomise
from tests.refusals import refused

BOTH = """
let nice = shared(coupling(reduction=3, act=tanh))
edit e at {} {{ h = nice(h) }}
edit f at {} {{ h = nice(h, inverse=true) }}
"""


def compiled(text: str, name: str = "bert", **options: Any) -> Any:
    model: Any = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{text}\n", model, seed=0, **options)
    randomise(peftc.parameters(model))
    return model


class Coupling(nn.Module):
    """NICE, by hand."""

    def __init__(self, values: dict[str, Tensor], inverse: bool) -> None:
        super().__init__()
        self.values, self.inverse = values, inverse

    def net(self, name: str, x: Tensor) -> Tensor:
        down, down_bias, up, up_bias = (
            self.values[f"{name}_{part}"] for part in ("down", "down_bias", "up", "up_bias")
        )
        return torch.tanh(x @ down.T + down_bias) @ up.T + up_bias

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split((x.shape[-1] // 2, x.shape[-1] - x.shape[-1] // 2), -1)
        if self.inverse:
            b = b - self.net("G", a)
            return torch.cat([a - self.net("F", b), b], -1)
        a = a + self.net("F", b)
        return torch.cat([a, b + self.net("G", a)], -1)


def test_a_coupling_and_its_inverse_are_those_of_a_program(tmp_path: Path) -> None:
    """With hooks on another copy: outputs, and gradients of what both have in common."""
    layers = ["layer[0]", "layer[1]"]
    model, other = compiled(BOTH.format(*layers)), zoo.build("bert", torch.float64).eval()
    own = peftc.parameters(model)
    assert len(own) == 8
    values = {name.rpartition(".")[2]: one.detach().clone().requires_grad_() for name, one in own.items()}
    modules: Any = other.get_submodule("bert.encoder.layer")
    for layer, inverse in zip(modules, (False, True), strict=False):
        coupling = Coupling(values, inverse)
        layer.register_forward_hook(lambda _, args, h, f=coupling: (f(h[0]), *h[1:]) if isinstance(h, tuple) else f(h))
    value, expected = run(model, "bert"), run(other, "bert")
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    for one in (value, expected):
        one.square().sum().backward()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, values[name.rpartition(".")[2]].grad, rtol=0, atol=1e-9)
    assert peftc.verify(model).ok
    peftc.save(model, tmp_path)
    again = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path, again)
    assert torch.equal(run(again, "bert"), value)


@pytest.mark.parametrize("tasks", [(), ("a", "b")])
def test_the_inverse_undoes_it(tasks: tuple[str, ...]) -> None:
    base = run(zoo.build("llama", torch.float64).eval(), "llama")
    head = "per task " if tasks else ""
    text = f"let n = shared(coupling())\nedit e at layer[*].ffn {head}{{ let y = n(h)  h = n(y, inverse=true) }}"
    model = compiled(text, "llama", **({"tasks": tasks} if tasks else {}))
    for name in tasks or ("",):
        if not tasks:
            torch.testing.assert_close(run(model, "llama"), base, rtol=0, atol=1e-10)
            continue
        with peftc.task(model, name):
            torch.testing.assert_close(run(model, "llama"), base, rtol=0, atol=1e-10)
    if not tasks:
        half = compiled("let n = shared(coupling())\nedit e at layer[*].ffn { h = n(h) }", "llama")
        assert not torch.allclose(run(half, "llama"), base)


@pytest.mark.parametrize(
    ("form", "first", "second", "state"),
    [
        ("lora(r=2)", "a(x)", "a(x, alpha=8)", "h +="),
        ("lowrank(r=2)", "a()", "a(alpha=8)", "w +="),
        ("coupling(act=none)", "a(h)", "a(h, inverse=true)", "h ="),
    ],
)
def test_calls_with_other_arguments_fold(form: str, first: str, second: str, state: str) -> None:
    lines = [f"let a = shared({form})"]
    lines += [f"edit {n} at layer[*].attn.{n} {{ {state} {call} }}" for n, call in (("q", first), ("v", second))]
    model = compiled("\n".join(lines))
    value = run(model, "bert")
    assert len(peftc.fold(model).folded) == 2
    torch.testing.assert_close(run(model, "bert"), value, rtol=0, atol=1e-10)


def test_which_arguments_the_value_alone_depends_on() -> None:
    own = {name: form.value_arguments for name, form in FORMS.items()}
    assert own["coupling"] == {"act", "inverse"}
    assert own["lora"] == {"alpha", "rslora", "dropout"}
    assert not own["prefix"] | own["prompt"] | own["sparse"] | own["reft"]


REFUSALS = {
    "an argument of the parameters": ("h = n(h, reduction=4)", "P102"),
    "an unknown one": ("h = n(h, inverted=true)", "P102"),
    "no truth value": ("h = n(h, inverse=3)", "P105"),
    "twice": ("h = n(h, inverse=true, inverse=true)", "P104"),
    "an unknown activation": ("h = n(h, act=rel)", "P106"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    equation, code = REFUSALS[case]
    refused(code, lambda: compiled(f"let n = shared(coupling())\nedit e at layer[0] {{ {equation} }}"))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("concat(narrow(x, 0, 2), b0)", "P301"),
        ("narrow(x, 30, 3)", "P301"),
        ("concat(mean(x, tokens), x)", "P301"),
        ("narrow(x, 0, d(x) + 1)", "P301"),
    ],
)
def test_parts_that_do_not_fit(value: str, code: str) -> None:
    form = f"form halves(x) {{ param b0[3] = 0  f = {value} + 0 * b0[0] }}"
    refused(code, lambda: compiled(f"{form}\nedit e at layer[*].attn.q {{ h += halves(x) }}"))


def test_values_of_layers_are_arguments_of_calls() -> None:
    text = "let n = shared(coupling())\nedit e at layer[*] { h = n(h, act=[relu, tanh, relu]) }"
    one = compiled(text)
    two = compiled(
        "let n = shared(coupling())\nedit e at layer[0, 2] { h = n(h) }\nedit f at layer[1] { h = n(h, act=tanh) }"
    )
    values = {name.rpartition(".")[2]: p for name, p in peftc.parameters(one).items()}
    for name, parameter in peftc.parameters(two).items():
        parameter.data.copy_(values[name.rpartition(".")[2]])
    assert torch.equal(run(one, "bert"), run(two, "bert"))
