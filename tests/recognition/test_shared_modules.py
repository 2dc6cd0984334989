"""A module that several layers share. Named at all of its sites, it gets one set of edit
parameters, which acts at each; else P211.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartModel, BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import peftc
from peftc import PeftcError
from peftc.installation.compiled_model import analyse_base, plan_on
from peftc.planning.report.plan import plain_text, render_plan
from peftc.planning.report.site_tree import render_sites
from peftc.semantics.spec_argument import flat_spec

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LINEAR = "{ h += lora(x, r=2) }"
WEIGHT = "{ w = magnitude(w + lowrank(r=2)) }"
PARALLEL = "{ h += adapter(x, r=3) }"
BEHIND = "{ h = (1 - gate(x)) * h + adapter(h, r=3) }"
ROWS = "{ kv = concat(prefix(len=3), kv) }"
RES = "{ h += adapter(res, r=3) }"


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    bart: dict[str, Any] = {f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in BART.items()}
    model = {
        "llama": lambda: LlamaModel(LlamaConfig(**SIZES, num_hidden_layers=3)),
        "bert": lambda: BertModel(BertConfig(**SIZES, num_hidden_layers=3)),
        "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=3)),
        "bart": lambda: BartModel(BartConfig(vocab_size=61, d_model=32, **bart)),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.double().eval()


BART = {"layers": 3, "attention_heads": 4, "ffn_dim": 48}
# model, list of layers, the module that the first two share, its site in a layer,
# equations
CASES = [
    ("llama", "layers", "self_attn.q_proj", "attn.q", LINEAR),
    ("llama", "layers", "self_attn.q_proj", "attn.q", WEIGHT),
    ("llama", "layers", "self_attn", "attn", ROWS),
    ("llama", "layers", "self_attn", "attn", RES),
    ("llama", "layers", "mlp", "ffn", PARALLEL),
    ("llama", "layers", "mlp", "ffn.hidden", "{ h *= vector(init=1) }"),
    ("llama", "layers", "input_layernorm", "attn.norm", "{ w *= vector(init=1) }"),
    ("bert", "encoder.layer", "attention", "attn", BEHIND),
    ("gpt2", "h", "attn.c_attn", "attn.v", LINEAR),
    ("gpt2", "h", "attn", "attn.q", WEIGHT),
    ("bart", "decoder.layers", "encoder_attn", "attn.cross", BEHIND),
]
IDS = [f"{case[0]}-{case[2]}-{case[4].split('(')[0].strip('{ ')}" for case in CASES]
INPUT = {"input_ids": torch.arange(10).reshape(2, 5)}


def tied(model: nn.Module, layers: str, part: str) -> nn.Module:
    """The model where the second layer reuses this module of the first."""
    first, second = (model.get_submodule(f"{layers}.{i}.{part}") for i in (0, 1))
    owner, _, name = f"{layers}.1.{part}".rpartition(".")
    assert second is not first
    setattr(model.get_submodule(owner), name, first)
    return model


def untied(model: nn.Module, layers: str, part: str) -> nn.Module:
    """A copy where the two are separate modules with equal values."""
    model = copy.deepcopy(model)
    owner, _, name = f"{layers}.1.{part}".rpartition(".")
    setattr(model.get_submodule(owner), name, copy.deepcopy(model.get_submodule(f"{layers}.0.{part}")))
    return model


def output(model: nn.Module) -> torch.Tensor:
    return model(**INPUT).last_hidden_state


def spec(where: str, body: str) -> str:
    return f"peft 1\nedit e at {where} {body}"


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: build(name) for name in ("llama", "bert", "gpt2", "bart")}


@pytest.mark.parametrize(("name", "layers", "part", "path", "body"), CASES, ids=IDS)
def test_one_set_of_parameters_acts_at_each_use(
    models: dict[str, nn.Module], tmp_path: Path, name: str, layers: str, part: str, path: str, body: str
) -> None:
    base = tied(copy.deepcopy(models[name]), layers, part)
    stack = "decoder." if name == "bart" else ""
    text = spec(f"{stack}layer[0, 1].{path}", body)
    shared, split = copy.deepcopy(base), untied(base, layers, part)
    plan = peftc.plan(text, shared)
    peftc.compile(text, shared, seed=0)
    peftc.compile(text, split, seed=0)
    mine, other = peftc.parameters(shared), peftc.parameters(split)
    assert len(other) == 2 * len(mine)
    assert plan.totals.stored == sum(p.numel() for p in mine.values()) == sum(p.numel() for p in other.values()) / 2
    assert [site.path for site in plan.edits[0].sites] == [site.path for site in peftc.plan(text, split).edits[0].sites]
    torch.manual_seed(1)
    pairs = list(zip(mine.values(), other.values(), [*other.values()][len(mine) :], strict=False))
    with torch.no_grad():
        for one, first, second in pairs:
            one.copy_(torch.randn_like(one))
            first.copy_(one)
            second.copy_(one)
    assert float((output(shared) - output(base)).detach().abs().max()) > 1e-3
    assert torch.allclose(output(shared), output(split), rtol=0, atol=1e-10)
    for model in (shared, split):
        output(model).pow(2).sum().backward()
    for one, first, second in pairs:
        assert one.grad is not None
        assert first.grad is not None
        assert second.grad is not None
        assert torch.allclose(one.grad, first.grad + second.grad, rtol=1e-9, atol=1e-9)
    peftc.save(shared, tmp_path)
    again = peftc.load(tmp_path, copy.deepcopy(base))
    assert torch.equal(output(again), output(shared))
    if plan.edits[0].foldable:
        assert peftc.fold(again).folded
        assert torch.allclose(output(again), output(shared), rtol=0, atol=1e-10)
    assert torch.equal(output(peftc.remove(shared)), output(base))


@pytest.mark.parametrize(
    ("name", "layers", "part", "path", "body", "layer"), [(*case, i % 2) for i, case in enumerate(CASES)], ids=IDS
)
def test_some_of_the_sites_are_refused(
    models: dict[str, nn.Module], name: str, layers: str, part: str, path: str, body: str, layer: int
) -> None:
    model = tied(copy.deepcopy(models[name]), layers, part)
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    stack = "decoder." if name == "bart" else ""
    with pytest.raises(PeftcError) as error:
        peftc.compile(text := spec(f"{stack}layer[{layer}].{path}", body), model)
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "P211"
    assert all(f"layer[{i}]" in diagnostic.message for i in (0, 1))
    assert diagnostic.span is not None
    assert text[diagnostic.span.start : diagnostic.span.end] == f"{stack}layer[{layer}].{path}"
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_an_edit_around_a_shared_module_acts_in_its_own_layer(models: dict[str, nn.Module]) -> None:
    """An edit of the attention's output is not an edit of its shared last Linear."""
    base = tied(copy.deepcopy(models["llama"]), "layers", "self_attn.o_proj")
    model, split = copy.deepcopy(base), untied(base, "layers", "self_attn.o_proj")
    for one in (model, split):
        peftc.compile(spec("layer[0].attn", "{ h *= vector(init=1) }"), one, seed=0)
        with torch.no_grad():
            for i, parameter in enumerate(peftc.parameters(one).values()):
                parameter.fill_(0.1 + i / 10)
    assert torch.allclose(output(model), output(split), rtol=0, atol=1e-10)
    assert float((output(model) - output(base)).detach().abs().max()) > 1e-3


