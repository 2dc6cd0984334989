"""Attached adapters that train parameters of the base: each has values of its own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import peftc
from peftc.installation.record import installation_of
from tests import zoo
from tests.attachment.test_attach import code_of, output, saved
from tests.laws.harness import close, randomise

LORA = "edit qv at layer[*].attn.{q, v} { h += lora(x, r=2) }"
KINDS = {  # an architecture, what is trained, and what another adapter, of another spec, trains
    "classifier": ("bert-classifier", "train top = [w, b] at head", "train first = [w] at head"),
    "norms": ("llama", "train norms = [w] at layer[*].norm | norm", "train norms = [w] at layer[0].norm"),
    "biases": ("bart", "train b = [b] at layer[*].attn.{q, v}", "train b = [b] at encoder.layer[*].ffn.up"),
    "tied": ("gpt2", "train table = [w] at embed | head", "train table = [w] at embed | head\ntrain n = [w] at norm"),
}


def states_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def attached_model(kind: str, folder: Path, with_lora: bool = False) -> tuple[str, Any, dict[str | None, Tensor]]:
    """A model with the adapters A and B of a spec, C of another one and D without trained
    parameters, and what each alone, or none, gives.
    """
    name, first, second = KINDS[kind]
    edits = f"{LORA}\n" if with_lora else ""
    specs = {"A": edits + first, "B": edits + first, "C": second, "D": LORA}
    model: Any = zoo.build(name, torch.float64).eval()
    alone: dict[str | None, Tensor] = {None: output(name, model)}
    for seed, (adapter, spec) in enumerate(specs.items()):
        alone[adapter] = saved(name, f"peft 2\n{spec}", folder / adapter, seed)
        peftc.attach(folder / adapter, model)
        assert torch.equal(output(name, model), alone[None]), "an adapter acts before it is chosen"
    return name, model, alone


def test_values_are_read_in_modules_that_a_spec_edits(tmp_path: Path) -> None:
    name, first, _ = KINDS["biases"]
    model: Any = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{LORA}", model, seed=0)
    randomise(peftc.parameters(model))
    saved(name, f"peft 2\n{first}", tmp_path / "biases", 1)
    want, base = copy.deepcopy(model), output(name, model)
    peftc.attach(tmp_path / "biases", model)
    for key, value in peftc.parameters(model, "biases").items():
        want.get_parameter(key.partition("/")[2]).data.copy_(value)
    assert torch.equal(output(name, model), base)
    peftc.activate(model, "biases")
    assert torch.equal(output(name, model), output(name, want))
    assert not torch.equal(output(name, model), base)


@pytest.mark.parametrize("kind", KINDS)
def test_each_adapter_reads_its_own_values(kind: str, tmp_path: Path) -> None:
    name, model, alone = attached_model(kind, tmp_path)
    base = states_of(zoo.build(name, torch.float64))
    assert len({value.sum().item() for value in alone.values()}) == 5
    for adapter in ("A", "C", None, "B", "A"):
        peftc.activate(model, adapter)
        assert torch.equal(output(name, model), alone[adapter]), adapter
        state = model.state_dict()
        assert all(torch.equal(state[n], value) for n, value in base.items()), "the base changes"
    with peftc.adapter(model, "B"):
        assert torch.equal(output(name, model), alone["B"])
        with peftc.disabled(model):
            assert torch.equal(output(name, model), alone[None])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(name, other), alone["A"])
        peftc.activate(other, "B")
        with torch.no_grad():
            next(iter(peftc.parameters(other, "A").values())).zero_()
        assert torch.equal(output(name, other), alone["B"])
    assert torch.equal(output(name, model), alone["A"]), "a copy has values of its own"
    peftc.detach(model, "A")
    assert torch.equal(output(name, model), alone[None])
    peftc.activate(model, "B")
    assert torch.equal(output(name, model), alone["B"])
    for adapter in ("B", "D", "C"):
        peftc.detach(model, adapter)
    assert torch.equal(output(name, model), alone[None])
    assert model.state_dict().keys() == base.keys()
    assert type(model) is type(zoo.build(name))


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_one_adapter_have_its_values(kind: str, tmp_path: Path) -> None:
    name, model, alone = attached_model(kind, tmp_path, with_lora=True)
    peftc.activate(model, "B")
    close(output(name, model), alone["B"], "beside a LoRA")
    model.save_pretrained(tmp_path / "checkpoint")
    for adapter in ("A", "B", "C"):
        peftc.save(model, tmp_path / "again", name=adapter)
        loaded = peftc.load(tmp_path / "again", zoo.build(name, torch.float64), strict=True)
        assert torch.equal(output(name, loaded), alone[adapter])
        names = {n: p.shape for n, p in peftc.parameters(loaded).items()}
        assert names == {n: p.shape for n, p in peftc.parameters(model, adapter).items()}
    loaded = peftc.load(tmp_path / "checkpoint", zoo.build(name, torch.float64))
    assert torch.equal(output(name, loaded), alone["B"])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    for adapter in ("A", "C", None):
        peftc.activate(other, adapter)
        close(output(name, other), alone[adapter], "after `load_state_dict`")
    peftc.swap(model, "A", tmp_path / "B")
    peftc.activate(model, "A")
    close(output(name, model), alone["B"], "B in the place of A")


@pytest.mark.parametrize("kind", KINDS)
def test_training_changes_the_values_of_the_active_adapter_alone(kind: str, tmp_path: Path) -> None:
    name, model, alone = attached_model(kind, tmp_path)
    peftc.activate(model, "B")
    before = states_of(model)
    own = peftc.parameters(model, "B")
    every = peftc.parameters(model)
    assert {id(p) for p in own.values()} < {id(p) for p in every.values()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in every.values()}
    optimizer = torch.optim.SGD(every.values(), lr=0.1)
    model(**zoo.inputs(name, model, batch=4))[0].square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in own.items() if not n.endswith("k_proj.bias"))
    assert not any(p.grad is not None for p in model.parameters() if all(p is not mine for mine in own.values()))
    optimizer.step()
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed
    assert all(n.endswith(".B") for n in changed)
    assert not torch.equal(output(name, model), alone["B"])
    for adapter in ("A", "C", None):
        peftc.activate(model, adapter)
        assert torch.equal(output(name, model), alone[adapter])


def test_gradients_are_those_of_the_adapter_loaded_alone(tmp_path: Path) -> None:
    name, model, _ = attached_model("tied", tmp_path)
    peftc.activate(model, "A")
    loaded: Any = peftc.load(tmp_path / "A", zoo.build(name, torch.float64)).eval()
    for one in (model, loaded):
        one(**zoo.inputs(name, one, batch=4))[0].square().mean().backward()
    own = peftc.parameters(model, "A")
    assert own.keys() == peftc.parameters(loaded).keys()
    for n, parameter in peftc.parameters(loaded).items():
        gradient = own[n].grad
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(gradient, parameter.grad)


def test_compiled_code_reads_the_active_values(tmp_path: Path) -> None:
    name, model, alone = attached_model("norms", tmp_path)
    counter = CompileCounter()
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    inputs = zoo.inputs(name, model, batch=4)
    with torch.no_grad():
        for adapter in ("A", None, "B", "C", "A"):
            peftc.activate(model, adapter)
            close(compiled(**inputs)[0], alone[adapter], str(adapter))
        graphs = counter.frame_count
        peftc.swap(model, "A", tmp_path / "B")
        close(compiled(**inputs)[0], alone["B"], "B in the place of A")
        with peftc.disabled(model):
            close(compiled(**inputs)[0], alone[None], "disabled")
        assert counter.frame_count <= graphs + 1
        peftc.swap(model, "A", tmp_path / "A")
        close(compiled(**inputs)[0], alone["A"], "A again")
        assert counter.frame_count <= graphs + 1, "a swap is compiled again"


def test_a_batch_has_one_value_of_a_parameter_of_the_base(tmp_path: Path) -> None:
    name, model, alone = attached_model("classifier", tmp_path)
    for rows in (["A", "B", "A", "B"], ["A", None, "A", "A"], ["D", "C", None, "D"]):
        with pytest.raises(peftc.PeftcError, match=r"P536.*classifier\.weight"):
            peftc.adapter(model, rows=rows)
    with peftc.adapter(model, rows=["B"] * 4):
        assert torch.equal(output(name, model), alone["B"])
    with peftc.adapter(model, rows=["D", None, "D", None]):  # which trains none
        expected = [alone[adapter][row] for row, adapter in enumerate(("D", None, "D", None))]
        close(output(name, model), torch.stack(expected), "rows without trained parameters")


@pytest.mark.parametrize(
    ("kind", "method"), [("classifier", "linear"), ("classifier", "svd"), ("norms", "cat"), ("tied", "cat")]
)
def test_combined_values_are_the_weighted_sum_of_changes(kind: str, method: Any, tmp_path: Path) -> None:
    name, model, alone = attached_model(kind, tmp_path, with_lora=True)
    before = states_of(model)
    weights = {"A": 0.5, "B": 0.25}
    peftc.combine(model, weights, method=method, name="sum")
    state = model.state_dict()
    assert all(torch.equal(state[n], value) for n, value in before.items())
    base = dict(zoo.build(name, torch.float64).named_parameters())
    own = [
        {n.partition("/")[2]: p for n, p in peftc.parameters(model, adapter).items() if "lora" not in n}
        for adapter in ("A", "B", "sum")
    ]
    assert own[0].keys() == own[2].keys()
    for n in own[0]:
        expected = base[n] + 0.5 * (own[0][n] - base[n]) + 0.25 * (own[1][n] - base[n])
        torch.testing.assert_close(own[2][n].detach(), expected.detach(), rtol=0, atol=1e-14)
    for adapter in ("A", None):
        peftc.activate(model, adapter)
        close(output(name, model), alone[adapter], "after a combination")
    with pytest.raises(peftc.PeftcError, match=r"P545.*trained as a whole"):
        peftc.combine(model, weights, method="ties", name="other")


def test_a_store_exchanges_trained_values(tmp_path: Path) -> None:
    name, first, second = KINDS["classifier"]
    specs = [first] * 3 + [second]
    alone = [saved(name, f"peft 2\n{spec}", tmp_path / f"a{i}", i) for i, spec in enumerate(specs)]
    model: nn.Module = zoo.build(name, torch.float64).eval()
    base = output(name, model)
    store = peftc.AdapterStore(model, tmp_path, capacity=2)
    for number in (0, 1, 2, 0, 3, 1, 3):
        store.activate(f"a{number}")
        assert torch.equal(output(name, model), alone[number]), number
        assert len(peftc.attached(model)) <= 2
    store.activate(None)
    assert torch.equal(output(name, model), base)


def test_other_programs_and_folds_leave_attached_values_or_refuse(tmp_path: Path) -> None:
    name, model, alone = attached_model("norms", tmp_path)
    peftc.detach(model, "D")
    peftc.activate(model, "B")
    assert code_of(lambda: peftc.export(model, tmp_path / "peft")) == "P801"
    assert code_of(lambda: peftc.save_standalone(model, tmp_path / "alone")) == "P570"
    assert code_of(lambda: peftc.compile("peft 2\ntrain n = [w] at layer[0].norm", model)) == "P414"
    assert not peftc.fold(model).folded
    assert peftc.verify(model).ok
    with pytest.raises(peftc.PeftcError, match="P531"):
        peftc.fold(model, only=[next(iter(peftc.parameters(model))).partition("/")[0]])
    assert torch.equal(output(name, model), alone["B"])
    inputs = zoo.inputs(name, model, batch=4)
    for adapter in ("A", None):
        reference = peftc.reference(model, adapter)
        assert torch.equal(reference(**inputs)[0], alone[adapter])
        bare: nn.Module = zoo.build(name, torch.float64)
        bare.load_state_dict({n: t for n, t in reference.state_dict().items() if "peftc" not in n})
        assert torch.equal(output(name, bare.eval()), alone[adapter])
    assert torch.equal(output(name, model), alone["B"])


def test_what_cannot_have_several_values_is_refused(tmp_path: Path) -> None:
    name, model, _ = attached_model("norms", tmp_path)
    compiled = peftc.compile("peft 2\ntrain n = [w] at layer[1].norm", zoo.build(name, torch.float64))
    before = output(name, compiled)
    assert code_of(lambda: peftc.attach(tmp_path / "A", compiled)) == "P414"
    assert torch.equal(output(name, compiled), before)
    holder = zoo.build(name, torch.float64)
    vars(holder)["copies"] = [holder.get_submodule("model.norm").get_parameter("weight")]
    assert code_of(lambda: peftc.attach(tmp_path / "A", holder)) == "P432"
    peftc.activate(model, "A")
    model.model.norm = copy.deepcopy(zoo.build(name, torch.float64).get_submodule("model.norm"))
    with pytest.raises(peftc.PeftcError, match=r"P436.*model\.norm"):
        output(name, model)


def test_a_plan_counts_the_values_of_each_adapter(tmp_path: Path) -> None:
    _, model, _ = attached_model("norms", tmp_path)
    entry = next(e for e in installation_of(model).planned.plan.edits if e.name.endswith("norms"))
    values = peftc.parameters(model, "A").values()
    assert entry.trained == entry.served == 2 * sum(map(torch.numel, values))
    assert entry.changed == 0
