"""`train` of a tied parameter: the selector names every use in layers, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM, LlamaModel

import peftc
from peftc import PeftcError

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
IDS = torch.arange(10).reshape(2, 5)


def build(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = {
        "llama": lambda: LlamaModel(LlamaConfig(**SIZES, num_hidden_layers=3)),
        "bert": lambda: BertModel(BertConfig(**SIZES, num_hidden_layers=3)),
        "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=3)),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.double().eval()


def one_module(first: tuple[nn.Module, str], second: tuple[nn.Module, str], parameter: str) -> None:
    setattr(*second, first[0].get_submodule(first[1]))


def one_parameter(first: tuple[nn.Module, str], second: tuple[nn.Module, str], parameter: str) -> None:
    setattr(second[0].get_submodule(second[1]), parameter, first[0].get_submodule(first[1]).get_parameter(parameter))


def one_storage(first: tuple[nn.Module, str], second: tuple[nn.Module, str], parameter: str) -> None:
    value = first[0].get_submodule(first[1]).get_parameter(parameter)
    setattr(second[0].get_submodule(second[1]), parameter, nn.Parameter(value.detach()))


# kind of tie, code if one use is named, code if all are
TIES: list[tuple[Callable[..., None], str, str | None]] = [
    (one_module, "P211", None),
    (one_parameter, "P211", None),
    (one_storage, "P212", "P212"),
]
# model, list of layers, module in a layer, its parameter, its site in a layer, state
PARTS = [
    ("llama", "layers", "self_attn.q_proj", "weight", "attn.q", "w"),
    ("llama", "layers", "input_layernorm", "weight", "attn.norm", "w"),
    ("bert", "encoder.layer", "attention.self.query", "bias", "attn.q", "b"),
    ("bert", "encoder.layer", "output.dense", "weight", "ffn.down", "w"),
    ("gpt2", "h", "mlp.c_fc", "weight", "ffn.up", "w"),
]


def holder(model: nn.Module, layers: str, i: int, part: str) -> tuple[nn.Module, str]:
    owner, _, name = f"{layers}.{i}.{part}".rpartition(".")
    return model.get_submodule(owner), name


def output(model: Any) -> Tensor:
    return model(input_ids=IDS).last_hidden_state


def code_of(text: str, model: nn.Module) -> str | None:
    try:
        peftc.plan(text, model)
    except PeftcError as error:
        (diagnostic,) = error.diagnostics
        assert diagnostic.span is not None
        return diagnostic.code
    return None


@pytest.mark.parametrize(("name", "layers", "part", "parameter", "path", "state"), PARTS)
@pytest.mark.parametrize(("tie", "one", "every"), TIES)
def test_all_uses_are_named_or_none(
    tie: Callable[..., None],
    one: str,
    every: str | None,
    name: str,
    layers: str,
    part: str,
    parameter: str,
    path: str,
    state: str,
) -> None:
    model = build(name)
    split = copy.deepcopy(model)
    tie(holder(model, layers, 0, part), holder(model, layers, 1, part), parameter)
    assert code_of(f"peft 1\ntrain t = [{state}] at layer[2].{path}", model) is None
    before = {n: p.clone() for n, p in model.named_parameters()}
    for i in (0, 1):
        text = f"peft 1\ntrain t = [{state}] at layer[{i}].{path}"
        assert code_of(text, model) == one
        assert code_of(f"peft 1\ntrain t = [{state}] at layer[{i}, 2].{path}", model) == one
        with pytest.raises(PeftcError, match=one):
            peftc.compile(text, model)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    both = f"peft 1\ntrain t = [{state}] at layer[0, 1].{path}"
    assert code_of(both, model) == code_of(both.replace("0, 1", "*"), model) == every
    by_name = f'peft 1\ntrain t = [{state}] at "{layers}.0.{part}" | "{layers}.1.{part}"'
    assert code_of(by_name, model) == every
    if every is not None:
        return
    first, second = (split.get_submodule(f"{layers}.{i}.{part}") for i in (0, 1))
    second.load_state_dict(first.state_dict())
    if tie is one_parameter:
        split.get_submodule(f"{layers}.1.{part}").load_state_dict(
            model.get_submodule(f"{layers}.1.{part}").state_dict()
        )
    peftc.compile(both, model)
    (trained,) = peftc.parameters(model).values()
    assert trained.numel() == first.get_parameter(parameter).numel() == peftc.plan(both, model).totals.trained
    for m in (model, split):
        output(m).pow(2).sum().backward()
    mine, others = trained.grad, [m.get_parameter(parameter).grad for m in (first, second)]
    assert mine is not None
    assert torch.allclose(mine, torch.stack([g for g in others if g is not None]).sum(0), rtol=1e-9, atol=1e-9)


def test_the_message_says_what_to_name() -> None:
    model = build("llama")
    model.layers[1].self_attn.k_proj.weight = model.layers[0].self_attn.q_proj.weight
    with pytest.raises(PeftcError) as error:
        peftc.plan("peft 1\ntrain t = [w] at layer[0].attn.q", model)
    (diagnostic,) = error.value.diagnostics
    names = ("layers.0.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight")
    assert diagnostic.message == f"`{names[0]}` is one parameter with `{names[1]}`"
    assert diagnostic.help is not None
    selector = diagnostic.help.partition("`at ")[2].removesuffix("`")
    assert peftc.plan(f"peft 1\ntrain t = [w] at {selector}", model).totals.trained == 32 * 32


def test_parts_of_a_parameter() -> None:
    """The fused weight of GPT-2's q, k and v."""
    model = build("gpt2")
    model.h[1].attn.c_attn.weight = model.h[0].attn.c_attn.weight
    rows = "layer[{0}].attn.q | layer[{0}].attn.k | layer[{0}].attn.v"
    assert code_of(f"peft 1\ntrain t = [w] at {rows.format('0')}", model) == "P211"
    assert code_of('peft 1\ntrain t = [w] at "h.0.attn.c_attn"', model) == "P211"
    assert code_of(f"peft 1\ntrain t = [w] at {rows.format('0, 1')}", model) is None


def test_uses_outside_of_the_layers_need_not_be_named() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert peftc.plan("peft 1\ntrain t = [w] at embed", model).totals.trained == 61 * 32
    inner = build("llama")
    inner.norm.weight = inner.layers[1].input_layernorm.weight
    assert code_of("peft 1\ntrain t = [w] at layer[1].attn.norm", inner) is None
    assert code_of("peft 1\ntrain t = [w] at norm", inner) == "P211"
    assert code_of("peft 1\ntrain t = [w] at norm | layer[1].attn.norm", inner) is None


def test_names_that_nothing_reads_need_not_be_named() -> None:
    model = build("llama")
    model.layers[1].spare = nn.Linear(32, 32, bias=False)
    model.layers[1].spare.weight = model.layers[0].self_attn.q_proj.weight
    model.attentions = nn.ModuleList(layer.self_attn for layer in model.layers)
    assert code_of("peft 1\ntrain t = [w] at layer[0].attn.q", model) is None
