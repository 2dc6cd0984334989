"""Ladder side-tuning and attention fusion: forms with a state that passes from layer to layer next
to the residual stream.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AlbertConfig

import peftc
from peftc.equation_code.cross_layer_module import CrossLayerState
from tests import zoo
from tests.laws.harness import close, randomise
from tests.laws.recipe import at
from tests.survival.test_checkpointing import switch_on

SPEC = "peft 1\n" + at("layer[*]", "ladder(h, r=3)")
WHOLE = "peft 1\n" + at("layer[*]", "ladder(h, x, r=3, temperature=0.1, replace=true)", "=")
ATTENTION = "peft 1\n" + at("layer[*]", "layer_attention(h)", "=")
BELOW = "\nedit below at layer[*].attn.q { h += lora(x, r=2) }"

both = pytest.mark.parametrize("spec", [SPEC, WHOLE, ATTENTION], ids=["ladder", "whole", "layer_attention"])


def compiled(name: str, spec: str = SPEC, **options: Any) -> Any:
    model = peftc.compile(spec, zoo.build(name, torch.float64), seed=0, **options).eval()
    randomise(peftc.parameters(model))
    return model


def gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {key: p.grad.clone() for key, p in peftc.parameters(model).items()}


def test_no_gradient_enters_the_layers() -> None:
    model = compiled("llama")
    states = model(**zoo.inputs("llama", model), output_hidden_states=True).hidden_states
    assert [state.requires_grad for state in states] == [False] * (len(states) - 1) + [True]


@both
def test_only_the_last_layer_changes(spec: str) -> None:
    model, base = compiled("llama", spec), zoo.build("llama", torch.float64).eval()
    inputs = zoo.inputs("llama", model)
    now, before = (m(**inputs, output_hidden_states=True).hidden_states for m in (model, base))
    assert [torch.equal(a, b) for a, b in zip(now, before, strict=True)] == [True] * (len(now) - 1) + [False]


@pytest.mark.parametrize("spec", [SPEC, WHOLE, ATTENTION, ATTENTION + BELOW])
def test_checkpoints_that_keep_hooks_give_the_same_gradients(spec: str) -> None:
    model = compiled("llama", spec).train()
    inputs = zoo.inputs("llama", model, labels=True)
    want = gradients(model, inputs)
    switch_on(model)
    got = gradients(model, inputs)
    for key, grad in want.items():
        close(got[key], grad, key)
    close(gradients(model, inputs)[key], want[key], "again")  # no state of the last step remains


@both
def test_reentrant_checkpoints_are_refused(spec: str) -> None:
    """Re-entrant checkpointing would silently drop the gradient of all states but the last."""
    model = compiled("llama", spec).train()
    switch_on(model, reentrant=True)
    model.enable_input_require_grads()
    with pytest.raises(peftc.PeftcError, match="P421"):
        model(**zoo.inputs("llama", model, labels=True)).loss.backward()


@both
def test_torch_compile_computes_the_same(spec: str) -> None:
    model = compiled("bert", spec)
    inputs = zoo.inputs("bert", model)
    with torch.no_grad():
        want = model(**inputs)[0]
        torch.compiler.reset()
        fast = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            close(fast(**inputs)[0], want, "compiled")


@both
def test_states_belong_to_one_model_and_one_forward(spec: str) -> None:
    model = compiled("bert", spec).train()
    inputs = zoo.inputs("bert", model)
    want = model(**inputs)[0]  # its states stay alive, for checkpoints
    twin = copy.deepcopy(model)
    shorter = {key: value[:1] for key, value in inputs.items()}
    close(twin(**shorter)[0], model(**shorter)[0], "of another batch")
    close(model(**inputs)[0], want, "again")


@torch.no_grad()
def test_a_query_selects_the_state_that_it_points_to() -> None:
    """With all attention on the first layer, the head reads that layer's state."""
    model = compiled("llama", ATTENTION)
    inputs = zoo.inputs("llama", model)
    states = model.model(**inputs, output_hidden_states=True).hidden_states[1:-1]
    token = torch.stack([state[0, 0] for state in states])
    (query,) = peftc.parameters(model).values()
    query.copy_(1e4 * (token[0] - token[1]))  # of two tokens; the last state has the opposite score
    model.eval()
    want = model.lm_head(model.model.norm(token[0]))
    close(model(**inputs).logits[0, 0], want, "the first")


def test_a_dropped_layer_passes_its_state_on() -> None:
    states = CrossLayerState()
    lowest, third = ((torch.full((1,), float(i)),) for i in (0, 2))
    states.before(None, 0, again=False)
    states.states[None][0] = lowest, True
    assert states.before(None, 2, again=False) == [(lowest, True)]
    states.states[None][2] = third, True
    assert states.before(None, 2, again=True) == [(lowest, True)]  # recomputed
    assert states.before(None, 3, again=False) == [(lowest, True), (third, True)]
    assert states.before(None, 1, again=False) == []  # another forward, whose first layer was dropped
    assert states.before("task", 3, again=False) == []


@both
def test_rows_of_several_tasks_have_states_of_their_own(spec: str) -> None:
    model = compiled("llama", spec.replace("layer[*]", "layer[*] per task"), tasks=("a", "b"))
    inputs = zoo.inputs("llama", model)
    with torch.no_grad():
        alone = []
        for task in ("a", "b"):
            with peftc.task(model, task):
                alone.append(model(**inputs).logits)
        for ids in ([0, 1], [1, 0]):
            with peftc.task(model, task_ids=torch.tensor(ids)):
                close(model(**inputs).logits, torch.stack([alone[t][row] for row, t in enumerate(ids)]), "mixed")


@pytest.mark.parametrize(
    ("site", "hint"),
    [
        ("layer[0]", "its last place is layer 0 of 3"),
        ("layer[0].ffn", "layer[2]"),
        ("embed", "it has no place in a layer"),
    ],
)
@pytest.mark.parametrize("spec", [SPEC, ATTENTION])
def test_sites_without_the_last_layer_are_refused(spec: str, site: str, hint: str) -> None:
    with pytest.raises(peftc.PeftcError, match="P315") as excinfo:
        peftc.plan(spec.replace("layer[*]", site), zoo.config("llama"))
    assert hint in str(excinfo.value)
    assert excinfo.value.diagnostics[0].span is not None


@both
def test_layers_that_share_one_module_are_refused(spec: str) -> None:
    config = AlbertConfig(
        vocab_size=61,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=20,
    )
    with pytest.raises(peftc.PeftcError, match="run 3 times"):
        peftc.plan(spec, config)


@pytest.mark.parametrize("between", ["of training", "of evaluation"])
@both
def test_a_forward_between_checkpointed_forward_and_backward_is_refused(spec: str, between: str) -> None:
    """Recomputed layers would silently read the states of the other forward."""
    model = compiled("llama", spec).train()
    switch_on(model)
    inputs = zoo.inputs("llama", model, labels=True)
    loss = model(**inputs).loss
    if between == "of training":
        loss = loss + model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)}).loss
    else:
        with torch.no_grad():
            model.eval()(**inputs)
        model.train()
    with pytest.raises(peftc.PeftcError, match="P421"):
        loss.backward()


@pytest.mark.parametrize("form", ["ladder(r=3)", "layer_attention()"])
def test_forms_with_a_cross_layer_state_cannot_be_shared(form: str) -> None:
    spec = f"peft 1\nlet s = shared({form})\nedit e at layer[*] {{ h += s(h) }}"
    with pytest.raises(peftc.PeftcError, match="cannot be `shared`"):
        peftc.plan(spec, zoo.build("llama"))
