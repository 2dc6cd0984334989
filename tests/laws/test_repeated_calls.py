"""A module that its layer calls several times: an edit of it acts at each call, and folds."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc import PeftcError
from tests.layers import Attention, Layers, Network

D, R = 8, 2
functional: Any = nn.functional


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Positions(nn.Module):
    """The keys' Linear computes keys of positions, too, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.table, self.network = nn.Parameter(torch.randn(1, 5, D)), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        bias = q @ heads(self.k(self.table)).mT
        mixed = torch.softmax(q @ k.mT + bias, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.network(x)


class Context(nn.Module):
    """Keys and values, in one Linear, of tokens and of a context, as in Perceiver AR."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o, self.network = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        pairs = [self.kv(x).chunk(2, -1), self.kv(x.roll(1, 1).tanh()).chunk(2, -1)]
        k, v = (heads(torch.cat(part, 1)) for part in zip(*pairs, strict=True))
        mixed = functional.scaled_dot_product_attention(heads(self.q(x)), k, v)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.network(x)


class Again(nn.Module):
    """Both sub-layers, and their norm, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.network, self.norm = Attention(D), Network(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.attention(self.norm(x))
            x = x + self.network(self.norm(x))
        return x


def stack(layer: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Layers(layer(), layer()).double().eval()


SAMPLE = {"x": torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
# a layer, a selector below it, the module, and which rows of its weight the site is
CASES: list[tuple[type[nn.Module], str, str, slice]] = [
    (Positions, "attn.k", "k", slice(0, D)),
    (Context, "attn.k", "kv", slice(0, D)),
    (Context, "attn.v", "kv", slice(D, 2 * D)),
    (Again, "attn.q", "attention.q", slice(0, D)),
    (Again, "attn.o", "attention.o", slice(0, D)),
    (Again, "ffn.up", "network.up", slice(0, 2 * D)),
]
IDS = [f"{layer.__name__}-{site}" for layer, site, _, _ in CASES]


def drawn(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(peftc.parameters(model).items()):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def edited(layer: type[nn.Module], text: str) -> tuple[nn.Module, nn.Module]:
    """A base, and a compiled copy with drawn parameters."""
    base = stack(layer)
    model = peftc.compile(f"peft 1\n{text}", copy.deepcopy(base), sample=SAMPLE, seed=0)
    assert torch.equal(model(**SAMPLE), base(**SAMPLE))
    drawn(model)
    return base, model


@pytest.mark.parametrize(("layer", "site", "module", "rows"), CASES, ids=IDS)
def test_a_low_rank_edit_is_one_of_the_weight(layer: type[nn.Module], site: str, module: str, rows: slice) -> None:
    base, model = edited(layer, f"edit e at layer[*].{site} {{ h += lora(x, r={R}) }}")
    values = {name.rpartition("/")[2]: [] for name in peftc.parameters(model)}
    for name, value in sorted(peftc.parameters(model).items()):
        values[name.rpartition("/")[2]].append(value.detach())
    assert [len(v) for v in values.values()] == [2, 2]  # one set of parameters in each layer
    for i, linear in enumerate(base.get_submodule(f"layers.{i}.{module}") for i in range(2)):
        assert isinstance(linear, nn.Linear)
        with torch.no_grad():
            linear.weight[rows] += values["lora.B"][i] @ values["lora.A"][i]
    expected, actual = base(**SAMPLE), model(**SAMPLE)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**SAMPLE), actual)
    report = peftc.verify(model)
    assert report.ok, str(report)
    peftc.fold(model)
    with pytest.raises(PeftcError, match="P410"):  # nothing is left beside the weights
        peftc.parameters(model)
    torch.testing.assert_close(model(**SAMPLE), expected, atol=1e-12, rtol=0)


def bottleneck(x: Tensor, parameters: list[Tensor]) -> Tensor:
    down, up = parameters
    return torch.relu(x @ down.T) @ up.T


ADAPTER = "r=2, act=relu, bias=false, init=lora"
EQUATIONS: dict[str, tuple[str, Callable[[Tensor, Tensor, list[Tensor]], Tensor]]] = {
    "scale": ("h *= vector(init=1)", lambda x, h, p: h * p[0]),
    "parallel": (f"h += adapter(x, {ADAPTER})", lambda x, h, p: h + bottleneck(x, p)),
    "sequential": (f"h += adapter(h, {ADAPTER})", lambda x, h, p: h + bottleneck(h, p)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize(("layer", "site", "module", "rows"), CASES, ids=IDS)
def test_an_equation_holds_at_each_call(
    layer: type[nn.Module], site: str, module: str, rows: slice, equation: str
) -> None:
    text, function = EQUATIONS[equation]
    base, model = edited(layer, f"edit e at layer[*].{site} {{ {text} }}")
    for i in range(2):
        own = [p for name, p in sorted(peftc.parameters(model).items()) if f"layer[{i}]" in name]

        def hook(_: nn.Module, args: Any, result: Tensor, own: list[Tensor] = own) -> Tensor:
            part = function(args[0], result[..., rows], own)
            return torch.cat([result[..., : rows.start], part, result[..., rows.stop :]], -1)

        base.get_submodule(f"layers.{i}.{module}").register_forward_hook(hook)
    expected, actual = base(**SAMPLE), model(**SAMPLE)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    parameters = list(peftc.parameters(model).values())
    one, other = (torch.autograd.grad(y.square().sum(), parameters) for y in (expected, actual))
    torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    plan = peftc.plan(f"peft 1\nedit e at layer[*].{site} {{ {text} }}", stack(layer), sample=SAMPLE)
    assert plan.edits[0].foldable == (equation == "scale")
    peftc.remove(model)
    assert torch.equal(model(**SAMPLE), stack(layer)(**SAMPLE))


class Bare(Positions):
    """The keys' matrix is a parameter that code multiplies by, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(x @ self.k), heads(self.v(x))
        mixed = torch.softmax(q @ k.mT + q @ heads(self.table @ self.k).mT, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.network(x)


class Flat(Positions):
    """Positions without a dimension of examples."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        bias = q @ self.k(self.table[0]).unflatten(-1, (2, -1)).transpose(0, 1).mT
        mixed = torch.softmax(q @ k.mT + bias, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.network(x)


REFUSALS: list[tuple[type[nn.Module], str, str]] = [
    (Again, "edit e at layer[*].attn.self[0].q { h += lora(x, r=2) }", "P211"),
    (Again, "edit e at layer[*].ffn[1].hidden { h *= vector(init=1) }", "P211"),
    (Bare, "edit e at layer[*].attn.k { h += lora(x, r=2) }", "P218"),
    (Flat, "edit e at layer[*].attn.k per task { h += lora(x, r=2) }", "P219"),
    (Flat, "edit e at layer[*].attn.k { h += gate(x) * lora(x, r=2) }", "P219"),
    (Positions, "edit e at layer[*].attn.k { h += reft(x, r=2, first=2) }", "P219"),
]


@pytest.mark.parametrize(("layer", "text", "code"), REFUSALS, ids=[f"{c}-{i}" for i, (_, _, c) in enumerate(REFUSALS)])
def test_what_has_no_meaning_at_each_use_is_refused(layer: type[nn.Module], text: str, code: str) -> None:
    model = stack(layer)
    with pytest.raises(PeftcError, match=code):
        peftc.compile(f"peft 1\n{text}", model, sample=SAMPLE)
    assert type(model.get_submodule("layers.0")) is layer


def test_edits_of_what_down_reads_at_one_call_and_at_each_are_refused() -> None:
    text = "edit z at layer[*].ffn[0] { z *= 2 }\nedit hidden at layer[*].ffn.hidden { h *= vector(init=1) }"
    with pytest.raises(PeftcError, match="P216"):
        peftc.compile(f"peft 1\n{text}", stack(Again), sample=SAMPLE)


@pytest.mark.parametrize(("site", "version"), [("attn.q", "1.3"), ("ffn.hidden", "1.2"), ("attn.self[0]", "1.2")])
def test_an_adapter_of_an_earlier_meaning_is_refused(site: str, version: str, tmp_path: Path) -> None:
    _, model = edited(Again, f"edit e at layer[*].{site} {{ h *= vector(init=1) }}")
    peftc.save(model, tmp_path)
    metadata = tmp_path / "adapter.json"
    description = json.loads(metadata.read_text())
    assert description["format_version"] == "1.5", "it has the text of `vector`"
    assert torch.equal(peftc.load(tmp_path, stack(Again), sample=SAMPLE)(**SAMPLE), model(**SAMPLE))
    metadata.write_text(json.dumps(description | {"format_version": "1.2"}))
    if version == "1.2":
        peftc.load(tmp_path, stack(Again), sample=SAMPLE)
        return
    with pytest.raises(PeftcError, match="P567"):
        peftc.load(tmp_path, stack(Again), sample=SAMPLE)
