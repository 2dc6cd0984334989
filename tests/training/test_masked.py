"""Diff Pruning: gates as in the paper, the penalty, the magnitude pruning, saving and folding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import peftc
from peftc.installation.contents import states
from tests import zoo
from tests.laws.harness import Before, close, randomise

SITES = {"llama": "layer[*].attn.q | layer[*].ffn.down", "gpt2": "layer[*].attn.v"}
DENSITY = 0.02


def spec(name: str, more: str = "") -> str:
    return f"peft 1\nedit m at {SITES[name]} {{ w += masked(density={DENSITY}{more}) }}"


def compiled(name: str, more: str = "", perturb: bool = True) -> Any:
    """A model with open, half-open and closed gates."""
    model = peftc.compile(spec(name, more), zoo.build(name, torch.float64), seed=0)
    if perturb:
        randomise({k: p for k, p in peftc.parameters(model).items() if k.endswith("delta")})
        with torch.no_grad():
            for key, parameter in peftc.parameters(model).items():
                if not key.endswith("delta"):
                    generator = torch.Generator().manual_seed(len(key))
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3 - 0.5)
                    parameter.abs_() if key.endswith("group") else None
    return model


def values(model: nn.Module, u: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """z ⊙ Δ of every site by hand, with the random draws `u` or without."""
    result: dict[str, Tensor] = {}
    parameters = peftc.parameters(model)
    for key, delta in parameters.items():
        if key.endswith("delta"):
            value = delta
            for name in ("alpha", "group"):
                if (a := parameters.get(key.replace("delta", name))) is not None:
                    noise = 0.0 if u is None else torch.logit(u[key.replace("delta", name)].clamp(1e-4, 1 - 1e-4))
                    value = value * (3 * torch.sigmoid(noise + a) - 1.5).clamp(0, 1)
            result[key.removesuffix(".delta")] = value
    return result


def llama_with(changes: dict[str, Tensor], arguments: dict[str, Tensor], base: nn.Module) -> Tensor:
    """The logits of the base with these weight changes."""
    modules = {site.path: site.module for site in peftc.sites(zoo.build("llama")).sites}
    weights = {f"{modules[k.split('/')[1]]}.weight": v for k, v in changes.items()}
    new_weights = {k: base.get_parameter(k).detach() + v for k, v in weights.items()}
    return functional_call(base, new_weights, args=(), kwargs=arguments).logits


@pytest.mark.parametrize("more", ["", ", structured=false"])
def test_equals_the_paper_with_and_without_draws(more: str) -> None:
    model, base = compiled("llama", more), zoo.build("llama", torch.float64)
    arguments = zoo.inputs("llama", model)
    parameters = peftc.parameters(model)
    close(model.eval()(**arguments).logits, llama_with(values(model), arguments, base.eval()), "without draws")
    torch.manual_seed(3)
    got = model.train()(**arguments).logits
    torch.manual_seed(3)
    u: dict[str, Tensor] = {}
    for i in range(base.config.num_hidden_layers):  # in the order of use
        for path in (f"decoder.layer[{i}].attn.self.q", f"decoder.layer[{i}].ffn.down"):
            for name in ("alpha", "group"):
                if (key := f"m/{path}/masked.{name}") in parameters:
                    u[key] = torch.rand_like(parameters[key])
    want = llama_with(values(model, u), arguments, base.train())
    close(got, want, "drawn")
    grads = [torch.autograd.grad(x.sin().sum(), list(parameters.values()), allow_unused=True) for x in (got, want)]
    active_gates = set[str]()  # a gate of a whole weight may be closed at some site, or open
    for key, mine, theirs in zip(parameters, *grads, strict=True):
        assert mine is not None
        assert theirs is not None
        close(mine, theirs, key)
        active_gates |= {key.rpartition(".")[2]} if bool((mine != 0).any()) else set()
    assert active_gates == {key.rpartition(".")[2] for key in parameters}


def test_the_penalty_is_the_expected_number_of_entries() -> None:
    model = compiled("llama", ", penalty=0.5")
    parameters = peftc.parameters(model)
    want = torch.zeros((), dtype=torch.float64)
    for key, alpha in parameters.items():
        if key.endswith(".alpha"):
            want += 0.5 * alpha.sigmoid().sum() * parameters[key.replace("alpha", "group")].sigmoid()[0]
    result = peftc.losses(model)
    assert set(result) == {"m.l0"}
    close(result["m.l0"], want, "l0")
    result["m.l0"].backward()
    assert all((p.grad is not None) == (not k.endswith("delta")) for k, p in parameters.items())
    narrow = peftc.compile(
        "peft 1\nedit m at layer[0].attn.q { w += masked(density=1%, lower=-0.1, upper=1.1) }", zoo.build("llama")
    )
    alpha = next(p for k, p in peftc.parameters(narrow).items() if k.endswith("alpha"))
    one = torch.sigmoid(torch.tensor(5.0) - torch.log(torch.tensor(0.1 / 1.1)))
    assert float(peftc.losses(narrow)["m.l0"].detach()) == pytest.approx(
        1.25e-7 * alpha.numel() * float(one) ** 2, rel=1e-5
    )


@pytest.mark.parametrize("name", SITES)
def test_the_largest_entries_are_saved_trained_further_and_folded(name: str, tmp_path: Path) -> None:
    fresh, base = compiled(name, perturb=False), zoo.build(name, torch.float64).eval()
    arguments = zoo.inputs(name, base, labels=True)
    plain = base(**arguments).logits
    for training in (False, True):
        assert torch.equal(fresh.train(training)(**arguments).logits, plain)
    with pytest.raises(peftc.PeftcError, match="P541"):
        peftc.calibrate(fresh)
    model = compiled(name)
    with pytest.raises(peftc.PeftcError, match="P543"):
        peftc.save(model, tmp_path / "a")
    before, dense = Before.of(model), torch.cat([v.detach().flatten() for v in values(model).values()])
    count = round(DENSITY * len(dense))
    assert peftc.calibrate(model) == {"m": count}
    assert peftc.losses(model) == {}
    assert {k: p.requires_grad for k, p in model.named_parameters()} == before.requires_grad
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=1e-2, weight_decay=20.0)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(**arguments).loss.backward()
        optimizer.step()
    want = model.eval()(**arguments).logits
    assert torch.equal(model.train()(**arguments).logits, want)  # the gates are no longer random
    peftc.save(model.eval(), tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build(name, torch.float64)).eval()
    assert torch.equal(loaded(**arguments).logits, want)
    ((key, places),) = states(loaded).items()
    assert key == "m/m.sparse/sparse.places"
    assert set(places.tolist()) == set(dense.abs().topk(count)[1].tolist())
    plan = peftc.plan(spec(name), zoo.build(name))
    assert plan.totals.stored == count == sum(p.numel() for p in peftc.parameters(loaded).values())
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(model).values())
    assert plan.totals.trained == 2 * len(dense) + len(values(model))
    loaded.train()(**arguments).loss.backward()
    again = copy.deepcopy(model)
    peftc.fold(model.train())
    close(model.eval()(**arguments).logits, want, "folded")
    twin = compiled(name, perturb=False)
    twin.load_state_dict(again.state_dict())
    assert torch.equal(twin.eval()(**arguments).logits, want)
    peftc.save(twin, tmp_path / "b")


def test_a_checkpoint_keeps_everything_for_further_training(tmp_path: Path) -> None:
    model = compiled("llama", ", keep=true")
    arguments = zoo.inputs("llama", model)
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64))
    assert torch.equal(loaded.eval()(**arguments).logits, model.eval()(**arguments).logits)
    close(peftc.losses(loaded)["m.l0"], peftc.losses(model)["m.l0"], "l0")
    plan = peftc.plan(spec("llama", ", keep=true"), zoo.build("llama"))
    assert plan.totals.stored == sum(p.numel() for p in peftc.parameters(loaded).values())


def test_checkpointing_repeats_the_draws_of_the_forward() -> None:
    result: list[list[Tensor]] = []
    for checkpointing in (False, True):
        model = compiled("llama").train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        torch.manual_seed(7)
        model(**zoo.inputs("llama", model, labels=True), use_cache=False).loss.backward()
        result.append([p.grad for p in peftc.parameters(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*result, strict=True))


def test_each_task_prunes_its_own_and_has_its_own_penalty(tmp_path: Path) -> None:
    text = spec("llama").replace(" {", " per task {", 1)
    model = peftc.compile(text, zoo.build("llama", torch.float64), seed=0, tasks=("a", "b"))
    randomise({k: p for k, p in peftc.parameters(model).items() if k.endswith("delta")})
    both = peftc.losses(model)["m.l0"]
    with peftc.task(model, "a"):
        close(peftc.losses(model)["m.l0"] * 2, both, "of one task")
        peftc.calibrate(model)
        assert peftc.losses(model) == {}
    with pytest.raises(peftc.PeftcError, match="P543"):
        peftc.save(model, tmp_path / "a")
    with peftc.task(model, "b"):
        peftc.calibrate(model)
    plan = peftc.plan(text, zoo.build("llama"), tasks=("a", "b"))
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(model).values())
    peftc.save(model.eval(), tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    assert plan.totals.stored == sum(p.numel() for p in peftc.parameters(loaded).values())
    arguments = zoo.inputs("llama", model)
    for task in "ab":
        with peftc.task(model, task), peftc.task(loaded, task), torch.no_grad():
            assert torch.equal(model(**arguments).logits, loaded(**arguments).logits)


def test_a_shared_form_is_pruned_as_one(tmp_path: Path) -> None:
    text = (
        "peft 1\nlet s = shared(masked(density=0.01))\n"
        "edit a at layer[*].attn.q { w += s() }\nedit b at layer[0].ffn.up { w += s() }"
    )
    model = peftc.compile(text, zoo.build("llama", torch.float64), seed=0)
    randomise({k: p for k, p in peftc.parameters(model).items() if k.endswith("delta")})
    peftc.calibrate(model)
    peftc.save(model.eval(), tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    arguments = zoo.inputs("llama", model)
    assert torch.equal(loaded(**arguments).logits, model(**arguments).logits)
    assert len(peftc.parameters(loaded)) == 1
    assert peftc.plan(text, zoo.build("llama")).totals.stored == len(next(iter(peftc.parameters(loaded).values())))
