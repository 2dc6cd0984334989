"""Layers that are alike get what each would get alone, in less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.forms.module import FormModule
from peftc.installation.builder import InstallationBuilder
from peftc.installation.record import installation_of
from peftc.modules.memory import storage_id
from peftc.modules.torch_attributes import TABLES
from tests import zoo

SPECS = {
    "lora": "edit a at layer[*].attn.q | layer[*].attn.v | layer[*].ffn.down { h += lora(x, r=2) }\n",
    "several": "edit a at layer[*].attn.q { h += lora(x, r=2)\n h *= vector(init=1) }\n"
    "edit b at layer[*].attn.q | layer[*].ffn { h += adapter(x, r=2) }\n",
}


def each_alone(patch: pytest.MonkeyPatch) -> None:
    """Every module gets forms that are built, and its own checks."""
    patch.setattr(FormModule, "copier", lambda self: None)
    patch.setattr(InstallationBuilder, "add_alike", lambda *_: False)


def description(model: nn.Module) -> dict[str, Any]:
    """All that an installation leaves in a model, by the names of its modules, in order."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = vars(module) | {key: getattr(module, key) for key in TABLES}  # some are made when they are read
        tables = {key: (type(value), list(value)) for key, value in own.items() if isinstance(value, dict | set)}
        plain = {k: v for k, v in own.items() if isinstance(v, bool | int | float | str | tuple | None)}
        parts[name] = type(module).__qualname__, sorted(tables.items()), sorted(plain.items(), key=str)
    return parts


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("spec", ["lora", "several"])
@pytest.mark.parametrize("name", ["llama", "bart", "gpt2"])
def test_a_copy_is_what_is_built(name: str, spec: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[nn.Module] = []
    steps: list[Callable[[pytest.MonkeyPatch], None]] = [lambda _: None, each_alone]
    for step in steps:
        step(monkeypatch)
        models.append(peftc.compile(f"peft 1\n{SPECS[spec]}", zoo.build(name).to(device), seed=0))
    copied, built = models
    assert description(copied) == description(built)
    one, two = map(installation_of, models)
    assert list(one.form_modules.items()) == list(two.form_modules.items())
    assert [name for name, _ in one.regions] == [name for name, _ in two.regions]
    parameters = [dict(model.named_parameters()) for model in models]
    assert list(parameters[0]) == list(parameters[1])
    assert list(copied.state_dict()) == list(built.state_dict())
    for first, second in zip(*(own.values() for own in parameters), strict=True):
        assert type(first) is type(second)
        assert (first.dtype, first.device, first.shape) == (second.dtype, second.device, second.shape)
        assert (first.stride(), first.requires_grad, first.is_leaf) == (second.stride(), second.requires_grad, True)
        assert device == "meta" or torch.equal(first, second)
    forms = [module for module in copied.modules() if isinstance(module, FormModule)]
    tables = [value for form in forms for value in vars(form).values() if isinstance(value, dict | set)]
    assert len({*map(id, tables)}) == len(tables)
    new = [parameter for form in forms for parameter in form.parameters()]
    assert len({*map(storage_id, new)}) == len(new)


def test_a_model_with_an_edited_part_is_compiled() -> None:
    """Modules of edits lack tables of hooks until something reads them, also in a copy."""
    parted, whole, ids = zoo.build("llama"), zoo.build("llama"), torch.arange(6)[None]
    at_q, at_k = (f"peft 1\nedit {x} at layer[*].attn.{x} {{ h += lora(x, r=2) }}\n" for x in "qk")
    peftc.compile(at_q, parted.get_submodule("model"), seed=0)
    peftc.compile(at_k, parted, seed=0)
    for spec in (at_q, at_k):
        peftc.compile(spec, whole, seed=0)
    with torch.no_grad():
        own, others = (dict(model.named_parameters()) for model in (parted, whole))
        assert own.keys() == others.keys()
        for name, parameter in own.items():
            others[name].copy_(parameter.uniform_(-0.1, 0.1) if ".peftc." in name else parameter)
        assert torch.equal(parted(ids).logits, whole(ids).logits)
