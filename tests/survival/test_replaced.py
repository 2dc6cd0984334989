"""Modules replaced after `compile`: no edit is lost silently. An edited module that stays in the
model keeps its edits.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise

QV = "peft 1\nedit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }"
FFN = "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=2, act=gelu) }"
OUT = "peft 1\nedit o at layer[*].attn.o { h += lora(x, r=2) }"
NORMS = "peft 1\ntrain norms = [w] at layer[*].norm"
NAME = "model.layers.1.self_attn.q_proj"


def llama() -> Any:
    return zoo.build("llama", torch.float64)


def compiled(*specs: str) -> Any:
    model = llama()
    for spec in specs or (QV, FFN):
        peftc.compile(spec, model, seed=0, name=spec.split()[3])
    randomise(peftc.parameters(model))
    return model


def logits(model: Any) -> Tensor:
    return model(**zoo.inputs("llama", llama()))[0]


def linear() -> nn.Linear:
    return nn.Linear(32, 32, bias=False).double()


def by_assignment(parent: nn.Module, name: str, module: nn.Module) -> None:
    setattr(parent, name, module)


def by_dictionary(parent: nn.Module, name: str, module: nn.Module) -> None:
    """As bitsandbytes replaces modules."""
    vars(parent)["_modules"][name] = module


WAYS = [by_assignment, by_dictionary, nn.Module.add_module, nn.Module.set_submodule]
OPERATIONS: dict[str, Callable[[Any, Path], Any]] = {
    "forward": lambda m, _: logits(m),
    "generate": lambda m, _: m.generate(torch.arange(3)[None], max_new_tokens=1),
    "copy": lambda m, _: logits(copy.deepcopy(m)),
    "pickle": lambda m, _: logits(pickle.loads(pickle.dumps(m))),
    "compile": lambda m, _: peftc.compile(OUT, m),
    "load": lambda m, path: peftc.load(path / "saved", m),
    "fold": lambda m, _: peftc.fold(m),
    "widen": lambda m, _: peftc.fold(m, widen=True),
    "save": lambda m, path: peftc.save(m, path / "new"),
    "remove": lambda m, _: peftc.remove(m, "ffn"),
    "disabled": lambda m, _: peftc.disabled(m),
    "set_enabled": lambda m, _: peftc.set_enabled(m, False),
    "task": lambda m, _: peftc.task(m, "a"),
    "set_task": lambda m, _: peftc.set_task(m, "a"),
    "add_task": lambda m, _: peftc.add_task(m, "a"),
    "verify": lambda m, _: peftc.verify(m),
    "parameters": lambda m, _: peftc.parameters(m),
}


@pytest.mark.parametrize("replace", WAYS)
def test_a_replaced_module_is_an_error(replace: Callable[[nn.Module, str, nn.Module], None], tmp_path: Path) -> None:
    model = compiled()
    want, attention = logits(model).detach(), model.model.layers[1].self_attn
    other = compiled(OUT)
    peftc.save(other, tmp_path / "saved")
    edited = attention.q_proj
    replace(attention, "q_proj", linear())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, operation in OPERATIONS.items():
        with pytest.raises(peftc.PeftcError) as excinfo:
            operation(model, tmp_path)
        (diagnostic,) = excinfo.value.diagnostics
        assert (diagnostic.code, name) == ("P436", name)
        assert f"`{NAME}` was edited, and is a Linear without its edits now" == diagnostic.message
    assert not (tmp_path / "new").exists()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    replace(attention, "q_proj", edited)
    assert torch.equal(logits(model), want)
    assert len(peftc.parameters(model)) == len(peftc.parameters(compiled()))


@pytest.mark.parametrize("name", ["model.layers.2.self_attn", "model.layers.0", "model.layers", "model"])
def test_a_replaced_parent_of_an_edited_module_is_an_error(name: str) -> None:
    model = compiled()
    model.set_submodule(name, copy.deepcopy(llama().get_submodule(name)))
    with pytest.raises(peftc.PeftcError, match="P436") as excinfo:
        logits(model)
    assert f"`{name}." in str(excinfo.value)


def test_a_deleted_layer_is_an_error() -> None:
    model = compiled()
    model.model.layers = model.model.layers[:2]
    with pytest.raises(peftc.PeftcError, match=r"P436.*`model\.layers\.2\..*is not there any more"):
        logits(model)
    model = compiled()
    model.model.layers[0] = model.model.layers[1]
    with pytest.raises(peftc.PeftcError, match=r"P436.*are one module now"):
        logits(model)


def test_remove_restores_the_rest() -> None:
    model, base = compiled(QV, FFN, NORMS), llama()
    new, norm = linear(), nn.LayerNorm(32).double()
    for m in (model, base):
        m.model.layers[1].self_attn.q_proj = new
        m.model.layers[0].input_layernorm = norm
    values = {name: value.clone() for name, value in norm.state_dict().items()}
    before = Before.of(base)
    peftc.remove(model)
    now = Before.of(model)
    assert all(torch.equal(now.state[name], value) for name, value in before.state.items())
    assert now.state.keys() == before.state.keys()
    assert (now.classes, now.modules) == (before.classes, before.modules)
    assert all(torch.equal(values[name], value) for name, value in norm.state_dict().items())
    assert torch.equal(logits(model), logits(base))
    peftc.compile(QV, model)
    peftc.verify(model)


def test_a_replaced_trained_module_is_an_error() -> None:
    model = compiled(NORMS)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    model.model.layers[2].input_layernorm = nn.LayerNorm(32).double()
    with pytest.raises(peftc.PeftcError, match=r"P436.*`model\.layers\.2\.input_layernorm`"):
        logits(model)
    with pytest.raises(peftc.PeftcError, match="P436"):
        peftc.disabled(model)


def test_one_use_of_a_shared_module() -> None:
    base = llama()
    base.model.layers[1].mlp = base.model.layers[0].mlp
    base.names = nn.ModuleList([base.model.layers[0].mlp])  # nothing reads it from there
    model = peftc.compile("peft 1\nedit e at layer[0, 1].ffn { h += adapter(x, r=2) }", base)
    randomise(peftc.parameters(model))
    want = logits(model).detach()
    del base.names
    assert torch.equal(logits(model), want)
    base.model.layers[1].mlp = copy.deepcopy(llama().model.layers[1].mlp)
    for operation in (logits, peftc.parameters):
        with pytest.raises(peftc.PeftcError, match=r"P436.*`model\.layers\.1\.mlp`"):
            operation(model)


def in_a_sequence(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)


def checkpointed(model: Any) -> None:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)


def layers_compiled(model: Any) -> None:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[1].self_attn.q_proj, "weight", nn.Identity())


def put_back(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    edited, attention.q_proj = attention.q_proj, nn.Identity()
    attention.q_proj = edited


def other_modules(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj = copy.deepcopy(model.model.layers[1].self_attn.k_proj)
    model.lm_head = copy.deepcopy(model.lm_head)


def held_elsewhere(model: Any) -> None:
    model.layers = model.model.layers


@torch.no_grad()
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize(
    "change", [in_a_sequence, checkpointed, layers_compiled, parametrized, put_back, other_modules, held_elsewhere]
)
def test_changes_that_keep_the_edited_module_work(change: Callable[[Any], None], called: bool) -> None:
    model = compiled()
    want = logits(model if called else copy.deepcopy(model)).detach()
    change(model)
    assert torch.allclose(logits(model), want, rtol=0, atol=1e-12)
    if change in (checkpointed, layers_compiled, put_back, other_modules, held_elsewhere):
        assert len(peftc.parameters(model)) == len(peftc.parameters(compiled()))
    peftc.remove(model)
    assert torch.allclose(logits(model), logits(llama()), rtol=0, atol=1e-12)


def test_a_wrapper_is_named_by_operations() -> None:
    model = compiled()
    in_a_sequence(model)
    with pytest.raises(peftc.PeftcError, match=f"`{NAME}` was edited, and is inside of a Sequential now"):
        peftc.parameters(model)


def test_layers_in_another_order() -> None:
    model, base = compiled(), llama()
    for m in (model, base):
        m.model.layers[0], m.model.layers[1] = m.model.layers[1], m.model.layers[0]
    assert not torch.equal(logits(model), logits(base))
    peftc.remove(model)
    assert torch.equal(logits(model), logits(base))


def test_replicas_are_not_checked() -> None:
    """A replica of `nn.DataParallel` has modules of its own."""
    model = copy.deepcopy(compiled())  # its first call
    replica = model._replicate_for_data_parallel()
    replica._modules["model"] = copy.deepcopy(llama().model)
    logits(replica)
    model.model.layers[1].self_attn.q_proj = linear()
    with pytest.raises(peftc.PeftcError, match="P436"):
        logits(replica)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_code_raises_the_error(whole: bool) -> None:
    torch.compiler.reset()
    model = compiled(QV)
    want = logits(model).detach()
    fast: Any = torch.compile(model, backend="eager", fullgraph=whole)
    assert torch.allclose(logits(fast), want, rtol=0, atol=1e-12)
    model.model.layers[1].self_attn.q_proj = linear()
    with pytest.raises(Unsupported if whole else peftc.PeftcError, match="P436"):
        logits(fast)
    torch.compiler.reset()


def test_a_changed_class_is_an_error() -> None:
    model = compiled(QV)
    model(**zoo.inputs("llama", model))
    model.get_submodule(NAME).__class__ = nn.Linear
    with pytest.raises(peftc.PeftcError, match="P436") as error:
        model(**zoo.inputs("llama", model))
    assert NAME in str(error.value)


def test_copies_keep_a_derived_class() -> None:
    model = compiled(QV)
    inputs = zoo.inputs("llama", model)
    edited = model.get_submodule(NAME)
    edited.__class__ = type(
        "Doubled", (type(edited),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)}
    )
    want = model(**inputs).logits
    other = copy.deepcopy(model)
    assert type(other.get_submodule(NAME)) is type(edited)
    assert torch.equal(other(**inputs).logits, want)
    assert {finding.code for finding in peftc.verify(model).findings} >= {"P602"}


def test_a_module_that_a_program_constructs_of_a_derived_class_has_no_edits() -> None:
    model = compiled(QV, FFN, NORMS)
    config, inputs = model.config, zoo.inputs("llama", model)
    hidden = torch.randn(1, 3, 32, dtype=torch.float64)
    cases: list[tuple[str, tuple[Any, ...], Callable[[Any], Tensor]]] = [
        (NAME, (32, 32), lambda module: module(hidden)),
        ("model.layers.1.input_layernorm", (32,), lambda module: module(hidden)),
        ("model.layers.1.mlp", (config,), lambda module: module(hidden)),
        ("", (config,), lambda module: module(**inputs).logits),
    ]
    plain = llama()
    for name, arguments, run in cases:
        cls = type(model.get_submodule(name))
        derived = type("Derived", (cls,), {"forward": lambda self, *a, cls=cls, **k: cls.forward(self, *a, **k)})
        module = derived(*arguments).double()
        want = type(plain.get_submodule(name))(*arguments).double()
        want.load_state_dict(module.state_dict())
        assert [*module.state_dict()] == [*want.state_dict()]
        assert torch.equal(run(module), run(want)), name
        assert torch.equal(run(copy.deepcopy(module)), run(want)), name
        if name == NAME:  # in another model: its code cannot be analysed
            plain.set_submodule(NAME, module)
            with pytest.raises(peftc.PeftcError, match="Derived is derived from that of an edited Linear") as error:
                peftc.compile(QV, plain)
            assert error.value.diagnostics[0].code == "P451"
            plain = llama()


class Root(nn.Module):
    """A subclass of the model's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result.logits = 2 * result.logits
        return result


def test_a_class_that_is_derived_from_that_of_the_model_stays() -> None:
    model = compiled(QV)
    inputs = zoo.inputs("llama", model)
    want = 2 * model(**inputs).logits
    model.__class__ = type("Doubled", (Root, type(model)), {})
    assert torch.equal(model(**inputs).logits, want)
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, want)
    peftc.remove(model)
    assert type(model).__name__ == "Doubled"
    assert torch.equal(model(**inputs).logits, 2 * llama()(**inputs).logits)


@pytest.mark.parametrize("whole", [False, True])
def test_the_cache_of_torch_compile_follows_the_edits(whole: bool) -> None:
    model = compiled(QV)
    inputs = zoo.inputs("llama", model)
    fast = torch.compile(model, backend="eager", fullgraph=whole)
    with torch.no_grad():
        assert torch.equal(fast(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits)
        peftc.remove(model)
        assert torch.equal(fast(**inputs, use_cache=False).logits, llama()(**inputs, use_cache=False).logits)
        peftc.compile(FFN, model, seed=0)
        randomise(peftc.parameters(model))
        assert torch.equal(fast(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits)
