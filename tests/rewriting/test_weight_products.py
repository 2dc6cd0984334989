"""Products with edited weights: the code computes them without the edited weight, and the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.equation_code import functions
from tests import zoo

DORA = "edit e at {at} {{ w = magnitude(w + lowrank(r=1, alpha=3)) }}"
SUMS = {
    "dora": DORA,
    "rows": "edit e at {at} {{ w = gain(w) }}",
    "two products": "edit e at {at} {{ w = gain(w + lowrank(r=1) - 0.5 * lowrank(r=2)) }}",
}
KEPT = {
    "a product without rows": "edit e at {at} {{ w = 2 * (gain(w) + lowrank(r=1)) }}",
    "a dtype": "edit e at {at} {{ w = magnitude(w + lowrank(r=1, dtype=float32)) }}",
    "no rows": "edit e at {at} {{ w += lowrank(r=1) }}",
    "a wide product": "edit e at {at} {{ w = gain(w + lowrank(r=20)) }}",
    "entries": "edit e at {at} {{ w = gain(w) * hadamard(r=1) }}",
}
GAIN = "form gain(w) { param g[rows(w), 1] = 1 f = g * w }\n"


def compiled(edit: str, name: str = "llama", at: str = "layer[*].attn.q | layer[*].ffn.up") -> nn.Module:
    model = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{GAIN}{edit.format(at=at)}\n", model, seed=1)
    with torch.no_grad():
        for i, parameter in enumerate(peftc.parameters(model).values()):
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).to(parameter) / 3
    return model


def result(model: nn.Module, name: str = "llama") -> tuple[Tensor, list[Tensor]]:
    """The logits, and the gradients of all trained parameters."""
    parameters = list(peftc.parameters(model).values())
    logits = model(**zoo.inputs(name, model)).logits
    return logits, list(torch.autograd.grad(logits.square().mean(), parameters))


def source(model: nn.Module) -> str:
    model(**zoo.inputs("bert" if "Bert" in type(model).__name__ else "llama", model))
    return "\n".join(region.code for region in peftc.graphs(model).values())


def forms_edited_weights(model: nn.Module) -> bool:
    return "stored_as(" in source(model)


def saved_matrices(model: nn.Module) -> int:
    """How many tensors as large as a weight of a Linear autograd keeps, the parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)}
    large: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own and tensor.shape in shapes:
            large[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**zoo.inputs("llama", model))
    return len(large)


@pytest.mark.parametrize("edit", [*SUMS.values(), *KEPT.values()], ids=[*SUMS, *KEPT])
def test_the_code_equals_the_calls_of_the_forms(edit: str) -> None:
    model = compiled(edit)
    logits, gradients = result(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)  # calls the forms
    try:
        others, other_gradients = result(model)
    finally:
        handle.remove()
    torch.testing.assert_close(logits, others, rtol=0, atol=1e-10)
    for one, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    peftc.fold(model)
    torch.testing.assert_close(model(**zoo.inputs("llama", model)).logits, logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("edit", SUMS.values(), ids=SUMS)
def test_autograd_keeps_no_edited_weight(edit: str) -> None:
    model = compiled(edit)
    assert not forms_edited_weights(model)
    assert saved_matrices(model) == 0


@pytest.mark.parametrize("edit", KEPT.values(), ids=KEPT)
def test_other_edits_form_the_weight(edit: str) -> None:
    assert forms_edited_weights(compiled(edit))


def test_a_bias_and_half_precision_keep_the_weight() -> None:
    assert forms_edited_weights(compiled(DORA, "bert", "layer[*].attn.q"))
    half = zoo.build("llama", torch.bfloat16)
    peftc.compile(f"peft 2\n{DORA.format(at='layer[*].attn.q')}\n", half)
    assert forms_edited_weights(half)


def test_it_starts_as_the_base_bit_for_bit() -> None:
    model: Any = zoo.build("llama", torch.float32).eval()
    before = model(**zoo.inputs("llama", model)).logits
    peftc.compile(f"peft 2\n{DORA.format(at='layer[*].attn.q')}\n", model)
    assert torch.equal(model(**zoo.inputs("llama", model)).logits, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_changes_its_dtype_rounds_the_edited_weight_once(dtype: str) -> None:
    model = compiled(DORA).float()
    model.to(getattr(torch, dtype))
    linear: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(2, 5, linear.weight.shape[1]).to(linear.weight.dtype)
    values = {name.rpartition(".")[2]: p for name, p in peftc.parameters(model).items() if "layer[0].attn" in name}
    edited = linear.weight.float() + 3 * (values["B"] @ values["A"])
    rows = functions.ratio(functions.column(values["m"]), functions.norm(edited.to(linear.weight.dtype)))
    weight = (rows * edited.to(rows.dtype)).to(linear.weight.dtype)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, weight), rtol=0, atol=0)


def test_autocast_keeps_the_dtype_of_the_product() -> None:
    model: Any = compiled(DORA).float()
    linear = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(2, 5, linear.weight.shape[1])).dtype == torch.bfloat16
