"""`below(s, first)`, `history(x)`, `top(out)`, and inputs that a call may leave out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.equation_code.cross_layer_module import CrossLayerModule
from peftc.equations.checks import check_form
from peftc.equations.definition import text_form
from peftc.forms.form import Dims, Spot
from peftc.forms.module import FormModule, build, build_owner, seeded
from peftc.forms.shapes import Tokens
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from tests import zoo
from tests.equations.interpreter import SIZES as FEATURES
from tests.equations.interpreter import evaluate_sites
from tests.equations.random_forms import D_IN, D_OUT, R, Writer
from tests.equations.test_random_forms import ARGS, Instance, randomize

SITES = 3


def sites_of(form: ast.Form, seed: int) -> list[FormModule]:
    """The modules of a form at sites one above the other."""
    row = text_form(form)
    spots = tuple(Spot(f"layer[{i}]", "", D_IN, D_OUT) for i in range(SITES))
    modules: list[FormModule] = []
    for i in range(SITES):
        dims = Dims(Tokens(D_IN), Tokens(D_OUT), D_IN, SITES, spots=spots, index=i, depth=SITES)
        assert row.shape(ARGS, dims) == dims.target
        module = build(Instance(row, ARGS, dims), dtype=torch.float64).eval()
        owner = build_owner(Instance(row, ARGS, dims), dtype=torch.float64).eval() if not i else modules[0].owner_module
        assert owner is not None
        module.join(owner, i)
        module.initialise(lambda name, i=i: seeded(f"{seed}/{i}/{name}"), {})
        module.fix(f"layer[{i}]")
        modules.append(module)
    return modules


@pytest.mark.parametrize("seed", range(60))
def test_a_random_form_of_several_layers(seed: int) -> None:
    writer = Writer(seed, of_layers=True)
    text = writer.text(f"form_{seed}")
    (form,) = parse_text(f"peft 2\n{text}").statements
    assert isinstance(form, ast.Form)
    assert {error.code for error in check_form(form)} <= {"P114"}
    modules = sites_of(form, seed)
    for i, module in enumerate(modules):
        randomize(module, seed + i)
    generator = torch.Generator().manual_seed(seed)
    values = [{"r": R, "s": 2.0, **dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
    for _ in range(2):  # the second forward begins anew
        inputs = [torch.randn(2, 2, D_IN, dtype=torch.float64, generator=generator) for _ in modules]
        got = torch.stack([module(x) for module, x in zip(modules, inputs, strict=True)])
        for at in ((0, 0), (1, 1)):
            names = [{**own, "x": x[at], FEATURES: dict(writer.lets)} for own, x in zip(values, inputs, strict=True)]
            want = torch.stack(evaluate_sites(form, names))
            torch.testing.assert_close(got[:, *at], want, rtol=1e-9, atol=1e-9)


def test_random_forms_read_other_layers() -> None:
    texts = [Writer(seed, of_layers=True).text("f") for seed in range(60)]
    assert sum("below(" in text for text in texts) > 10
    assert sum("history(" in text for text in texts) > 10


# In models

DENSE = "form dense(x, [c]) { param a[d(x)] = 0.5 let s = [c] * (x + a * below(s, 0)) f = s }".replace(
    "(x, [c])", "(x)"
)
DENSE = DENSE.replace("[c] * ", "")
DENSE_SPEC = f"peft 2\n{DENSE}\nedit e at layer[0..1].ffn {{ h += dense(x) }}"  # not at the last layer


def test_a_state_without_common_parameters_goes_through_part_of_a_stack(tmp_path: Path) -> None:
    base: Any = zoo.build("llama", torch.float64).eval()
    model = peftc.compile(DENSE_SPEC, zoo.build("llama", torch.float64), seed=0).eval()
    batch = zoo.inputs("llama", model)
    factors = list(peftc.parameters(model).values())
    assert len(factors) == 2  # one for each site, nothing else is saved
    with torch.no_grad():
        factors[1].uniform_()
    states: list[Tensor] = []

    def add(_module: nn.Module, inputs: tuple[Tensor], h: Tensor) -> Tensor:
        below = states[-1] * factors[len(states)] if states else 0.0
        states.append(inputs[0] + below)
        return h + states[-1]

    for layer in base.model.layers[:2]:
        layer.mlp.register_forward_hook(add)
    want = base(**batch).logits
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=1e-11)
    peftc.save(model, tmp_path)
    loaded = peftc.load(tmp_path, zoo.build("llama", torch.float64)).eval()
    torch.testing.assert_close(loaded(**batch).logits, want, rtol=0, atol=1e-11)
    assert peftc.verify(loaded).ok


def test_copies_have_no_states() -> None:
    model = peftc.compile(DENSE_SPEC, zoo.build("llama", torch.float64), seed=0)
    batch = zoo.inputs("llama", model)
    want = model.eval()(**batch).logits
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(**batch).logits, want)
    site = next(module for module in model.modules() if isinstance(module, CrossLayerModule))
    assert site.owner_module is not None
    for other in (copy.deepcopy(site.owner_module), pickle.loads(pickle.dumps(site.owner_module))):
        assert not other.cross_layer_state.states
    assert site.owner_module.cross_layer_state.states  # type: ignore[union-attr]


def test_the_last_of_the_sites_is_the_top() -> None:
    """The value of all layers is at the last one alone, whatever it is computed from."""
    text = "form last(x) { param a[d(x)] per group = 1 f = a * x if top(out) f = 0 * x if top(out) == false }"
    spec = f"peft 2\n{text}\nedit e at layer[*] {{ h += last(h) }}"
    model = peftc.compile(spec, zoo.build("llama", torch.float64), seed=0).eval()
    base = zoo.build("llama", torch.float64).eval()
    batch = zoo.inputs("llama", model)
    now, before = (m(**batch, output_hidden_states=True).hidden_states for m in (model, base))
    assert [torch.equal(a, b) for a, b in zip(now, before, strict=True)] == [True] * (len(now) - 1) + [False]
    with pytest.raises(peftc.PeftcError, match="P315"):
        peftc.plan(spec.replace("layer[*]", "layer[0..1]"), base)


@pytest.mark.parametrize("call", ["two(h)", "two(h, x)"])
def test_a_call_may_leave_an_input_out(call: str) -> None:
    text = """form two(h, x = none) {
    param a[d(h)] = 0.5
    param b[d(x)] = 0.25 if x
    let first = a * h
    f = first + b * x if x
    f = first if x == none
}"""
    model = peftc.compile(f"peft 2\n{text}\nedit e at layer[0].ffn {{ h = {call} }}", zoo.build("llama", torch.float64))
    base: Any = zoo.build("llama", torch.float64).eval()
    has_second = "x" in call

    def replace(_module: nn.Module, inputs: tuple[Tensor], h: Tensor) -> Tensor:
        return h / 2 + inputs[0] / 4 if has_second else h / 2

    base.model.layers[0].mlp.register_forward_hook(replace)
    batch = zoo.inputs("llama", model)
    torch.testing.assert_close(model.eval()(**batch).logits, base(**batch).logits, rtol=0, atol=1e-11)
    assert len(peftc.parameters(model)) == 1 + has_second


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ("f = below(x, 0)", "P108", "the value of `let s"),
        ("let s = x f = below(s)", "P108", "the value of `let s"),
        ("let s = 2 f = x + below(s, 0)", "P301", "expected one value for each token"),
        ("param a[3] = 0 let s = a f = x * below(s, 0)", "P301", "expected one value for each token"),
        ("let s = t(below(s, reshape(x, 2, d(x) / 2))) f = reshape(s, d(x))", "P301", "at the first site"),
        ("param a[d(x)] per edit = 0 let s = a * x f = below(s, 0)", "P023", "per group"),
        ("let s = x f = below(s, 0) if top(out) f = x if top(out) == false", "P105", "only some sites"),
        ("let last = site(out) f = mean(history(x)) if last == 0 f = x if last > 0", "P105", "only some sites"),
        ("let s = x param a[below(s, 1)] = 0 f = a * x", "P105", "known in parts of the value alone"),
        ("f = t(history(history(x))) @ x", "P301", "expected features of each token"),
        ("f = history(x) @ x", "P301", ""),
        ("let i = random(2) param a[2, d(x)] = 1 let s = x f = a[i] * below(s, 0)", "P111", "one of them"),
        ("param read[d(x)] = 1 let s = x f = read * below(s, 0)", "P121", "module"),
    ],
)
def test_refusals(lines: str, code: str, message: str) -> None:
    text = f"peft 2\nform g(x) {{ {lines} }}\nedit e at layer[*].ffn {{ h += g(x) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value
    assert message in str(refused.value)


def test_states_of_other_sizes_are_refused() -> None:
    text = "form g(x) { param B[d(out), d(x)] = 0 let s = x + below(s, 0) f = B @ s }"
    at = "layer[*].attn | layer[*].attn.o"  # 32 features, and 48 of all heads
    with pytest.raises(peftc.PeftcError, match="P305"):
        peftc.plan(f"peft 2\n{text}\nedit e at {at} {{ h += g(x) }}", zoo.build("qwen3"))
