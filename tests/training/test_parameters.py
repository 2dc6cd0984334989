"""`wb`: every weight and bias of a model as a site, tied ones once; the reference replaces
parameters by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import peftc
from peftc.installation.contents import states
from peftc.installation.record import installation_of
from peftc.verification.reference.interpreter import FormModules
from tests import zoo
from tests.laws.harness import close, randomise
from tests.reference import forms

NAMES = ("gpt2", "bert", "bart", "t5", "llama", "vit")
ALL = "peft 1\nedit m at ** {{ wb += {} }}"
ATTRIBUTES = {"w": "weight", "b": "bias"}


def compiled(name: str, form: str) -> Any:
    model = peftc.compile(ALL.format(form), zoo.build(name, torch.float64), seed=0).eval()
    randomise(peftc.parameters(model))
    return model


def base_of(name: str) -> Any:
    return zoo.build(name, torch.float64).eval()


def places(name: str, form: str, base: nn.Module) -> list[tuple[str, nn.Parameter, bool]]:
    """Each parameter under its first name in the plan, in order, and whether it is stored (in,
    out).
    """
    parameters = dict(base.named_parameters(remove_duplicate=False))
    result: dict[int, tuple[str, nn.Parameter, bool]] = {}
    for site in peftc.plan(ALL.format(form), zoo.build(name)).edits[0].sites:
        attribute = ATTRIBUTES[site.path.rpartition(".")[2]]
        parameter, key = parameters[f"{site.module}.{attribute}"], f"{site.module}.{attribute}"
        transposed = attribute == "weight" and type(base.get_submodule(site.module)).__name__ == "Conv1D"
        result.setdefault(id(parameter), (key, parameter, transposed))
    return list(result.values())


def logits(base: nn.Module, changes: dict[str, Tensor], arguments: dict[str, Tensor]) -> Tensor:
    parameters = dict(base.named_parameters(remove_duplicate=False))
    new_parameters = {key: parameters[key].detach() + change for key, change in changes.items()}
    return functional_call(base, new_parameters, args=(), kwargs=arguments, tie_weights=True).logits


@pytest.mark.parametrize("name", NAMES)
def test_all_parameters_are_places_once(name: str) -> None:
    base = base_of(name)
    target = {key for key, _, _ in places(name, "sparse(density=100%, select=magnitude)", base)}
    names = {id(p): key for key, p in base.named_parameters(remove_duplicate=False) if key in target}
    missing = [key for key, p in base.named_parameters() if id(p) not in names]
    images = ["vit.embeddings.cls_token", "vit.embeddings.position_embeddings"]
    assert missing == (images if name == "vit" else [])
    total = sum(p.numel() for key, p in base.named_parameters() if key not in missing)
    plan = peftc.plan(ALL.format("sparse(density=10%, select=magnitude)"), zoo.build(name))
    assert plan.totals.trained == round(0.1 * total)
    assert len(plan.edits[0].sites) >= len(target) == len(names)


@pytest.mark.parametrize("name", NAMES)
def test_equals_a_model_with_replaced_parameters(name: str, tmp_path: Path) -> None:
    """One vector of values, split over the parameters in the plan's order."""
    form = "sparse(density=100%, select=magnitude)"
    model, base = compiled(name, form), base_of(name)
    arguments = zoo.inputs(name, model)
    peftc.calibrate(model)
    randomise(peftc.parameters(model))
    (values,) = (p.detach() for p in peftc.parameters(model).values())
    changes: dict[str, Tensor] = {}
    for key, parameter, transposed in places(name, form, base):
        part, values = values[: parameter.numel()], values[parameter.numel() :]
        changes[key] = part.view(parameter.shape[::-1]).t() if transposed else part.view(parameter.shape)
    assert len(values) == 0
    with torch.no_grad():
        want = logits(base, changes, arguments)
        close(model(**arguments).logits, want, "compiled")
        peftc.save(model, tmp_path)
        close(peftc.load(tmp_path, base_of(name)).eval()(**arguments).logits, want, "loaded")
        assert [folded.edit for folded in peftc.fold(model).folded] == ["m"]
        close(model(**arguments).logits, want, "folded")
    own = dict(model.named_parameters(remove_duplicate=False))
    for key, change in changes.items():
        close(own[key], dict(base.named_parameters(remove_duplicate=False))[key] + change, key)


@pytest.mark.parametrize("name", NAMES)
def test_said_has_one_vector_and_a_factor_for_each_layer(name: str) -> None:
    d = 40
    model, base = compiled(name, f"fastfood(d={d}, scaled=true, seed=3)"), base_of(name)
    parameters = peftc.parameters(model)
    assert sum(p.numel() for p in parameters.values()) == d
    (theta,) = (p.detach() for key, p in parameters.items() if key.endswith("theta"))
    (scale,) = (p.detach() for key, p in parameters.items() if key.endswith("scale"))
    layers = {site.module for site in peftc.sites(base).sites if site.steps[-1][0] == "layer"}
    record, homes = installation_of(model), dict[str, int]()
    modules, changes = FormModules(model, record), dict[str, Tensor]()
    for site_edit in record.site_edits:
        (instance,), (state,) = site_edit.instances, site_edit.site.states
        module, buffers = site_edit.site.module, dict(modules.get(site_edit, instance).named_buffers())
        home = next((layer for layer in layers if f"{module}.".startswith(f"{layer}.")), module)
        factor = scale[homes.setdefault(home, len(homes))]
        key = f"{module}.{ATTRIBUTES[state]}"
        stored = dict(base.named_parameters(remove_duplicate=False))[key]
        transposed = state == "w" and type(base.get_submodule(module)).__name__ == "Conv1D"
        size = stored.shape[::-1] if transposed else stored.shape
        change = factor * forms.fastfood(buffers | {"theta": theta}, tuple(size))
        changes[key] = change.t() if transposed else change
    assert len(homes) == len(scale) == d - len(theta)
    arguments = zoo.inputs(name, model)
    with torch.no_grad():
        close(model(**arguments).logits, logits(base, changes, arguments), "said")


