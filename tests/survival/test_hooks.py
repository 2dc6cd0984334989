"""Users' hooks, registered before or after compiling: they fire as on the base, and survive the
removal of edits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.forms import FormModule
from tests import zoo
from tests.laws.harness import randomise
from tests.survival.harness import SOME, SPECIES, compiled, layers, model_inputs, text

pairs = pytest.mark.parametrize(("name", "spec"), SOME)
Log = list[tuple[str, str]]
KINDS = ("forward_pre", "forward_pre_kwargs", "forward", "forward_kwargs", "full_backward_pre", "full_backward")


def watch(model: nn.Module, log: Log) -> None:
    """Registers hooks of all kinds on every module of the base. Backward hooks only on layers and
    below: they need modules that return tensors.
    """
    inside = {id(m) for _, layer in layers(model) for m in layer.modules()}
    for path, module in model.named_modules():
        if "peftc" in path:
            continue

        def note(kind: str, path: str = path) -> Any:
            return lambda *_: log.append((kind, path))

        for kind in KINDS:
            register = getattr(module, f"register_{kind.removesuffix('_kwargs')}_hook")
            options = {"with_kwargs": True} if kind.endswith("_kwargs") else {}
            if id(module) in inside or "backward" not in kind:
                register(note(kind), **options)


def build(name: str) -> Any:
    return zoo.build(name, torch.float64).train()


def run(model: Any, inputs: dict[str, Any]) -> None:
    """Forward and backward with everything trainable, as backward hooks need."""
    model.requires_grad_(True)
    model(**inputs).loss.backward()


def forwards(log: Log) -> Log:
    return [entry for entry in log if entry[0].startswith("forward")]


def backwards(log: Log) -> list[tuple[str, str]]:
    return sorted(entry for entry in log if not entry[0].startswith("forward"))


@pairs
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings(
    "ignore:Full backward hook"
)  # torch warns of modules called with keywords, on the base, too
def test_hooks_fire_as_on_the_base(name: str, spec: str, when: str) -> None:
    base, want = build(name), Log()
    inputs = model_inputs(name, base)
    watch(base, want)
    run(base, inputs)
    model, got = build(name), Log()
    if when == "before":
        watch(model, got)
    peftc.compile(text(spec), model, seed=0)
    randomise(peftc.parameters(model))
    if when == "after":
        watch(model, got)
    assert not got, "compiling has run a hook"
    run(model, inputs)
    assert len(want) > 40
    assert forwards(got) == forwards(want)
    assert backwards(got) == backwards(want)
    got.clear()
    want.clear()
    peftc.remove(model)
    run(model, inputs)
    run(base, inputs)
    assert got == want


@pairs
def test_hooks_that_replace_inputs_or_outputs(name: str, spec: str) -> None:
    """A hook that replaces inputs or outputs of an edited layer, of its child, or of a Linear in
    it.
    """
    model = compiled(name, spec)
    inputs = model_inputs(name, model)
    want = model(**inputs).logits
    layer = layers(model)[0][1]
    edited = next(m for m in layer.modules() if hasattr(type(m), "_peftc_kind"))
    linear = next(m for m in layer.modules() if isinstance(m, nn.Linear))
    for module in {layer, edited, linear}:

        def double(_: nn.Module, args: Any, out: Any) -> Any:
            return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

        for register, hook in (
            (module.register_forward_hook, double),
            (module.register_forward_pre_hook, lambda _, args: (args[0] * 2, *args[1:]) if args else None),
        ):
            handle = register(hook)
            edited_logits = model(**inputs).logits
            assert not torch.equal(edited_logits, want) or register == module.register_forward_pre_hook
            handle.remove()
            assert torch.equal(model(**inputs).logits, want)


@pairs
def test_hooks_run_after_edits(name: str, spec: str) -> None:
    """Hooks run after edits: the next layer gets the hook's result."""
    model = compiled(name, spec)
    inputs = model_inputs(name, model)
    (_, first), (_, second) = layers(model)[:2]
    first.register_forward_hook(
        lambda _, args, out: tuple(o * 0 for o in out[:1]) + out[1:] if isinstance(out, tuple) else out * 0
    )
    results: list[torch.Tensor] = []
    second.register_forward_pre_hook(
        lambda _, args, kwargs: results.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model(**inputs)
    assert not results[0].any()


@pytest.mark.parametrize("name", SPECIES)
def test_hooks_on_the_modules_of_edits(name: str) -> None:
    model = compiled(name, "sequential")
    log: list[str] = []
    forms = [m for n, m in model.named_modules() if n.endswith(".adapter")]
    assert len(forms) >= 6
    for form in forms:
        form.register_forward_hook(lambda *_: log.append("forward"))
        form.register_full_backward_hook(lambda *_: log.append("backward"))
    run(model, model_inputs(name, model))
    assert log.count("forward") == log.count("backward") == len(forms)


@pytest.mark.parametrize("name", SPECIES)
def test_hooks_of_all_modules(name: str) -> None:
    """Global hooks, which profilers and FLOP counters use."""
    counts: list[dict[str, int]] = []
    for model in (zoo.build(name, torch.float64), compiled(name, "lora")):
        calls: dict[str, int] = {}

        def hook(module: nn.Module, args: Any, out: Any, calls: dict[str, int] = calls) -> None:
            calls[type(module).__name__] = calls.get(type(module).__name__, 0) + 1

        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            model(**model_inputs(name, model))
        finally:
            handle.remove()
        counts.append(calls)
    assert {k: v for k, v in counts[1].items() if k != "EquationModule"} == counts[0]
    assert counts[1]["EquationModule"] == len(peftc.parameters(model)) // 2


@pytest.mark.parametrize("name", SPECIES)
def test_tensor_hooks_of_base_parameters(name: str) -> None:
    model = build(name)
    parameter = next(p for n, p in model.named_parameters() if "norm" in n.lower())
    calls: list[int] = []
    parameter.register_hook(lambda g: calls.append(1))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(2))
    peftc.compile(text("weights"), model, seed=0)
    inputs = model_inputs(name, model)
    run(model, inputs)
    assert calls == [1, 2]
    peftc.remove(model)
    run(model, inputs)
    assert calls == [1, 2, 1, 2]


@pytest.mark.parametrize("where", ["members", "owner"])
def test_hooks_on_shared_forms_see_each_call(where: str) -> None:
    model = zoo.build("llama", torch.float64).eval()
    spec = "let s = shared(lora(r=2))\nedit a at layer[*].attn.q { h += s(x) }\nedit b at layer[*].attn.o { h += s(x) }"
    peftc.compile(f"peft 2\n{spec}\n", model, seed=0)
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FormModule) and name.startswith("peftc_shared") == (where == "owner"):
            module.register_forward_hook(lambda *args: calls.append("call"))
    model(**zoo.inputs("llama", model))
    assert len(calls) == 2 * model.config.num_hidden_layers
