"""Forms of a text in models, against the built-in forms of the same equations."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo
from tests.equations.models import EQUATIONS, MODELS, compiled, run


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Draws parameters, the same for a built-in form and that of the text."""
    others = peftc.parameters(source)
    for saved, parameter in peftc.parameters(target).items():
        value = 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            parameter += value
            other = others[saved.replace("/text_", "/")]
            other.copy_(parameter.reshape(other.shape))


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_form_of_the_text_is_the_built_in_one(model: str, name: str) -> None:
    base = run(zoo.build(model, torch.float64).eval(), model)
    own, other = compiled(model, name, "text_"), compiled(model, name, "")
    sizes = {saved.replace("/text_", "/"): p.numel() for saved, p in peftc.parameters(own).items()}
    assert sizes == {saved: p.numel() for saved, p in peftc.parameters(other).items()}
    assert torch.equal(run(own, model), base) == torch.equal(run(other, model), base)

    copy_parameters(other, own)
    value = run(own, model)
    torch.testing.assert_close(value, run(other, model), rtol=0, atol=1e-10)
    assert not torch.equal(value, base)
    for one in (own, other):
        run(one, model).square().sum().backward()
    gradients = {saved.replace("/text_", "/"): p.grad for saved, p in peftc.parameters(own).items()}
    for saved, parameter in peftc.parameters(other).items():
        if parameter.grad is None:
            assert gradients[saved] is None
        else:
            own_gradient = gradients[saved]
            assert own_gradient is not None
            torch.testing.assert_close(own_gradient.reshape(parameter.shape), parameter.grad, rtol=1e-8, atol=1e-10)

    for again in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert torch.equal(run(again, model), value)
    report, reference = peftc.fold(copy.deepcopy(own)), peftc.fold(copy.deepcopy(other))
    assert bool(report.folded) == bool(reference.folded) == EQUATIONS[name][2]
    folded = copy.deepcopy(own)
    peftc.fold(folded)
    torch.testing.assert_close(run(folded, model), value, rtol=0, atol=1e-9)
    peftc.remove(own)
    assert torch.equal(run(own, model), base)


@pytest.mark.parametrize("name", ["lora", "magnitude", "per task"])
def test_an_adapter_holds_the_text_of_its_forms(name: str, tmp_path: Path) -> None:
    own = compiled("bert", name, "text_")
    for parameter in peftc.parameters(own).values():
        nn.init.normal_(parameter)
    peftc.save(own, tmp_path)
    again = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path, again)
    assert torch.equal(run(again, "bert"), run(own, "bert"))


def test_training_learns_and_dropout_acts() -> None:
    model = compiled("bert", "lora", "text_").train()
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    torch.manual_seed(0)
    first = run(model, "bert")
    assert not torch.equal(run(model, "bert"), first)
    torch.manual_seed(0)
    assert torch.equal(run(model, "bert"), first)
    assert all(p.grad is None for n, p in model.named_parameters() if "peftc" not in n)


# Scopes

SCOPES = """peft 2
form projected(x, r) {
    fixed A[r, d(x)] per edit = kaiming
    fixed B[d(out), r] per edit = kaiming
    param u[r] = 0.1
    param v[d(out)] = 0
    f = v * B @ (u * A @ x)
}
form tied(x, r) {
    param A[r, d(x)] per edit = kaiming
    param B[d(out), r] per edit = 0
    f = B @ A @ x
}
form tied_in_a_group(x, r) {
    param A[r, d(x)] per group = kaiming
    param B[d(out), r] = 0
    f = B @ A @ x
}
"""
SITES = "layer[*].attn.q | layer[*].attn.v"


@pytest.mark.parametrize(
    ("form", "count"), [("projected", 6 * (4 + 32)), ("tied", 4 * 64), ("tied_in_a_group", 4 * 32 + 6 * 4 * 32)]
)
def test_scopes(form: str, count: int, tmp_path: Path) -> None:
    model = zoo.build("bert", torch.float64).eval()
    base = run(model, "bert")
    spec = f"{SCOPES}edit e at {SITES} {{ h += {form}(x, r=4) }}"
    peftc.compile(spec, model, seed=0)
    trained = sum(p.numel() for p in peftc.parameters(model).values())
    assert trained == count == peftc.plan(spec, zoo.build("bert", torch.float64)).edits[0].trained
    assert torch.equal(run(model, "bert"), base)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    value = run(model, "bert")
    peftc.save(model, tmp_path)
    again = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path, again)
    assert torch.equal(run(again, "bert"), value)
    assert torch.equal(run(copy.deepcopy(model), "bert"), value)
    assert peftc.fold(model).folded
    torch.testing.assert_close(run(model, "bert"), value, rtol=0, atol=1e-9)


# Files

LIBRARY = """peft 2
form half(x, r) {
    param A[r, d(x)] = kaiming
    param B[d(out), r] = 0
    f = 0.5 * B @ A @ x
}
method halves(r = 4) { edit h at layer[*].attn.q { h += half(x, r=r) } }
"""


@pytest.mark.parametrize(
    "text",
    [
        'peft 2\nuse half from "library.peft"\nedit e at layer[*].attn.v { h += half(x, r=2) }\n',
        'peft 1\nuse halves from "library.peft"\napply halves(r=3)\n',
        'peft 2\nuse half from "library.peft"\nlet p = shared(half(r=2))\nedit e at layer[*].attn.v { h += p(x) }\n',
    ],
)
def test_forms_of_another_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "library.peft").write_text(LIBRARY, encoding="utf-8")
    (tmp_path / "own.peft").write_text(text, encoding="utf-8")
    model = zoo.build("bert", torch.float64).eval()
    peftc.compile(tmp_path / "own.peft", model)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    value = run(model, "bert")
    peftc.save(model, tmp_path / "adapter")
    (tmp_path / "library.peft").unlink()
    again = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path / "adapter", again)
    assert torch.equal(run(again, "bert"), value)


def test_two_specs_with_forms_on_one_model() -> None:
    model = zoo.build("bert", torch.float64).eval()
    peftc.compile(f"{LIBRARY}edit a at layer[*].attn.q {{ h += half(x, r=2) }}", model, name="one")
    peftc.compile(f"{LIBRARY}edit b at layer[*].attn.v {{ h += half(x, r=2) }}", model, name="two")
    assert len(peftc.parameters(model)) == 12
    other = LIBRARY.replace("0.5", "0.25")
    with pytest.raises(PeftcError) as error:
        peftc.compile(f"{other}edit c at layer[*].attn.k {{ h += half(x, r=2) }}", model, name="three")
    assert [d.code for d in error.value.diagnostics] == ["P412"]
