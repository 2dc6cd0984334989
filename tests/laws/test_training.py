"""Dropout, gradient checkpointing and seeds: a compiled model trains like its base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.laws.harness import TOLERANCE, Case, Inputs, close, loss, values
from tests.laws.recipe import Recipe
from tests.laws.recipes import NAMED

NO_OPS = [
    (recipe, name)
    for name in zoo.ARCHITECTURES
    for recipe in map(NAMED.get, ("lora", "dora", "ia3", "par-bn-residual", "scaled-states"))
    if recipe is not None and name in recipe.on
] + [(NAMED[method], name) for method, name in (("vera", "bart"), ("oft", "gpt2"), ("said", "llama"), ("glora", "opt"))]


def named(case: tuple[Recipe, str]) -> str:
    return f"{case[1]}-{case[0].name}"


def seeded(model: nn.Module, inputs: Inputs, seed: int = 11) -> Tensor:
    torch.manual_seed(seed)
    return model(**inputs)[0]


@pytest.mark.parametrize("case", NO_OPS, ids=named)
def test_identity_edits_do_not_change_the_bases_dropout(case: tuple[Recipe, str]) -> None:
    """An edit that is the identity draws no random numbers: in train mode the output is the base's,
    bit for bit.
    """
    recipe, name = case
    model = zoo.build(name, dropout=0.3).train()
    inputs = zoo.inputs(name, model, padding="right")
    with torch.no_grad():
        want = seeded(model, inputs)
        peftc.compile(recipe.text, model, seed=0)
        assert model.training
        assert torch.equal(seeded(model, inputs), want)
        assert not torch.equal(seeded(model, inputs, seed=12), want)
        assert torch.equal(model.eval()(**inputs)[0], zoo.build(name, dropout=0.3)(**inputs)[0])


EXACT = ("bart", "bert", "roberta", "t5", "gpt2")  # their eager softmax has the dtype of the model
DROPPING = [
    (NAMED[method], name) for name in EXACT for method in ("houlsby", "par-bn-residual", "seq-bn", "everything", "mam")
]


@pytest.mark.parametrize("pair", DROPPING, ids=named)
def test_train_mode_with_dropout_equals_the_reference(pair: tuple[Recipe, str]) -> None:
    """h enters the residual sum after the model's own dropout, so the same seed draws the same
    masks. Attention is eager: attention dropout then acts on explicit weights, prefix columns
    first.
    """
    recipe, name = pair
    case = Case(recipe, name, attn_implementation="eager", dropout=0.2).at_random()
    reference = case.reference(grad=False)[0].model
    case.model.train()
    reference.train()
    inputs = case.batches[1]
    with torch.no_grad():
        assert (seeded(case.model, inputs) - seeded(reference, inputs)).abs().max() <= TOLERANCE


DROPOUT_FORMS = {
    "adapter": "edit e at layer[*].ffn { h += adapter(x, r=4, dropout=0.5) }",
    "lora": "edit e at layer[*].attn.q { h += lora(x, r=4, dropout=0.5) }",
    "bottleneck": "edit e at layer[*].attn.heads { h += bottleneck(q, r=4, dropout=0.5) }",
    "kron": "edit e at layer[*].attn.q { h += kron(x, dropout=0.5) }",
    "vera": "edit e at layer[*].attn.q { h += vera(x, r=4, dropout=0.5) }",
    "svd": "edit e at layer[*].attn.q { h += svd(x, r=4, dropout=0.5) }",
    "phm": "edit e at layer[*].ffn { h += phm(x, r=4, n=2, dropout=0.5) }",
}


@pytest.mark.parametrize("form", DROPOUT_FORMS)
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_forms_dropout_follows_the_models_mode(name: str, form: str) -> None:
    spec = "peft 1\n" + DROPOUT_FORMS[form]
    with_it, without = (zoo.build(name, torch.float64) for _ in range(2))
    peftc.compile(spec, with_it, seed=3)
    peftc.compile(spec.replace(", dropout=0.5", ""), without, seed=3)
    for parameters in map(peftc.parameters, (with_it, without)):
        for parameter in parameters.values():
            nn.init.constant_(parameter, 0.1)
    inputs = zoo.inputs(name, with_it)
    with torch.no_grad():
        assert torch.equal(with_it(**inputs)[0], without(**inputs)[0])
        with_it.train()
        one, two, again = seeded(with_it, inputs, 1), seeded(with_it, inputs, 2), seeded(with_it, inputs, 1)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)


@pytest.mark.parametrize(("method", "reentrant"), [("everything", False), ("mam", True)], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_gradient_checkpointing_changes_no_gradient(name: str, method: str, reentrant: bool) -> None:
    case = Case(NAMED[method], name, dropout=0.1).at_random()
    case.model.train()
    inputs = case.batches[1]
    plain = gradients(case, inputs)
    checkpoint = getattr(case.model, "activation_checkpointing_enable", case.model.gradient_checkpointing_enable)
    checkpoint({"use_reentrant": reentrant})
    if reentrant:
        case.model.enable_input_require_grads()
    calls = count_layer_calls(case)
    again = gradients(case, inputs)
    assert max(calls.values()) == 2, "layers were not run again: checkpointing is off"
    for key, gradient in plain.items():
        close(again[key], gradient, key)


def gradients(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    case.model.zero_grad()
    torch.manual_seed(5)
    loss(case.model, inputs)[1].backward()
    slopes = {key: p.grad.clone() for key, p in case.parameters.items() if p.grad is not None}
    assert set(slopes) == set(case.parameters)
    return slopes


def count_layer_calls(case: Case) -> dict[str, int]:
    """Counts the calls of each ffn's down projection."""
    calls: dict[str, int] = {}
    for ffn in case.reference(grad=False)[0].ffns:

        def count(*_: Any, name: str = ffn.down.module) -> None:
            calls[name] = calls.get(name, 0) + 1

        case.model.get_submodule(ffn.down.module).register_forward_hook(count)
    return calls