def test_entries_compete_in_one_budget() -> None:
    """The largest scores over all weights and biases; a tied one has the gradient of both uses."""
    name = "gpt2"
    model, base = peftc.compile(ALL.format("sparse(density=3%)"), zoo.build(name, torch.float64), seed=0), base_of(name)
    arguments = zoo.inputs(name, model, labels=True)
    base(**arguments).loss.backward()
    scores = [p.grad.t() if transposed else p.grad for _, p, transposed in places(name, "sparse(density=3%)", base)]
    every = torch.cat([score.reshape(-1) ** 2 for score in scores])
    count = round(0.03 * len(every))
    assert peftc.calibrate(model, [arguments]) == {"m": count}
    ((_, indices),) = states(model).items()
    assert set(indices.tolist()) == set(every.topk(count)[1].tolist())


def test_edits_that_share_a_form_have_one_budget() -> None:
    text = """peft 1
        let s = shared(sparse(density=3%))
        edit a at layer[*].attn.o { w += s() }
        edit b at layer[*].ffn.up { wb += s() }"""
    model, base = peftc.compile(text, zoo.build("gpt2", torch.float64), seed=0), base_of("gpt2")
    arguments = zoo.inputs("gpt2", model, labels=True)
    base(**arguments).loss.backward()
    blocks: Any = base.transformer.h
    grads = [b.attn.c_proj.weight.grad.t() for b in blocks]
    grads += [g for b in blocks for g in (b.mlp.c_fc.weight.grad.t(), b.mlp.c_fc.bias.grad)]
    every = torch.cat([g.reshape(-1) ** 2 for g in grads])
    count = round(0.03 * len(every))
    assert peftc.plan(text, base).totals.trained == sum(peftc.calibrate(model, [arguments]).values()) == count
    ((_, indices),) = states(model).items()
    assert set(indices.tolist()) == set(every.topk(count)[1].tolist())


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_tied_weight_has_one_set_of_parameters(name: str, tmp_path: Path) -> None:
    model = compiled(name, "masked(density=2%, keep=true)")
    keys = [key for key in peftc.parameters(model) if ".embed.w/" in key or "head.w/" in key]
    assert len(keys) == 3  # delta, alpha, group: of the first use
    arguments = zoo.inputs(name, model)
    with torch.no_grad():
        want = model(**arguments).logits
        peftc.save(model, tmp_path)
        close(peftc.load(tmp_path, base_of(name)).eval()(**arguments).logits, want, "loaded")
        twin = compiled(name, "masked(density=2%, keep=true)")
        twin.load_state_dict(model.state_dict())
        close(twin(**arguments).logits, want, "state dict")
        peftc.remove(model)
        assert torch.equal(model(**arguments).logits, base_of(name)(**arguments).logits)


def test_an_edit_of_one_use_of_a_tied_weight_does_not_fold() -> None:
    plan = peftc.plan("peft 1\nedit m at decoder.embed { wb += lowrank(r=2) }", zoo.build("gpt2"))
    assert not plan.edits[0].foldable
    assert "tied" in plan.edits[0].reason


@pytest.mark.parametrize(
    ("name", "at", "message"),
    [
        ("mixtral", "**", "no weight and no bias of its own"),
        ("gpt2", "layer[*].ffn", "no weight and no bias of its own"),
    ],
)
def test_places_without_parameters_are_refused(name: str, at: str, message: str) -> None:
    with pytest.raises(peftc.PeftcError, match="P205") as result:
        peftc.plan(f"peft 1\nedit m at {at} {{ wb += sparse(density=1%) }}", zoo.build(name))
    assert message in str(result.value)
    assert result.value.diagnostics[0].span is not None


def test_more_factors_than_numbers_are_refused() -> None:
    with pytest.raises(peftc.PeftcError, match="P317") as result:
        peftc.plan(ALL.format("fastfood(d=6, scaled=true)"), zoo.build("gpt2"))
    assert result.value.diagnostics[0].help == "use d > 6"


@pytest.mark.parametrize(
    "equation", ["wb *= scalar(init=1)", "wb = wb * scalar(init=1)", "let s = scalar(init=1)  wb *= s"]
)
def test_equations_of_all_parameters(equation: str) -> None:
    """A factor for each."""
    text = f"peft 1\nedit m at ** {{ {equation} }}"
    base = base_of("gpt2")
    count = len(list(base.parameters()))
    plan = peftc.plan(text, base)
    assert (plan.totals.trained, plan.edits[0].foldable, plan.edits[0].identity) == (count, True, True)
    model = peftc.compile(text, base_of("gpt2"), seed=0)
    with torch.no_grad():
        for p in peftc.parameters(model).values():
            p.fill_(1.5)
        arguments = zoo.inputs("gpt2", model)
        changes = {key: 0.5 * p.detach() for key, p, _ in places("gpt2", "sparse(density=1%)", base)}
        close(model.eval()(**arguments).logits, logits(base, changes, arguments), "scaled")
    (design,) = peftc.design(text, base)
    assert design.modified == "w/b"