def test_an_edit_around_a_shared_module_does_not_fold_into_it(models: dict[str, nn.Module]) -> None:
    model = tied(copy.deepcopy(models["llama"]), "layers", "self_attn.o_proj")
    plan = peftc.plan(spec("layer[*].attn", "{ h *= vector(init=1) }"), model)
    assert not plan.edits[0].foldable
    assert "is tied to" in plan.edits[0].reason


@pytest.mark.parametrize(("part", "path"), [("mlp", "ffn"), ("mlp.up_proj", "ffn.up")])
def test_the_independent_check_edits_each_use(models: dict[str, nn.Module], part: str, path: str) -> None:
    model = tied(copy.deepcopy(models["llama"]), "layers", part)
    peftc.compile(spec(f"layer[*].{path}", "{ h += lora(x, r=2) }"), model, seed=0)
    report = peftc.verify(model)
    assert report.ok, str(report)
    assert report.witnessed == report.sites == 2


def test_names_of_modules_name_the_uses(models: dict[str, nn.Module]) -> None:
    model = tied(copy.deepcopy(models["llama"]), "layers", "self_attn.q_proj")
    plan = peftc.plan(spec('"layers.*.self_attn.q_proj"', LINEAR), model)
    assert plan == peftc.plan(spec("layer[*].attn.q", LINEAR), model).model_copy(update={"spec": plan.spec})
    with pytest.raises(PeftcError, match="P211"):
        peftc.plan(spec('"layers.1.self_attn.q_proj"', LINEAR), model)
    with pytest.raises(PeftcError, match="P211"):
        peftc.plan("peft 1\ntrain e = [w] at layer[1].**", model)


def test_one_linear_in_two_roles(models: dict[str, nn.Module]) -> None:
    """The q of one layer is the k of the next."""
    base: Any = copy.deepcopy(models["llama"])
    base.layers[1].self_attn.k_proj = base.layers[0].self_attn.q_proj
    with pytest.raises(PeftcError, match="P211") as error:
        peftc.plan(spec("layer[*].attn.q", LINEAR), base)
    assert "layer[1].attn.self.k" in str(error.value)
    model = copy.deepcopy(base)
    peftc.compile(spec("layer[0].attn.q | layer[1].attn.k", "{ h += vector(init=2) }"), model)
    assert len(peftc.parameters(model)) == 1
    base.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.full((32,), 2.0, dtype=torch.float64))
    assert torch.allclose(output(model), output(base), rtol=0, atol=1e-10)