@pytest.mark.parametrize("method", ["mam", "lora", "prefix-mlp", "compacter", "loreft", "loha"])
def test_first_values_depend_on_the_seed_and_nothing_else(method: str) -> None:
    recipe = NAMED[method]
    first_values = []
    for seed, noise in ((5, 1), (5, 2), (6, 1)):
        torch.manual_seed(noise)
        model = zoo.build("bart")
        peftc.compile(recipe.text, model, seed=seed)
        first_values.append(values(peftc.parameters(model)))
    one, same, other = first_values
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


def test_first_values_do_not_depend_on_order_or_on_other_edits() -> None:
    a = "edit a at layer[*].ffn { h += adapter(x, r=3) }"
    b = "edit b at layer[*].attn.q { h += lora(x, r=3) }"
    first_values = []
    for spec in (f"peft 1\n{a}\n{b}", f"peft 1\n{b}\n{a}", f"peft 1\n{a}"):
        model = zoo.build("llama")
        peftc.compile(spec, model, seed=1)
        first_values.append({k: v for k, v in values(peftc.parameters(model)).items() if k.startswith("a/")})
    one, two, three = first_values
    assert one.keys() == two.keys() == three.keys()
    assert all(torch.equal(one[k], two[k]) and torch.equal(one[k], three[k]) for k in one)


def test_the_global_generator_is_unchanged() -> None:
    model = zoo.build("bert")
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    peftc.compile(NAMED["mam"].text, model, seed=9)
    assert torch.equal(torch.rand(1), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bart", "t5", "llama"])
def test_edit_parameters_of_a_half_precision_base_are_float32(name: str, dtype: torch.dtype) -> None:
    model = zoo.build(name, dtype)
    inputs = zoo.inputs(name, model)
    peftc.compile(NAMED["everything"].text, model, seed=0)
    assert {p.dtype for p in peftc.parameters(model).values()} == {torch.float32}
    out = model(**inputs)[0]
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().sum().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values())
