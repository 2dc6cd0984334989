"""Products with a parameter itself: no module adds the bias, and a fold must not lose one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import peftc
from peftc.folding import FoldReport
from tests.layers import Layers

D = 8


class Block(nn.Module):
    """`bias`: "joined" of a parameter, a buffer and zeros, as BEiT's, "scaled" before that, or
    "none"; "zeroed" rows of a copy, as Swin v2's, or "doubled" ones.
    """

    def __init__(self, bias: str) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False)
        self.v_bias, self.proj = nn.Parameter(torch.randn(D)), nn.Linear(D, D)
        self.bias, self.qkv_bias = bias, nn.Parameter(torch.randn(3 * D))
        self.register_buffer("k_bias", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        v_bias = 2 * self.v_bias if self.bias == "scaled" else self.v_bias
        bias = torch.cat((torch.zeros_like(v_bias), self.k_bias, v_bias)) if self.bias != "none" else None
        if self.bias in ("zeroed", "doubled"):
            bias = self.qkv_bias.clone()
            bias[D : 2 * D].zero_()
            bias[:2].fill_(value=0)
            bias[2:D] = 0
            if self.bias == "doubled":
                bias[2 * D :].mul_(2)
        q, k, v = F.linear(self.norm(x), weight=self.qkv.weight, bias=bias).chunk(3, dim=-1)
        return x + self.proj(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


def fold_with_values(model: nn.Module, x: torch.Tensor) -> FoldReport:
    """Draws the edits' parameters and folds; what the model computes must stay."""
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.randn_like(parameter))
        before = model(x)
        report = peftc.fold(model)
        torch.testing.assert_close(model(x), before)
    return report


@pytest.mark.parametrize(
    ("bias", "equation", "folds"),
    [
        ("joined", "h *= vector(init=1)", True),
        ("joined", "h += vector(init=0)", True),
        ("joined", "b += vector(init=0)  h *= vector(init=1)", True),
        ("scaled", "h *= vector(init=1)", False),
        ("scaled", "h += vector(init=0)", False),
        ("scaled", "h += lora(x, r=2)", True),
        ("joined", "h += lora(x, r=2)", True),
        ("joined", "w += lowrank(r=2)", True),
        ("zeroed", "h *= vector(init=1)", True),
        ("zeroed", "b += vector(init=0)  h *= vector(init=1)", True),
        ("doubled", "h *= vector(init=1)", False),
        ("doubled", "h += vector(init=0)", False),
        ("none", "h *= vector(init=1)", True),
        ("none", "h += vector(init=0)", False),
    ],
)
def test_a_fold_keeps_what_the_code_adds(bias: str, equation: str, folds: bool) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 5, D), Layers(Block(bias), Block(bias)).eval()
    peftc.compile(f"peft 1\nedit e at layer[*].attn.v {{ {equation} }}", model, seed=0, sample={"x": x})
    report = fold_with_values(model, x)
    assert bool(report.folded) is folds


@pytest.mark.parametrize("entry", [0.0, 1.0])
@pytest.mark.parametrize(("equation", "scales"), [("h *= vector(init=1)", True), ("h += lora(x, r=2)", False)])
def test_a_fold_relies_on_zeros_of_a_buffer(equation: str, scales: bool, entry: float) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 5, D), Layers(Block("joined"), Block("joined")).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("k_bias"):
            buffer.fill_(entry)
    peftc.compile(f"peft 1\nedit e at layer[*].attn.k {{ {equation} }}", model, seed=0, sample={"x": x})
    report = fold_with_values(model, x)
    assert bool(report.folded) is (entry == 0 or not scales)
    assert all("no fold changes a buffer" in one.reason for one in report.refused)


NORMS: dict[str, Any] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": spectral_norm,
}


def normed(name: str) -> Layers:
    torch.manual_seed(0)
    model = Layers(Block("none"), Block("none")).eval()
    for layer in model.layers:
        layer.proj = NORMS[name](layer.proj)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", NORMS)
def test_a_fold_sets_what_a_weight_is_computed_from(name: str) -> None:
    """W = g v / |v| has g and v for every W. A matrix of spectral norm 1 has nothing for most: a
    plain weight takes the place of the norm, also in training, where its power iteration ends.
    """
    x, model = torch.randn(2, 5, D), normed(name)
    names, plain = [*model.state_dict()], [*Layers(Block("none"), Block("none")).state_dict()]
    peftc.compile("peft 1\nedit e at layer[*].attn.o { h += lora(x, r=2) }", model, seed=0, sample={"x": x})
    assert fold_with_values(model, x).folded
    assert sorted(model.state_dict()) == sorted(plain if "spectral" in name else names)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(model.train()(x), expected)
    model.load_state_dict(copy.deepcopy(model).state_dict())


@pytest.mark.parametrize("name", ["spectral norm", "spectral norm by a hook"])
def test_a_norm_stays_while_edits_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module keeps the norm where an edit stays, and after an error."""
    x, model = torch.randn(2, 5, D), normed(name)
    state, classes = copy.deepcopy(model.state_dict()), list(map(type, model.modules()))
    text = "peft 1\nedit e at layer[*].attn.o { h += lora(x, r=2) }\nedit f at layer[*].attn { h += adapter(h, r=2) }"
    peftc.compile(text, model, seed=0, sample={"x": x})
    assert [one.edit for one in fold_with_values(model, x).refused] == ["e", "f"]
    peftc.remove(model)
    peftc.compile(text.partition("\nedit f")[0], model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)

    def fail(self: object, name: str, parameter: object) -> None:
        raise ZeroDivisionError(name)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "register_parameter", fail)
        with pytest.raises(ZeroDivisionError):
            peftc.fold(model)
    peftc.remove(model)
    assert list(map(type, model.modules())) == classes
    assert [*model.state_dict()] == [*state]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(model(x), normed(name)(x))


@pytest.mark.parametrize("name", ["spectral norm", "spectral norm by a hook"])
def test_a_fold_does_not_iterate(name: str) -> None:
    """Of a model in training mode the weight is folded that evaluation uses."""
    x, model = torch.randn(2, 5, D), normed(name)
    peftc.compile("peft 1\nedit e at layer[*].attn.o { h += lora(x, r=2) }", model, seed=0, sample={"x": x})
    expected = model.eval()(x)
    peftc.fold(model.train())
    torch.testing.assert_close(model.eval()(x), expected)
