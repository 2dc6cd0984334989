"""Window attention: the prefix is joined to the keys of each window, with heads before or after
windows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.dataflow.einsum import expand_labels
from tests.layers import Layers

D, H = 8, 2
functional: Any = nn.functional
TEXT = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=3), kv) }"


class Layer(nn.Module):
    def __init__(self, windows: int, how: str) -> None:
        super().__init__()
        self.windows, self.how = windows, how
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.windows, -1, H, D // H)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "heads first":
            q, k, v = (y.permute(0, 3, 1, 2, 4) for y in (q, k, v))
            return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).permute(0, 2, 3, 1, 4)
        if self.how == "windows first":
            q, k, v = (y.transpose(2, 3) for y in (q, k, v))
            return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(2, 3)
        if self.how == "dots":
            weights = torch.einsum("...qhd,...khd->...hqk", q, k).softmax(-1)
            return torch.einsum("...hqk,...khd->...qhd", weights, v)
        weights = torch.einsum("bnqhd,bnkhd->bnhqk", q, k).softmax(-1)
        return torch.einsum("bnhqk,bnkhd->bnqhd", weights, v)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(*(self.heads(p(x)) for p in (self.q, self.k, self.v)))
        x = x + self.o(mixed.reshape(x.shape))
        return x + self.down(self.up(x).relu())


def stack(windows: int, how: str) -> Layers:
    return Layers(Layer(windows, how), Layer(windows, how))


def with_prefix(windows: int, how: str, state: dict[str, Any], x: Tensor) -> nn.Module:
    model = stack(windows, how)
    model.load_state_dict(state)
    return peftc.compile(TEXT, model.eval(), seed=0, sample={"x": x})


@pytest.mark.parametrize("how", ["heads first", "windows first", "dots", "labels"])
def test_each_window_attends_to_the_prefix(how: str) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(2, 8, D), stack(1, how).state_dict()
    windows, plain = with_prefix(2, how, state, x), with_prefix(1, "dots", state, x[:, :4])
    expected = torch.cat([plain(x[:, :4]), plain(x[:, 4:])], 1)
    torch.testing.assert_close(windows(x), expected)
    assert not torch.equal(peftc.remove(windows)(x), expected)


class Twice(Layer):
    """Two parallel attentions, each with a softmax of its own."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, k, v) + super().mix(q, k, v)


def test_parallel_attentions_share_a_prefix() -> None:
    torch.manual_seed(0)
    x, state = torch.randn(2, 4, D), stack(1, "dots").state_dict()
    twice = stack(1, "dots")
    twice.layers = nn.ModuleList([Twice(1, "dots"), Twice(1, "dots")])
    twice.load_state_dict(state)
    peftc.compile(TEXT, twice.eval(), seed=0, sample={"x": x})
    doubled = {n: 2 * t if n.endswith("o.weight") else t for n, t in state.items()}
    torch.testing.assert_close(twice(x), with_prefix(1, "dots", doubled, x)(x))


class Scaled(Layer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q * (D // H) ** -0.5, k, v)


class FunctionalLinears(Layer):
    """Passes the weights of its Linears to `F.multi_head_attention_forward`, and their biases as
    slices of one tensor.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        bias = torch.cat((self.q.bias, self.k.bias, self.v.bias))
        mixed, _ = functional.multi_head_attention_forward(
            *(y, y, y, D, H, torch.empty([0]), bias, None, None, False, 0.0, self.o.weight, self.o.bias),
            use_separate_proj_weight=True,
            **{f"{name}_proj_weight": self.get_submodule(name).weight for name in "qkv"},
        )
        x = x + mixed.transpose(0, 1)
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "peft 1\nedit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }",
        "peft 1\nedit w at layer[*].attn.q { w += lowrank(r=2) }",
        "peft 1\nedit b at layer[*].attn.k { b += vector(init=1) }",
    ],
)
def test_linears_used_by_their_parameters_only(text: str) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(2, 4, D), stack(1, "dots").state_dict()
    plain, parameter_user = stack(1, "dots"), stack(1, "dots")
    plain.layers = nn.ModuleList([Scaled(1, "dots"), Scaled(1, "dots")])
    parameter_user.layers = nn.ModuleList([FunctionalLinears(1, ""), FunctionalLinears(1, "")])
    for model in (plain, parameter_user):
        model.load_state_dict(state)
        peftc.compile(text, model.eval(), seed=0, sample={"x": x})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in peftc.parameters(plain).items():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            peftc.parameters(parameter_user)[name].copy_(parameter)
    torch.testing.assert_close(parameter_user(x), plain(x))


class MaskedSoftmax(torch.autograd.Function):
    """A model's own autograd function. `visible_value`: the mask value of visible keys."""

    visible_value = 1.0

    @classmethod
    def forward(cls, ctx: Any, scores: Tensor, mask: Tensor) -> Tensor:
        weights = scores.masked_fill(mask != cls.visible_value, -1e9).softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * (gradients[0] - (gradients[0] * weights).sum(-1, keepdim=True)), None


class HidingSoftmax(MaskedSoftmax):
    visible_value = 0.0


masked_softmax = MaskedSoftmax.apply  # as modules keep it: bound before any trace


class Masked(Layer):
    def __init__(self, function: type[MaskedSoftmax]) -> None:
        super().__init__(1, "")
        self.function = function
        self.call: Any = masked_softmax if function is MaskedSoftmax else function.apply

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y[:, 0].transpose(1, 2) for y in (q, k, v))
        mask = torch.zeros_like(q[..., 0]).unsqueeze(-2) + self.function.visible_value
        return (self.call(q @ k.transpose(-1, -2), mask) @ v).transpose(1, 2)


@pytest.mark.parametrize("function", [MaskedSoftmax, HidingSoftmax])
def test_prefix_keys_are_visible_to_a_masked_softmax(function: type[MaskedSoftmax]) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(2, 4, D), stack(1, "dots").state_dict()
    plain, masked = with_prefix(1, "dots", state, x), stack(1, "dots")
    masked.layers = nn.ModuleList([Masked(function), Masked(function)])
    masked.load_state_dict(state)
    peftc.compile(TEXT, masked.eval(), seed=0, sample={"x": x})
    torch.testing.assert_close(masked(x), plain(x))
    for model in (plain, masked):
        model(x).sum().backward()
    for name, parameter in peftc.parameters(plain).items():
        torch.testing.assert_close(peftc.parameters(masked)[name].grad, parameter.grad)


def test_the_labels_of_an_einsum() -> None:
    assert expand_labels("...qhd,khd->...hqk", [5, 3]) == (["01qhd", "khd"], "01hqk")
    assert expand_labels("ab, cb -> ac", [2, 2]) == (["ab", "cb"], "ac")
