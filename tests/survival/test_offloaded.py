"""Models whose weights accelerate keeps on the CPU or on a disk: ties, and what is saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn

import peftc
from peftc.models.identity import fingerprint, parameter_count
from tests import zoo
from tests.laws.harness import randomise

SPEC = """peft 2
edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }
edit q at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }
edit a at layer[*].ffn { h += adapter(h, r=2) }
"""
CPU = torch.device("cpu")
OFFLOADS: dict[str, Callable[[Any, Path], Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, CPU),
    "disk": lambda model, folder: disk_offload(model, folder, CPU),
}
pytestmark = pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")


def compiled(model: Any) -> Any:
    peftc.compile(SPEC, model, seed=0)
    randomise(peftc.parameters(model))
    return model


@torch.no_grad()
def output(model: Any, name: str) -> Tensor:
    return model(**zoo.inputs(name, zoo.build(name, torch.float64)))[0]


@pytest.mark.parametrize(("way", "name"), [("cpu", "bart"), ("disk", "gpt2")])  # whose embeddings are the head's matrix
def test_adapters_go_between_offloaded_and_plain_models(way: str, name: str, tmp_path: Path) -> None:
    offload, plain = OFFLOADS[way], zoo.build(name, torch.float64)
    base, want = output(plain, name), output(compiled(plain), name)
    peftc.save(plain, tmp_path / "plain")
    first = offload(compiled(zoo.build(name, torch.float64)), tmp_path / "first")
    after = compiled(offload(zoo.build(name, torch.float64), tmp_path / "after"))
    for number, model in enumerate((first, after)):
        meta = {n for n, p in model.named_parameters() if p.is_meta}
        folder = peftc.save(model, tmp_path / f"adapter {number}")
        assert {n for n, p in model.named_parameters() if p.is_meta} == meta
        torch.testing.assert_close(output(model, name), want, rtol=0, atol=1e-12)
        again = peftc.load(folder, zoo.build(name, torch.float64), strict=True)
        torch.testing.assert_close(output(again, name), want, rtol=0, atol=1e-12)
        assert torch.equal(output(peftc.remove(model), name), base)
        assert torch.equal(output(peftc.load(tmp_path / "plain", model), name), output(again, name))


@pytest.mark.parametrize("form", ["prefix(len=2, reparam=mlp(3))", "prefix(len=2, reparam=mlp(3), keep=true)"])
def test_what_several_sites_share_is_compiled_after_the_model_is_offloaded(form: str) -> None:
    text = f"peft 2\nedit p at layer[*].attn {{ kv = concat({form}, kv) }}"
    plain, first, after = (zoo.build("llama", torch.float64) for _ in range(3))
    want = output(peftc.compile(text, plain, seed=0), "llama")
    assert torch.equal(output(peftc.compile(text, cpu_offload(after, CPU), seed=0), "llama"), want)
    cpu_offload(peftc.compile(text, first, seed=0), CPU)
    with pytest.raises(peftc.PeftcError, match=r"P566[\s\S]*several sites share"):
        output(first, "llama")
    remove_hook_from_submodules(first)
    torch.testing.assert_close(output(first, "llama"), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", OFFLOADS)
def test_ties_are_those_of_the_plain_model(way: str, tmp_path: Path) -> None:
    plain, model = zoo.build("bart"), OFFLOADS[way](zoo.build("bart"), tmp_path)
    assert fingerprint(model) == fingerprint(plain)
    assert parameter_count(model) == parameter_count(plain)
    assert peftc.plan(SPEC, model).model == peftc.plan(SPEC, plain).model


def test_ties_of_a_model_that_is_not_of_transformers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.other = nn.Embedding(7, 4), nn.Linear(4, 7, False), nn.Linear(4, 7, False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids)) + self.other(self.embed(ids))

    plain = Tied()
    want = fingerprint(plain), parameter_count(plain)
    model = cpu_offload(plain, CPU)
    assert (fingerprint(model), parameter_count(model)) == want
    remove_hook_from_submodules(model)
    assert (fingerprint(model), parameter_count(model)) == want


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_device_map_of_from_pretrained(name: str, tmp_path: Path) -> None:
    zoo.build(name, torch.float64).save_pretrained(tmp_path / "base")
    plain: Any = type(zoo.build(name)).from_pretrained(tmp_path / "base", dtype=torch.float64)
    stack = "transformer.h" if name == "gpt2" else "model.layers"
    inner = [
        n for n, _ in plain.named_modules() if n.count(".") == stack.count(".") + (n.startswith(stack) and n != stack)
    ]
    where: Any = {n: "cpu" for n in ["lm_head", *inner] if n != stack} | {f"{stack}.1": "disk"}
    options: dict[str, Any] = {"device_map": where, "offload_folder": tmp_path / "offloaded", "dtype": torch.float64}
    model = type(plain).from_pretrained(tmp_path / "base", **options)
    assert {p.is_meta for p in model.parameters()} == {True, False}
    want = output(compiled(plain), name)
    assert torch.equal(output(compiled(model), name), want)
    model.save_pretrained(tmp_path / "adapter")  # as `Trainer` does
    options["offload_folder"] = tmp_path / "other"
    again = peftc.from_pretrained(tmp_path / "adapter", tmp_path / "base", **options)
    assert torch.equal(output(again, name), want)
    model(**zoo.inputs(name, plain))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in peftc.parameters(model).values())


# Hooks as those of diffusers, which stand in instances as well
# --------------------------------------------------------------------------------------------------


def add_registries(model: nn.Module, **options: Any) -> list[nn.Module]:
    """To Linears in layers. Returns: a list of modules, to which calls add theirs."""
    calls: list[nn.Module] = []

    def add(module: nn.Module) -> None:
        reference = SimpleNamespace(pre_forward=calls.append, forward=module.forward)

        def forward(owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
            reference.pre_forward(owner)
            return reference.forward(*args, **kwargs)

        new: Any = functools.update_wrapper(functools.partial(forward, module), module.forward)
        hook = SimpleNamespace(library=torch, **options)  # a Python module cannot be copied
        module.forward, module._diffusers_hook = new, SimpleNamespace(hooks={"hook": hook})  # pyright: ignore

    for module in model.get_submodule("model.layers").modules():
        if isinstance(module, nn.Linear):
            add(module)
    return calls


def test_edits_act_inside_hooks_of_registries(tmp_path: Path) -> None:
    plain, before, after = (zoo.build("llama", torch.float64) for _ in range(3))
    group = SimpleNamespace(onload_device=CPU)
    base, want = output(plain, "llama"), output(compiled(plain), "llama")
    compiled(before)
    calls = add_registries(before, group=group), add_registries(after, group=group)
    compiled(after)
    for model, own in zip((before, after), calls, strict=True):
        own.clear()
        torch.testing.assert_close(output(model, "llama"), want, rtol=0, atol=1e-12)
        assert len(own) == 7 * len(model.model.layers)
        again = peftc.load(peftc.save(model, tmp_path), zoo.build("llama", torch.float64))
        torch.testing.assert_close(output(again, "llama"), want, rtol=0, atol=1e-12)
        assert torch.equal(output(peftc.remove(model), "llama"), base)
        assert len(own) == 14 * len(model.model.layers)


def test_edits_are_on_the_device_to_which_groups_are_brought() -> None:
    model = zoo.build("llama")
    add_registries(model, group=SimpleNamespace(onload_device=torch.device("meta")))  # which every machine has
    peftc.compile("peft 2\nedit q at layer[*].attn.q { h += lora(x, r=2) }", model, seed=0)
    assert {parameter.device.type for parameter in peftc.parameters(model).values()} == {"meta"}


def test_code_whose_weights_are_cast_for_each_call_is_not_traced() -> None:
    model = peftc.compile(
        "peft 2\nedit a at layer[*].attn { kv = concat(prefix(len=2), kv) }", zoo.build("llama"), seed=0
    )
    add_registries(model, storage_dtype=torch.float8_e4m3fn)
    with pytest.raises(peftc.PeftcError, match="P407"):
        model(**zoo.inputs("llama", model))
