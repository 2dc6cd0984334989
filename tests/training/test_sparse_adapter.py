"""Adapters pruned before training: the selection, first values, what is trained, files, tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.equation_code.selection_module import SelectionModule
from peftc.installation.contents import states
from tests import zoo
from tests.laws.harness import Before, close

SPEC = "peft 1\nedit m at layer[*].attn | layer[*].ffn {{ h += sparse_adapter(h, r=4, density=0.3, select={}) }}"
DENSE = "peft 1\nedit m at layer[*].attn | layer[*].ffn { h += adapter(h, r=4) }"


def batches(name: str, model: nn.Module) -> list[dict[str, Tensor]]:
    return [zoo.inputs(name, model, labels=True, seed=seed) for seed in (1, 2)]


def compiled(name: str, select: str, **how: Any) -> Any:
    return peftc.compile(SPEC.format(select), zoo.build(name, torch.float64), **{"seed": 0, **how})


def owner(model: nn.Module) -> SelectionModule:
    (result,) = [m for m in model.modules() if isinstance(m, SelectionModule)]
    return result


def dense(name: str, entries: Tensor) -> tuple[Any, list[str]]:
    """Dense adapters with these entries: W_down then W_up, site by site; and their names."""
    model = peftc.compile(DENSE, zoo.build(name, torch.float64), seed=0).eval()
    names = [n for n in peftc.parameters(model) if n.endswith((".down", ".up"))]
    start = 0
    with torch.no_grad():
        for key, parameter in peftc.parameters(model).items():
            parameter.zero_()
            if key in names:
                parameter.copy_(entries[start : start + parameter.numel()].view(parameter.shape))
                start += parameter.numel()
    assert start == len(entries)
    return model, names


@pytest.mark.parametrize(("name", "select"), [("llama", "magnitude"), ("bart", "snip")])
def test_entries_with_the_largest_scores_of_dense_adapters_are_selected(name: str, select: str) -> None:
    model = compiled(name, select)
    before, first, data = Before.of(model), owner(model).first_values(), batches(name, model)
    other, names = dense(name, first)
    remaining = peftc.calibrate(model, data if select == "snip" else ())
    for batch in data:
        other(**batch).loss.backward()
    result = [peftc.parameters(other)[n] for n in names]
    scores = torch.cat([(p * p.grad if select == "snip" else p).detach().abs().float().flatten() for p in result])
    count = round(0.3 * len(first))
    assert remaining == {"m": count}
    places = owner(model).get_buffer("places")
    assert set(places.tolist()) == set(scores.topk(count)[1].tolist())
    assert torch.equal(owner(model).values, first[places])
    assert abs(float(first.std()) - 0.02) < 0.002
    assert {k: p.requires_grad for k, p in model.named_parameters()} == before.requires_grad
    pruned, _ = dense(name, torch.zeros_like(first).index_put((places,), first[places]))
    with torch.no_grad():
        close(model.eval()(**data[0]).logits, pruned(**data[0]).logits, "pruned")
    plan = peftc.plan(SPEC.format(select), zoo.build(name))
    assert plan.totals.trained == plan.totals.stored == sum(p.numel() for p in peftc.parameters(model).values())


def test_trained_saved_and_pruned_stays_pruned(tmp_path: Path) -> None:
    model = compiled("llama", "snip")
    arguments = batches("llama", model)[0]
    with pytest.raises(peftc.PeftcError, match="P540"):
        model.train()(**arguments)
    with pytest.raises(peftc.PeftcError, match="P540"):
        peftc.save(model, tmp_path / "a")
    with pytest.raises(peftc.PeftcError, match="P541"):
        peftc.calibrate(model)
    peftc.calibrate(model, batches("llama", model))
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(**arguments).loss.backward()
        assert all(bool((p.grad != 0).any()) for p in peftc.parameters(model).values())
        optimizer.step()
    want = model.eval()(**arguments).logits
    places, values = owner(model).get_buffer("places"), owner(model).values.detach()
    whole = values.new_zeros(owner(model).unit_total).index_put((places,), values)
    other, _ = dense("llama", whole)
    with torch.no_grad():
        for key, parameter in peftc.parameters(other).items():
            if key.endswith("_bias"):
                parameter.copy_(peftc.parameters(model)[key.replace("/adapter.", "/sparse_adapter.")])
    close(other(**arguments).logits, want, "by hand")
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    assert torch.equal(loaded(**arguments).logits, want)
    loaded.train()(**arguments)
    twin = compiled("llama", "snip", seed=4).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(**arguments).logits, want)


def test_a_pruned_adapter_without_activation_folds() -> None:
    text = (
        "peft 1\nedit m at layer[*].attn.q | layer[*].ffn.down { h += "
        "sparse_adapter(x, r=4, density=0.5, select=random, act=none) }"
    )
    model = peftc.compile(text, zoo.build("gpt2", torch.float64), seed=0).eval()
    arguments = batches("gpt2", model)[0]
    want = model(**arguments).logits
    assert [f.edit for f in peftc.fold(model).folded] == ["m"]
    close(model(**arguments).logits, want, "folded")


def test_random_places_depend_on_the_text_and_first_values_on_the_seed() -> None:
    one, two = (owner(compiled("llama", "random", seed=seed)) for seed in (0, 1))
    other = owner(compiled("llama", "random, seed=1"))
    assert torch.equal(one.get_buffer("places"), two.get_buffer("places"))
    assert not torch.equal(one.get_buffer("places"), other.get_buffer("places"))
    assert not torch.equal(one.values, two.values)
    assert torch.equal(one.first_values(), other.first_values())


def test_each_task_prunes_its_own(tmp_path: Path) -> None:
    text = SPEC.format("snip").replace(" {", " per task {", 1)
    model = peftc.compile(text, zoo.build("llama", torch.float64), seed=0, tasks=("a", "b"))
    data = batches("llama", model)
    for task, batch in zip("ab", data, strict=True):
        with peftc.task(model, task):
            peftc.calibrate(model, [batch])
            model.train()(**batch).loss.backward()
    first, second = (set(places.tolist()) for places in states(model).values())
    assert first != second
    assert all(p.grad is not None for p in peftc.parameters(model).values())
    plan = peftc.plan(text, zoo.build("llama"), tasks=("a", "b"))
    assert plan.totals.trained == plan.totals.stored == sum(p.numel() for p in peftc.parameters(model).values())
    peftc.save(model.eval(), tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    for task in "ab":
        with peftc.task(model, task), peftc.task(loaded, task), torch.no_grad():
            assert torch.equal(model(**data[0]).logits, loaded(**data[0]).logits)
