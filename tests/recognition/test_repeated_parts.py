"""Loops whose iterations call a part several times: each call has sites of its own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.recognition.test_layer_lists import Attention, D, Ffn

SAMPLE = {"x": torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


class Universal(nn.Module):
    """Universal Transformer: one layer, which the model's own loop calls again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 3
        self.attn, self.ffn = Attention(), Ffn()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = x + self.attn(x)
            x = x + self.ffn(x)
        return x


class Regions(nn.Module):
    """RegionViT: each iteration calls its attention twice, once on other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.LayerNorm(D), Attention(), Ffn()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, attn, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + attn(norm(x))
            y = torch.cat((x[:, :1], x), 1)
            y = y + attn(norm(y))
            y = y + ffn(y)
            x = y[:, 1:]
        return x


# a model, its layers, the attentions of one, and the calls of one in a forward
CASES: list[tuple[Callable[[], nn.Module], int, list[str], int]] = [
    (Universal, 1, ["attn"], 3),
    (Regions, 2, ["layers.0.1", "layers.1.1"], 2),
]


def built(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return build().double().eval()


def drawn(model: nn.Module) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    parameters = dict(sorted(peftc.parameters(model).items()))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return parameters


@pytest.mark.parametrize(("build", "layers", "attentions", "calls"), CASES)
def test_each_call_has_sites(build: Callable[[], nn.Module], layers: int, attentions: list[str], calls: int) -> None:
    table = peftc.sites(built(build), sample=SAMPLE)
    assert not table.untraced
    attns = [(site.path.partition(".attn")[0], site.module) for site in table.sites if site.steps[-1][0] == "self"]
    assert [module for _, module in attns] == [name for name in attentions for _ in range(calls)]
    assert len({path for path, _ in attns}) == layers


@pytest.mark.parametrize(("build", "layers", "attentions", "calls"), CASES)
def test_an_edit_of_a_sub_layer_acts_at_its_call(
    build: Callable[[], nn.Module], layers: int, attentions: list[str], calls: int
) -> None:
    """h + up(relu(down h)), with parameters of its own at each call, as forward hooks add them."""
    base = built(build)
    spec = "peft 1  edit e at layer[*].attn { h += adapter(h, r=2, bias=false) }"
    model = peftc.compile(spec, deepcopy(base), sample=SAMPLE, seed=0)
    parameters = drawn(model)
    names = sorted({name.rpartition(".")[0] for name in parameters})
    assert len(names) == layers * calls
    own = [[n for n in names if f"layer[{i}]" in n] for i in range(layers)]

    def hook(index: int) -> Callable[..., Tensor]:
        pending = list(own[index])

        def add(_: nn.Module, _inputs: Any, h: Tensor) -> Tensor:
            name = pending.pop(0)
            return h + torch.relu(h @ parameters[f"{name}.down"].T) @ parameters[f"{name}.up"].T

        return add

    for i, name in enumerate(attentions):
        base.get_submodule(name).register_forward_hook(hook(i))
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("build", "layers", "attentions", "calls"), CASES)
def test_an_edit_of_a_linear_is_one_of_its_weight(
    build: Callable[[], nn.Module], layers: int, attentions: list[str], calls: int
) -> None:
    base = built(build)
    model = peftc.compile("peft 1  edit e at layer[*].attn.q { h += lora(x, r=2) }", deepcopy(base), sample=SAMPLE)
    values = list(drawn(model).values())
    expected = deepcopy(base)
    with torch.no_grad():
        for i, name in enumerate(attentions):
            a, b = values[2 * i : 2 * i + 2]
            expected.get_submodule(name).q.weight += b @ a  # pyright: ignore
    torch.testing.assert_close(model(**SAMPLE), expected(**SAMPLE), atol=1e-12, rtol=0)
    peftc.fold(model)
    torch.testing.assert_close(model(**SAMPLE), expected(**SAMPLE), atol=1e-12, rtol=0)


def test_another_number_of_calls_is_refused_where_sites_are_missing() -> None:
    model = built(Universal)
    peftc.compile("peft 1  edit e at layer[*].attn { h += adapter(h, r=2) }", model, sample=SAMPLE)
    model.steps = 2
    with pytest.raises(peftc.PeftcError, match="P403"):
        model(**SAMPLE)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_edit_of_a_linear_acts_in_any_number_of_calls(steps: int) -> None:
    base, model = built(Universal), built(Universal)
    peftc.compile("peft 1  edit e at layer[*].attn.q { h += lora(x, r=2) }", model, sample=SAMPLE)
    a, b = drawn(model).values()
    base.steps = model.steps = steps
    with torch.no_grad():
        base.attn.q.weight += b @ a  # pyright: ignore
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)
