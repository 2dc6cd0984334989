"""Linears whose weights only the code of their class reads, as those of bitsandbytes: edits beside
them, without any such library.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.models.identity import fingerprint
from tests import zoo
from tests.laws.harness import Before, randomise

LORA = "edit q at layer[*].attn.{q, v} { h += lora(x, r=2) }"
BESIDE = {
    "lora": LORA,
    "vectors": """
        edit k at layer[*].attn.{k, v} { h *= vector(init=1) }
        edit f at layer[*].ffn.hidden { h *= vector(init=1) }""",
    "adapters": """
        edit a at layer[*].ffn { h += adapter(h, r=2) }
        edit p at layer[*].attn { h += adapter(x, r=2) }""",
    "prefix": "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }",
}
WEIGHTS = {
    "low rank": "edit w at layer[*].attn.{q, o} { w += lowrank(r=2) }",
    "magnitude": "edit w at layer[*].attn.{q, o} { w = magnitude(w + lowrank(r=2)) }",
    "beside a state": """
        edit w at layer[*].attn.q { w += lowrank(r=2) }
        edit a at layer[*].attn { h += adapter(h, r=2) }""",
}


class Codes(nn.Parameter):
    """Whole numbers in two columns of half the width, with a scale for each row."""

    scale: Tensor

    def dequantize(self) -> Tensor:
        codes = self.data.to(self.scale.dtype)
        return torch.cat([codes // 16, codes % 16], 1).sub(8) * self.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = memo[id(self)] = type(self)(self.data.clone(), False)
        new.scale = self.scale
        return new


class PackedLinear(nn.Linear):
    """A Linear of 4 bits, whose weight is of half the width."""

    def pack(self, known: bool) -> PackedLinear:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (self.weight.detach() / scale).round().add(8).to(torch.uint8)
        left, right = codes.chunk(2, 1)
        self.scale, self.known = scale, known
        weight: Any = (Codes if known else nn.Parameter)(left * 16 + right, requires_grad=False)
        weight.scale = scale
        self.weight = weight
        return self

    def forward(self, input: Tensor) -> Tensor:
        if int(self.weight[0, 0]) < 0:  # what a tensor without data cannot answer
            raise ValueError
        weight: Any = self.weight
        return F.linear(input, Codes.dequantize(weight), self.bias)


def packed(name: str = "llama", known: bool = True) -> Any:
    model = zoo.build(name, torch.float64)
    layers: Any = model.get_submodule("model.layers" if name == "llama" else "bert.encoder.layer")
    for module in layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear
            module.pack(known)  # pyright: ignore
    return model


def unpacked(name: str = "llama") -> Any:
    model = packed(name)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            weight: Any = module.weight
            module.weight = nn.Parameter(weight.dequantize())
            module.__class__ = nn.Linear
            del module.scale, module.known
    return model


def output(model: Any, name: str = "llama") -> Tensor:
    return model(**zoo.inputs(name, model))[0]


def nearly(value: Any, expected: Any) -> None:
    """Equal but for rounding: products of plain Linears are summed up in another order."""
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def spec(text: str) -> str:
    return f"peft 2\n{text}"


EVERY = {**BESIDE, **WEIGHTS}
CASES = [("llama", key) for key in EVERY] + [("bert", key) for key in ("lora", "magnitude")]  # these have biases


@pytest.mark.parametrize(("name", "key"), CASES)
def test_edits_are_those_of_the_unpacked_model(name: str, key: str, tmp_path: Path) -> None:
    text = EVERY[key]
    model, plain = packed(name), unpacked(name)
    before, base = Before.of(model), output(model, name)
    assert peftc.plan(spec(text), model).model.parameters == peftc.plan(spec(text), plain).model.parameters
    for one in (model, plain):
        peftc.compile(spec(text), one, seed=0)
        randomise(peftc.parameters(one))
        output(one, name).pow(2).sum().backward()
    nearly(output(model, name), output(plain, name))
    assert (output(model, name) - base).abs().max() > 1e-3
    gradients = peftc.parameters(plain)
    for key, parameter in peftc.parameters(model).items():
        nearly(parameter.grad, gradients[key].grad)
    assert torch.equal(output(copy.deepcopy(model), name), output(model, name))
    with peftc.disabled(model):
        assert torch.equal(output(model, name), base)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, packed(name))
    assert torch.equal(output(again, name), output(model, name))
    peftc.remove(model)
    before.assert_same(model)
    assert torch.equal(output(model, name), base)


@pytest.mark.parametrize("text", [BESIDE["adapters"], WEIGHTS["magnitude"]], ids=["h", "w"])
def test_verification(text: str) -> None:
    assert peftc.compile(spec(text), packed(), seed=0, verify=True)


def test_several_specs_and_copies_of_an_analysis() -> None:
    """The second analysis is of a copy whose edits are taken out."""
    model, plain = packed(), unpacked()
    for one in (model, plain):
        for text in (LORA, BESIDE["adapters"]):
            peftc.compile(spec(text), one, seed=0)
        one.model.layers[0].mlp.act_fn = nn.GELU()  # makes the first analysis invalid
        peftc.compile(spec(WEIGHTS["low rank"]), one, seed=0)
        randomise(peftc.parameters(one))
    nearly(output(model), output(plain))


def test_an_adapter_of_the_packed_base_fits_the_whole_one(tmp_path: Path) -> None:
    model = peftc.compile(spec(LORA), packed(), seed=0)
    randomise(peftc.parameters(model))
    peftc.save(model, tmp_path)
    assert fingerprint(packed()) == fingerprint(unpacked())
    plain = peftc.load(tmp_path, unpacked())  # without a warning
    nearly(output(plain), output(model))
    peftc.fold(plain)
    torch.testing.assert_close(output(plain), output(model))


def test_weights_that_nothing_unpacks() -> None:
    """Edits beside them act; edits of them, or first values by them, are refused."""
    model = packed(known=False)
    before, base = Before.of(model), output(model)
    for text in WEIGHTS.values():
        with pytest.raises(peftc.PeftcError, match=r"P437[\s\S]*q_proj.weight` is packed \(Parameter of uint8\)"):
            peftc.compile(spec(text), model, seed=0)
        before.assert_same(model)
    peftc.compile(spec(LORA), model, seed=0)
    randomise(peftc.parameters(model))
    assert (output(model) - base).abs().max() > 1e-3


def test_packed_weights_are_neither_trained_nor_folded_into() -> None:
    model = packed()
    with pytest.raises(peftc.PeftcError, match="P542"):
        peftc.compile(spec("train e = [w] at layer[*].attn.q"), model)
    peftc.compile(spec(f"{LORA}\nedit n at layer[*].norm {{ h *= vector(init=1) }}"), model, seed=0)
    randomise(peftc.parameters(model))
    want = output(model)
    report = peftc.fold(model, dequantize=True)
    assert [(one.edit, "is packed" in one.reason) for one in report.refused if one.edit == "q"] == [("q", True)]
    torch.testing.assert_close(output(model), want)


def test_repacked_weights_are_said_to_have_no_backward() -> None:
    model = packed()
    vars(model.model.layers[1].mlp.up_proj)["support_avx512bf16_for_cpu"] = True
    with pytest.warns(peftc.PeftcWarning, match=r"P438[\s\S]*layers.1.mlp.up_proj"):
        peftc.compile(spec(LORA), model, seed=0)