class TwiceInALayer(nn.Module):
    """Each layer runs one ffn twice; both layers have the same ffn."""

    class Layer(nn.Module):
        def __init__(self, ffn: nn.Module) -> None:
            super().__init__()
            self.ffn, self.norm = ffn, nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.ffn(self.norm(x))
            return x + self.ffn(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        ffn = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.layers = nn.ModuleList(self.Layer(ffn) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_shared_module_called_twice_has_parameters_for_each_call() -> None:
    torch.manual_seed(0)
    base, x = TwiceInALayer().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    model = copy.deepcopy(base)
    peftc.compile(spec("layer[*].ffn[1]", "{ h += vector(init=1) }"), model, sample={"x": x})
    assert list(peftc.parameters(model)) == ["e/encoder.layer[0].ffn[1]/vector.scale"]
    want = x
    for layer in base.layers:
        want = want + layer.ffn(layer.norm(want))
        want = want + layer.ffn(layer.norm(want)) + 1
    assert torch.allclose(model(x), want, rtol=0, atol=1e-10)
    both = peftc.plan(spec("layer[*].ffn", "{ h += vector(init=1) }"), base, sample={"x": x})
    assert both.totals.stored == 2 * 8
    with pytest.raises(PeftcError, match="P211"):
        peftc.plan(spec("layer[0].ffn", "{ h += vector(init=1) }"), base, sample={"x": x})


def test_a_shared_module_that_is_also_called_outside_the_layers(models: dict[str, nn.Module]) -> None:
    model: Any = copy.deepcopy(models["llama"])
    model.norm = model.layers[2].post_attention_layernorm
    with pytest.raises(PeftcError) as error:
        peftc.plan(spec("layer[*].ffn.norm", "{ w *= vector(init=1) }"), model)
    assert error.value.diagnostics[0].code == "P211"
    assert '"norm"' in str(error.value)
    plan = peftc.plan(spec('layer[2].ffn.norm | "norm"', "{ w *= vector(init=1) }"), model)
    assert plan.totals.stored == 32


def test_unused_names_of_a_shared_module_are_ignored(models: dict[str, nn.Module]) -> None:
    model: Any = copy.deepcopy(models["llama"])
    model.attentions = nn.ModuleList(layer.self_attn for layer in model.layers)
    assert peftc.sites(model).shared_modules == ()
    peftc.plan(spec("layer[1].attn.q", LINEAR), model)


def test_edits_of_and_inside_a_shared_module_are_refused(models: dict[str, nn.Module]) -> None:
    """In layer 0 both edits would be in the layer's code, in layer 1 one of them in the shared
    attention.
    """
    model = tied(copy.deepcopy(models["bert"]), "encoder.layer", "attention")
    classes = [type(m) for m in model.modules()]
    both = f"edit a at layer[0, 1].attn {BEHIND}"
    with pytest.raises(PeftcError, match="P213"):
        peftc.compile(f"peft 1\n{both}\nedit b at layer[0].attn.add {{ h *= vector(init=1) }}", model)
    assert [type(m) for m in model.modules()] == classes
    peftc.compile("peft 1\nedit b at layer[0].attn.add { h *= vector(init=2) }", model)
    split = untied(tied(copy.deepcopy(models["bert"]), "encoder.layer", "attention"), "encoder.layer", "attention")
    peftc.compile("peft 1\nedit b at layer[0].attn.add { h *= vector(init=2) }", split)
    assert torch.equal(output(model), output(split))


def test_plan_and_table_show_shared_modules(models: dict[str, nn.Module]) -> None:
    model = tied(copy.deepcopy(models["llama"]), "layers", "mlp")
    assert "one module: layers.0.mlp, layers.1.mlp" in plain_text(render_sites(peftc.sites(model), 200), 200)
    plan = plan_on(analyse_base(model), flat_spec(spec("layer[*].ffn", PARALLEL)))
    assert "once for  decoder.layer[0].ffn and decoder.layer[1].ffn" in plain_text(
        render_plan(plan.plan, plan.site_edits), 200
    )


class Guest(nn.Module):
    """Calls a module of another layer, held in a list."""

    def __init__(self, own: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.own, self.other = own, [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) + self.other[0](x)


def test_a_module_that_another_layer_calls_by_a_reference() -> None:
    model: Any = build("llama")
    first, second, _ = model.layers
    second.self_attn.o_proj = Guest(second.self_attn.o_proj, first.self_attn.q_proj)
    for site in ("layer[0].attn.q", "layer[*].attn.q"):
        with pytest.raises(PeftcError, match=r"P211.*`layers\.0\.self_attn\.q_proj`.*is called by `layers\.1`"):
            peftc.plan(f"peft 1\nedit e at {site} {LINEAR}\n", model)
    for site in ("layer[1..].attn.q", "layer[*].attn.v"):
        peftc.plan(f"peft 1\nedit e at {site} {LINEAR}\n", model)
