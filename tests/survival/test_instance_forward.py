"""`forward` as an instance attribute: accelerate's hooks, wrappers, patches; set before or after
compilation. The edit acts, or is refused.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn
from torch.nn.utils import parametrize

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise

SPEC = """peft 1
edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }
edit dora at layer[*].attn.o { w = magnitude(w + lowrank(r=2)) }
edit ffn at layer[*].ffn { h += adapter(x, r=2, act=gelu) }
"""


def same(before: Before, model: nn.Module) -> None:
    """Compares only shapes of offloaded weights."""
    state = {k: v for k, v in before.state.items() if not v.is_meta}
    now = Before.of(model)
    assert now.state.keys() == before.state.keys()
    assert all(torch.equal(now.state[k], v) for k, v in state.items())
    assert (now.classes, now.requires_grad, now.modules) == (before.classes, before.requires_grad, before.modules)


SEQUENTIAL = "peft 1\nedit e at layer[*].attn { h += adapter(h, r=2) }"
Prepare = Callable[[Any, Path], Any]


def llama() -> Any:
    return zoo.build("llama", torch.float64)


def compiled(model: Any, spec: str = SPEC) -> Any:
    peftc.compile(spec, model, seed=0)
    randomise(peftc.parameters(model))
    return model


def nearly(value: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: with hooks, forms are called, and `dora` forms the edited weight."""
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def logits(model: Any) -> Tensor:
    return model(**zoo.inputs("llama", llama()))[0]


@pytest.fixture(scope="module")
def want() -> dict[str, Any]:
    """Outputs of the base and of the edited model, and gradients, without a `forward` in an
    instance.
    """
    model = llama()
    base = logits(model).detach()
    out = logits(compiled(model))
    out.sum().backward()
    return {"base": base, "out": out.detach(), "grads": {k: p.grad for k, p in peftc.parameters(model).items()}}


def on_disk(model: Any, folder: Path) -> Any:
    names = (
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{i}" for i in range(3)),
    )
    where = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    return dispatch_model(model, where, main_device="cpu", offload_dir=folder, force_hooks=True)


