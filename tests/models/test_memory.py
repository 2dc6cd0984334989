"""Parameters that share memory: recognised in every form, and neither trained nor
folded in part.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaModel

import peftc
from peftc import PeftcError
from peftc.fakes.tensors import fake_copy
from peftc.models.identity import fingerprint, overlaps, parameter_count, tied_groups
from peftc.modules.memory import memory_of, overlapping

LORA = "peft 1\nedit e at layer[0].attn.q { h += lora(x, r=2) }"
WIDTH = 32
Q = "layers.{}.self_attn.q_proj.weight"


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
    return LlamaModel(LlamaConfig(**sizes, num_hidden_layers=2)).double().eval()


def compile_lora(model: Any) -> None:
    """Compiles a LoRA that changes the output."""
    peftc.compile(LORA, model)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.fill_(0.3)


def with_weights(first: torch.Tensor, second: torch.Tensor) -> Any:
    """A model whose two q projections have these tensors as weights, each as its own parameter."""
    model = llama()
    for layer, value in zip(model.layers, (first, second), strict=True):
        layer.self_attn.q_proj.weight = nn.Parameter(value)
    return model


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    flat = matrix(WIDTH * WIDTH * 2)
    return flat[: WIDTH * WIDTH].view(WIDTH, -1), flat[WIDTH * WIDTH :].view(WIDTH, -1)


def same() -> tuple[torch.Tensor, torch.Tensor]:
    whole = matrix(WIDTH, WIDTH)
    return whole, whole.detach()


def transposed() -> tuple[torch.Tensor, torch.Tensor]:
    whole = matrix(WIDTH, WIDTH)
    return whole, whole.t()


def slices() -> tuple[torch.Tensor, torch.Tensor]:
    rows = matrix(WIDTH + 4, WIDTH)
    return rows[:WIDTH], rows[4:]


def columns() -> tuple[torch.Tensor, torch.Tensor]:
    wide = matrix(WIDTH, 2 * WIDTH)
    return wide[:, :WIDTH], wide[:, WIDTH:]


@pytest.mark.parametrize("views", [same, transposed, slices])
def test_parameters_that_share_memory_are_neither_folded_nor_trained(views: Any) -> None:
    model = with_weights(*views())
    fold = peftc.plan(LORA, model).edits[0]
    assert not fold.foldable
    assert Q.format(1) in fold.reason
    for layer in (0, 1):
        with pytest.raises(PeftcError) as error:
            peftc.plan(f"peft 1\ntrain t = [w] at layer[{layer}].attn.q", model)
        assert [d.code for d in error.value.diagnostics] == ["P212"]
        assert error.value.diagnostics[0].span is not None
        assert all(Q.format(i) in str(error.value) for i in (0, 1))
    other = model.layers[1].self_attn.q_proj.weight.detach().clone()
    compile_lora(model)
    before = model(torch.arange(5)[None]).last_hidden_state
    assert not peftc.fold(model).folded
    assert torch.equal(model(torch.arange(5)[None]).last_hidden_state, before)
    assert torch.equal(model.layers[1].self_attn.q_proj.weight, other)


def test_expanded_weights_are_neither_folded_nor_trained() -> None:
    """One row expanded to all: the model runs, but its entries cannot be written one by one."""
    model = with_weights(matrix(1, WIDTH).expand(WIDTH, WIDTH), matrix(WIDTH, WIDTH))
    assert overlaps(model) == ((Q.format(0),),)
    with pytest.raises(PeftcError, match="P212"):
        peftc.plan("peft 1\ntrain t = [w] at layer[0].attn.q", model)
    fold = peftc.plan(LORA, model).edits[0]
    assert not fold.foldable
    assert "expanded" in fold.reason
    compile_lora(model)
    before = model(torch.arange(5)[None]).last_hidden_state
    assert not peftc.fold(model).folded
    assert torch.equal(model(torch.arange(5)[None]).last_hidden_state, before)


@pytest.mark.parametrize("views", [halves, columns])
def test_disjoint_views_are_not_tied(views: Any) -> None:
    model = with_weights(*views())
    assert overlaps(model) == tied_groups(model) == ()
    assert fingerprint(model) == fingerprint(llama())
    assert peftc.plan("peft 1\ntrain t = [w] at layer[*].attn.q", model).totals.trained == 2 * WIDTH**2
    compile_lora(model)
    other, before = model.layers[1].self_attn.q_proj.weight.detach().clone(), model(torch.arange(5)[None])[0]
    assert [done.edit for done in peftc.fold(model).folded] == ["e"]
    assert torch.allclose(model(torch.arange(5)[None])[0], before, rtol=0, atol=1e-10)
    assert torch.equal(model.layers[1].self_attn.q_proj.weight, other)


def test_a_model_in_one_flat_buffer() -> None:
    model = llama()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data = part.view_as(parameter)
    plan = peftc.plan(LORA, model)
    assert plan.edits[0].foldable
    assert plan.model.fingerprint == fingerprint(llama())
    model.flat = nn.Parameter(flat)  # also registered as a buffer: a fold would change what it holds
    assert not peftc.plan(LORA, model).edits[0].foldable
    assert parameter_count(model) == flat.numel()


@pytest.mark.parametrize(("views", "entries"), [(same, 0), (transposed, 0), (slices, 4 * WIDTH), (halves, WIDTH**2)])
def test_each_entry_is_counted_once(views: Any, entries: int) -> None:
    model = with_weights(*views())
    assert parameter_count(llama()) - parameter_count(model) == WIDTH**2 - entries
    assert peftc.plan(LORA, model).totals.base == parameter_count(model)


def test_the_same_view_twice_is_a_tie() -> None:
    model, one = with_weights(*same()), llama()
    one.layers[1].self_attn.q_proj.weight = one.layers[0].self_attn.q_proj.weight
    assert tied_groups(model) == tied_groups(one) == ((Q.format(0), Q.format(1)),)
    assert fingerprint(model) == fingerprint(one) == fingerprint(fake_copy(model)) != fingerprint(llama())
    assert overlaps(model) == ((Q.format(0), Q.format(1)),)
    assert overlaps(one) == ()
    assert peftc.plan("peft 1\ntrain t = [w] at layer[*].attn.q", one).totals.trained == WIDTH**2


def test_a_buffer_over_a_parameter() -> None:
    model = llama()
    model.register_buffer("transposed", model.layers[0].self_attn.q_proj.weight.detach().t())
    edit = peftc.plan(LORA, model).edits[0]
    assert "shares memory with `transposed`" in edit.reason


def test_skeletons_share_memory_as_their_models_do() -> None:
    model = with_weights(*slices())
    assert overlaps(fake_copy(model)) == overlaps(fake_copy(fake_copy(model), widen=True)) == overlaps(model) != ()
    assert overlaps(copy.deepcopy(model).to("meta")) == ()


def bytes_of(tensor: torch.Tensor) -> set[int]:
    start, size = tensor.data_ptr(), tensor.element_size()
    indices = itertools.product(*map(range, tensor.shape))
    return {start + size * sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) for index in indices}


@st.composite
def views(draw: st.DrawFn, buffer: torch.Tensor) -> torch.Tensor:
    if draw(st.booleans()):
        width = draw(st.sampled_from([8, 10, 12]))
        rows = buffer[: 192 // width * width].view(-1, width)
        top, left = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, width - 1))
        view = rows[top : draw(st.integers(top + 1, len(rows))), left : draw(st.integers(left + 1, width))]
        return view.t() if draw(st.booleans()) else view
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    steps = [draw(st.sampled_from([0, 1, 2, 3, 5, 10, 12])) for _ in shape]
    extent = sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    return buffer.as_strided(shape, steps, draw(st.integers(0, 191 - extent)))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_views_overlap_where_they_have_a_byte_in_common(data: st.DataObject) -> None:
    buffer = torch.zeros(192)
    one, other = data.draw(views(buffer)), data.draw(views(buffer))
    assert memory_of(one)[0].overlaps(memory_of(other)[0]) == bool(bytes_of(one) & bytes_of(other))


def test_many_columns_of_one_matrix_are_compared_in_time() -> None:
    wide = torch.zeros(3, 2000)
    parts = list(wide.split(2, dim=1))
    assert overlapping(parts) == []
    assert overlapping([*parts, wide[:, 2:5]]) == [[1, 2, 1000]]
