"""A reference is the base, or one adapter alone, beside a model that trains on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo

SPEC = """peft 2
edit qv at layer[*].attn.{q, v} { h += lora(x, r=4, dropout=0.3) }
edit f at layer[*].ffn { h += adapter(x, r=3) }
"""
TRAINED = {
    "llama": 'train own = [w] at "lm_head"',
    "bert": 'train own = [w, b] at "cls.predictions.transform.dense"',
    "t5": "",
}


@torch.no_grad()
def disturb(model: nn.Module, name: str | None = None) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in peftc.parameters(model, name).values():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def logits(name: str, model: Any) -> Tensor:
    with torch.no_grad():
        return model(**zoo.inputs(name, model, batch=3))[0]


@pytest.fixture(params=sorted(TRAINED))
def pair(request: Any) -> tuple[str, Any, Any]:
    """An architecture, its base, and an edited model in training with dropout of its own."""
    base = zoo.build(request.param, torch.float64, dropout=0.2)
    model = peftc.compile(SPEC + TRAINED[request.param], copy.deepcopy(base), seed=0)
    disturb(model)
    return request.param, base, model.train()


def test_a_reference_is_the_base(pair: tuple[str, Any, Any]) -> None:
    name, base, model = pair
    reference = peftc.reference(model)
    assert torch.equal(logits(name, reference), logits(name, base))
    assert not torch.equal(logits(name, model.eval()), logits(name, base))
    state = reference.state_dict()
    assert state.keys() == base.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in base.state_dict().items())
    for other in (copy.deepcopy(reference), pickle.loads(pickle.dumps(reference))):
        assert torch.equal(logits(name, other), logits(name, base))


def test_parts_and_methods_of_a_reference_are_those_of_the_base() -> None:
    base: Any = zoo.build("llama", torch.float64)
    model: Any = peftc.compile(SPEC + TRAINED["llama"], copy.deepcopy(base), seed=0)
    disturb(model)
    reference: Any = peftc.reference(model)
    ids = zoo.inputs("llama", model)["input_ids"]
    assert torch.equal(reference.generate(ids, max_new_tokens=3), base.generate(ids, max_new_tokens=3))
    assert torch.equal(reference.base_model(ids)[0], base.base_model(ids)[0])
    assert torch.equal(reference.get_output_embeddings().weight, base.lm_head.weight)
    hidden = torch.ones(1, 2, model.config.hidden_size, dtype=torch.float64)
    assert torch.equal(reference.get_submodule("model.layers.0.mlp")(hidden), base.model.layers[0].mlp(hidden))
    assert reference.config is model.config
    assert (reference.device, reference.dtype) == (model.device, model.dtype)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = reference.nowhere


def test_what_a_trainer_does_with_a_reference_leaves_the_policy(pair: tuple[str, Any, Any]) -> None:
    name, base, model = pair
    reference = peftc.reference(model)
    modes = {key: module.training for key, module in model.named_modules()}
    places = {key: (p.data_ptr(), p.dtype, p.requires_grad) for key, p in model.named_parameters()}
    reference.eval().train().to("cpu").half().requires_grad_(False)
    for module in reference.modules():  # as TRL switches dropout off
        if isinstance(module, nn.Dropout):
            module.p = 0
    forward = reference.forward
    reference.forward = lambda **inputs: forward(**inputs)  # as accelerate and TRL wrap it
    assert list(reference.parameters()) == []
    assert torch.equal(logits(name, reference), logits(name, base))
    assert not reference.training
    assert modes == {key: module.training for key, module in model.named_modules()}
    assert places == {key: (p.data_ptr(), p.dtype, p.requires_grad) for key, p in model.named_parameters()}
    for change in (
        lambda: reference.load_state_dict(base.state_dict()),
        lambda: setattr(reference, "lm_head", nn.Linear(2, 2)),
    ):
        with pytest.raises(peftc.PeftcError, match="P562"):
            change()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_call_changes_no_gradient_of_an_open_graph(use_reentrant: bool | None) -> None:
    def gradients(between: Callable[[Any], object]) -> list[Tensor]:
        model: Any = zoo.build("llama", torch.float64, dropout=0.2)
        peftc.compile(SPEC + TRAINED["llama"], model, seed=0).train()
        disturb(model)
        if use_reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        inputs = zoo.inputs("llama", model, batch=3, labels=True)
        torch.manual_seed(5)
        loss = model(**inputs).loss
        between((model, inputs))
        (loss * model(**inputs).loss).backward()
        return [cast(Tensor, p.grad) for p in peftc.parameters(model).values()]

    alone = gradients(lambda _: None)
    beside = gradients(lambda pair: peftc.reference(pair[0])(**pair[1]))
    assert all(torch.equal(first, second) for first, second in zip(alone, beside, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in alone)


def test_a_reference_computes_no_gradients() -> None:
    model: Any = peftc.compile(SPEC, zoo.build("llama"), seed=0)
    assert not peftc.reference(model, "default")(**zoo.inputs("llama", model)).logits.requires_grad


@pytest.mark.parametrize("attached", [True, False], ids=["adapters", "specs"])
def test_a_spec_or_an_adapter_is_a_reference(attached: bool, tmp_path: Path) -> None:
    alone = peftc.compile(SPEC, zoo.build("llama", torch.float64), seed=1).eval()
    disturb(alone)
    peftc.save(alone, tmp_path / "sft")
    base = zoo.build("llama", torch.float64)
    if attached:
        model = peftc.attach(tmp_path / "sft", copy.deepcopy(base))
        peftc.attach(tmp_path / "sft", model, name="policy")
        peftc.activate(model, "policy")
    else:
        model = peftc.load(tmp_path / "sft", copy.deepcopy(base), name="sft")
        peftc.compile(SPEC, model, seed=2, name="policy", prefix="dpo")
    disturb(model, "policy")
    reference = peftc.reference(model.train(), "sft")
    torch.testing.assert_close(logits("llama", reference), logits("llama", alone), rtol=0, atol=1e-12)
    assert torch.equal(logits("llama", peftc.reference(model)), logits("llama", base))
    assert (logits("llama", model.eval()) - logits("llama", alone)).abs().max() > 1e-3

    before = {key: value.clone() for key, value in reference.state_dict().items()}
    assert before.keys() > base.state_dict().keys()
    disturb(model, "policy")
    assert all(torch.equal(value, reference.state_dict()[key]) for key, value in before.items())
    disturb(model, "sft")
    assert any(not torch.equal(value, reference.state_dict()[key]) for key, value in before.items())
    with pytest.raises(peftc.PeftcError, match="P413"):
        peftc.reference(model, "nobody")


def test_a_reference_follows_its_model() -> None:
    base: Any = zoo.build("llama", torch.float64)
    model: Any = peftc.compile(SPEC, copy.deepcopy(base), seed=0)
    disturb(model)
    reference: Any = peftc.reference(model)
    peftc.compile("peft 2 edit s at layer[*].ffn { h *= vector(init=2) }", model, name="later")
    assert torch.equal(logits("llama", reference), logits("llama", base))
    model.float()
    assert torch.equal(logits("llama", reference), logits("llama", base.float()))
    peftc.remove(model)
    with pytest.raises(peftc.PeftcError, match="P410"):
        reference(**zoo.inputs("llama", model))