def wrap(model: Any, folder: Path) -> Any:
    for module in model.modules():
        inner = module.forward

        def forward(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        module.forward = functools.wraps(inner)(forward) if isinstance(module, nn.Linear) else forward
    return model


def removed_again(model: Any, folder: Path) -> Any:
    """accelerate leaves the original method as an instance attribute."""
    remove_hook_from_submodules(dispatch_model(model, {"": "cpu"}, force_hooks=True))
    return model


class Counting(ModelHook):
    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


def two_hooks(model: Any, folder: Path) -> Any:
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            add_hook_to_module(add_hook_to_module(module, Counting()), Counting(), append=True)
    return model


HOOKS: dict[str, Prepare] = {
    "one device": lambda model, _: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "cpu offload": lambda model, _: cpu_offload(model, torch.device("cpu")),
    "disk offload": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
    "cpu and disk": on_disk,
    "wrappers": wrap,
    "hooks removed": removed_again,
    "two hooks": two_hooks,
}
offloads = pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")


@offloads
@pytest.mark.parametrize("name", HOOKS)
def test_edits_act_inside_hooks(name: str, want: dict[str, Any], tmp_path: Path) -> None:
    model = HOOKS[name](llama(), tmp_path)
    assert torch.equal(logits(model), want["base"])
    before, attributes = Before.of(model), {n: dict(vars(m)) for n, m in model.named_modules()}
    assert peftc.plan(SPEC, model).edits == peftc.plan(SPEC, llama()).edits
    out = logits(compiled(model))
    assert torch.equal(out, want["out"])
    out.sum().backward()
    assert all(torch.equal(p.grad, want["grads"][k]) for k, p in peftc.parameters(model).items())
    with peftc.disabled(model):
        assert torch.equal(logits(model), want["base"])
    assert torch.equal(logits(model), want["out"])
    peftc.save(model, tmp_path / "adapter")
    assert torch.equal(logits(peftc.load(tmp_path / "adapter", llama())), want["out"])
    peftc.remove(model)
    same(before, model)
    for path, module in model.named_modules():
        now = vars(module)
        assert now.keys() == attributes[path].keys()
        assert all(now[k] == v for k, v in attributes[path].items() if callable(v))
    assert torch.equal(logits(model), want["base"])
    assert torch.equal(logits(peftc.load(tmp_path / "adapter", model)), want["out"])


@pytest.mark.parametrize("name", ["one device", "cpu offload"])
@offloads
def test_hooks_removed_before_the_edits(name: str, want: dict[str, Any], tmp_path: Path) -> None:
    model = compiled(HOOKS[name](llama(), tmp_path))
    remove_hook_from_submodules(model)
    assert torch.equal(logits(model), want["out"])
    with peftc.disabled(model):
        assert torch.equal(logits(model), want["base"])
    assert torch.equal(logits(peftc.remove(model)), want["base"])
    assert torch.equal(logits(compiled(model)), want["out"])


def test_hooks_added_after_the_edits(want: dict[str, Any]) -> None:
    model = dispatch_model(compiled(llama()), {"": "cpu"}, force_hooks=True)
    nearly(logits(model), want["out"])
    with peftc.disabled(model):
        assert torch.equal(logits(model), want["base"])
    twin = copy.deepcopy(model)
    assert torch.equal(logits(peftc.remove(model)), want["base"])
    nearly(logits(twin), want["out"])
    remove_hook_from_submodules(twin)
    nearly(logits(twin), want["out"])


@offloads
def test_offloaded_edits_are_not_trained(want: dict[str, Any]) -> None:
    model = cpu_offload(compiled(llama()), torch.device("cpu"))
    nearly(logits(model), want["out"])
    with pytest.raises(peftc.PeftcError, match="P566"):
        peftc.parameters(model)
    remove_hook_from_submodules(model)
    nearly(logits(model), want["out"])
    assert peftc.parameters(model)


@offloads
def test_offloaded_weights_created_in_inference_mode(want: dict[str, Any]) -> None:
    """The hooks create new parameters in each call, and inference tensors cannot get
    `requires_grad` outside.
    """
    model = cpu_offload(llama(), torch.device("cpu"))
    before = {name: (parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()}
    peftc.compile(SPEC, model, seed=0)
    with torch.inference_mode():
        logits(model)
    peftc.remove(model)
    assert not peftc.installation.record.is_installed(model)
    assert {name: (parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()} == before
    assert torch.equal(logits(model), want["base"])


@offloads
def test_operations_refused_for_offloaded_weights() -> None:
    model = cpu_offload(llama(), torch.device("cpu"))
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError, match="P566"):
        peftc.compile("peft 1\ntrain norms = [w] at layer[*].norm", model)
    same(before, model)
    compiled(model)
    with pytest.raises(peftc.PeftcError, match="P566"):
        peftc.fold(model)
    remove_hook_from_submodules(model)
    assert {f.edit for f in peftc.fold(model).folded} == {"qv", "dora"}


# Patches
# --------------------------------------------------------------------------------------------------


def doubled(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Another attention: without positions, times two."""
    q, k, v = (
        linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return 2 * self.o_proj(mixed.transpose(1, 2).flatten(2)), None


def patched(layers: tuple[int, ...] = (0, 1, 2), as_partial: bool = False) -> Any:
    model = llama()
    for i in layers:
        attention = model.model.layers[i].self_attn
        attention.forward = (
            functools.partial(doubled, attention) if as_partial else types.MethodType(doubled, attention)
        )
    return model


def in_classes(model: Any) -> Any:
    for layer in model.model.layers:
        if vars(layer.self_attn).pop("forward", None) is not None:
            layer.self_attn.__class__ = type("LlamaAttention", (type(layer.self_attn),), {"forward": doubled})
    return model


@pytest.mark.parametrize(
    "spec", [SEQUENTIAL, SPEC, "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=2), kv) }"]
)
@pytest.mark.parametrize("layers", [(0, 1, 2), (1,)])
def test_a_patched_forward_is_traced(spec: str, layers: tuple[int, ...]) -> None:
    model, other = patched(layers), in_classes(patched(layers))
    base, attributes = logits(model), [dict(vars(layer.self_attn)) for layer in model.model.layers]
    assert peftc.plan(spec, model).edits == peftc.plan(spec, other).edits
    out = logits(compiled(model, spec))
    assert torch.equal(out, logits(compiled(other, spec)))
    assert (out - base).abs().max() > 1e-3
    with peftc.disabled(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(copy.deepcopy(model)), out)
    if spec != SPEC and len(layers) == 3:  # Python cannot pickle a method whose function is not in the class
        assert torch.equal(logits(pickle.loads(pickle.dumps(model))), out)
    assert torch.equal(logits(peftc.remove(model)), base)
    for layer, was in zip(model.model.layers, attributes, strict=True):
        assert type(layer.self_attn) is type(llama().model.layers[0].self_attn)
        assert vars(layer.self_attn).keys() == was.keys()
        assert vars(layer.self_attn).get("forward") == was.get("forward")


def test_a_patch_that_is_a_partial_and_has_a_hook() -> None:
    model, other = patched(as_partial=True), patched()
    for layer in other.model.layers:
        add_hook_to_module(layer.self_attn, Counting())
    base = logits(model)
    assert torch.equal(logits(compiled(model, SEQUENTIAL)), logits(compiled(other, SEQUENTIAL)))
    assert all(layer.self_attn._hf_hook.calls for layer in other.model.layers)
    assert torch.equal(logits(peftc.remove(model)), base)
    assert torch.equal(logits(peftc.remove(other)), base)


def test_a_forward_that_cannot_be_traced_is_refused() -> None:
    for path in ("model.layers.1.self_attn", "model.layers.1", "model"):
        model = llama()
        module = model.get_submodule(path)
        cls = type(module)
        module.forward = lambda *args, cls=cls, m=module, **kwargs: cls.forward(m, *args, **kwargs)
        before, base = Before.of(model), logits(model)
        with pytest.raises(peftc.PeftcError, match=f"`{path}` has a `forward` in its instance"):
            peftc.compile(SEQUENTIAL, model, seed=0)
        same(before, model)
        assert torch.equal(logits(model), base)


class Attending(nn.Module):
    """nn.MultiheadAttention reads the weight of a child that it never calls: tracing inlines the
    child.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_hook_on_an_inlined_module_is_refused() -> None:
    spec, sample = 'peft 1\nedit e at "attention.out_proj" { w += lowrank(r=2) }', {"x": torch.ones(2, 3, 8)}
    model = Attending()
    add_hook_to_module(model.attention.out_proj, Counting())
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError, match="P426"):
        peftc.compile(spec, model, seed=0, sample=sample)
    same(before, model)
    plain = Attending().eval()
    base = plain(**sample)
    randomise(peftc.parameters(peftc.compile(spec, plain, seed=0, sample=sample)))
    assert (plain(**sample) - base).abs().max() > 1e-3


def test_a_hook_that_would_load_the_parameters_of_edits_is_refused() -> None:
    model = llama()
    add_hook_to_module(model.model.layers[0], AlignDevicesHook("cpu", offload=True, place_submodules=True))
    with pytest.raises(peftc.PeftcError, match="P426"):
        peftc.compile(SPEC, model, seed=0)


# After compilation
# --------------------------------------------------------------------------------------------------


def test_a_forward_assigned_to_an_edited_module_calls_the_edited_code_or_is_refused(want: dict[str, Any]) -> None:
    plain = llama()
    method = plain.model.layers[0].self_attn.q_proj.forward
    model = compiled(plain)
    linear = model.model.layers[0].self_attn.q_proj
    edited = type(linear).forward

    def other(self: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    for bypass in (types.MethodType(other, linear), lambda x: x, types.MethodType(nn.Linear.forward, nn.Linear(2, 2))):
        with pytest.raises(peftc.PeftcError, match="P425"):
            linear.forward = bypass
    assert "forward" not in vars(linear)
    linear.forward = method  # a reference from before compilation
    assert linear.forward == types.MethodType(edited, linear)
    assert torch.equal(logits(model), want["out"])
    inner = linear.forward
    linear.forward = lambda x: inner(x) * 0
    assert not torch.equal(logits(model), want["out"])
    del linear.forward
    assert torch.equal(logits(model), want["out"])
    peftc.remove(model)
    assert torch.equal(logits(model), want["base"])
    assert torch.equal(
        inner(torch.ones(1, linear.in_features).double()), linear(torch.ones(1, linear.in_features).double())
    )


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("first", [True, False])
def test_a_parametrized_linear(first: bool) -> None:
    """torch gives it a generated subclass."""
    spec = 'peft 1\nedit o at "model.layers.*.self_attn.o_proj" { h += lora(x, r=2) }'
    model, other = llama(), llama()
    linear, place = model.model.layers[1].self_attn.o_proj, (other.model.layers[1].self_attn.o_proj, "weight")
    if first:
        parametrize.register_parametrization(linear, "weight", Half())
    compiled(model, spec)
    if not first:
        parametrize.register_parametrization(linear, "weight", Half())
    place[0].weight.data /= 2
    base = logits(other)
    compiled(other, spec)
    for one, two in zip(peftc.parameters(other).values(), peftc.parameters(model).values(), strict=True):
        one.data.copy_(two)
    nearly(logits(model), logits(other))  # a Linear with a parametrization is called, and its code not replaced
    with peftc.disabled(model):
        assert torch.equal(logits(model), base)
    nearly(logits(model), logits(other))
    assert torch.equal(logits(peftc.remove(model)), base)
    assert parametrize.is_parametrized(linear)
    parametrize.remove_parametrizations(linear, "weight")
    assert type(linear) is nn.Linear
    assert torch.equal(logits(model), base)


def test_exported_code_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    model[0] = torch.fx.symbolic_trace(model[0])
    with pytest.raises(peftc.PeftcError, match="P427"):
        peftc.compile('peft 1\nedit e at "0" { h += adapter(h, r=2) }', model, sample={"input": torch.ones(2, 3, 4)})
