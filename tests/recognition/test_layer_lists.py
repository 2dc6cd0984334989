"""Any way in which a model lists and calls its layers: each is `layer[i]`, and edits act on it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8
SPEC = """peft 1
edit q at layer[*].attn.q { h += lora(x, r=2) }
edit f at layer[*].ffn { h += adapter(x, r=3, init=lora) }
edit l at layer[*] { h += adapter(h, r=3, init=lora) }
"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return self.o(scores.softmax(-1) @ self.v(x))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(), Ffn()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class Direct(Block):
    """Calls the `forward` of its parts, and of one of their Linears."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn.forward(x)
        return x + self.ffn.down.forward(self.ffn.up.forward(x).relu())


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(x)


class Chunk(nn.ModuleList):
    """Some layers under the indices that they have among all."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, layers: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.layers, self.run = nn.Linear(3, D), layers, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, self.embed(x))


def call(layers: nn.Module, x: Tensor) -> Tensor:
    return layers(x)


def loop(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in layers.children():
        x = layer(x)
    return x


def lambdas(layers: nn.Module, x: Tensor) -> Tensor:
    for function in [lambda x, layer=layer: layer(x) for layer in layers.children()]:
        x = function(x)
    return x


def partials(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in layers.children():
        x = functools.partial(layer, x)()
    return x


def reduced(layers: nn.Module, x: Tensor) -> Tensor:
    return functools.reduce(lambda x, layer: layer(x), layers.children(), x)


def forwards(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in layers.children():
        x = layer.forward(x)
    return x


def blocks() -> list[Block]:
    return [Block(), Block(), Block()]


def named() -> nn.Module:
    return nn.Sequential(OrderedDict((f"layer_{i}", block) for i, block in enumerate(blocks())))


def placeholders() -> nn.Module:
    first = Chunk([Block()])
    return nn.ModuleList([first, Chunk([nn.Identity(), Block()]), Chunk([nn.Identity(), nn.Identity(), Block()])])


def residuals() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(Residual(Attention()), Residual(Ffn())) for _ in range(3)))


@dataclass
class State:
    hidden: Tensor
    steps: int = 0


class OnState(Block):
    """Takes one record and returns another."""

    def forward(self, state: State) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        return State(super().forward(state.hidden), state.steps + 1)


class OnDict(Block):
    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {**state, "hidden": super().forward(state["hidden"])}


def records(layers: nn.Module, x: Tensor) -> Tensor:
    state = functools.reduce(lambda state, layer: layer(state), layers.children(), State(x))
    assert state.steps == 3
    return state.hidden


def dicts(layers: nn.Module, x: Tensor) -> Tensor:
    state = functools.reduce(lambda state, layer: layer(state), layers.children(), {"first": x, "hidden": x})
    assert state["first"] is x
    return state["hidden"]


def leaving(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in layers.children():
        x = layer(x)
        if x.abs().mean() > 1e9:
            return x
    return x


STYLES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], list[str]]] = {
    "a Sequential with names": (named, call, ["layer_0", "layer_1", "layer_2"]),
    "a ModuleDict": (lambda: nn.ModuleDict(zip("abc", blocks(), strict=True)), loop, ["a", "b", "c"]),
    "other modules beside them": (
        lambda: nn.Sequential(nn.Linear(D, D), *blocks(), nn.LayerNorm(D)),
        call,
        list("123"),
    ),
    "None beside them": (lambda: nn.ModuleList([*blocks(), None]), loop, list("012")),  # pyright: ignore
    "chunks with placeholders": (placeholders, loop, ["0.0", "1.1", "2.2"]),
    "sub-layers in a Sequential": (residuals, call, list("012")),
    "lambdas": (lambda: nn.ModuleList(blocks()), lambdas, list("012")),
    "functools.partial": (lambda: nn.ModuleList(blocks()), partials, list("012")),
    "functools.reduce": (lambda: nn.ModuleList(blocks()), reduced, list("012")),
    "their forward": (lambda: nn.ModuleList(blocks()), forwards, list("012")),
    "records": (lambda: nn.ModuleList([OnState(), OnState(), OnState()]), records, list("012")),
    "dictionaries": (lambda: nn.ModuleList([OnDict(), OnDict(), OnDict()]), dicts, list("012")),
    "an early exit": (lambda: nn.ModuleList(blocks()), leaving, list("012")),
    "the forward of their parts": (lambda: nn.ModuleList([Direct(), Direct(), Direct()]), forwards, list("012")),
}


@pytest.mark.parametrize("style", STYLES)
def test_layers_in_any_list_are_found_and_edited(style: str) -> None:
    torch.manual_seed(0)
    layers, run, names = STYLES[style]
    model = Model(layers(), run).double().eval()
    sample = {"x": torch.randn(2, 5, 3, dtype=torch.float64)}
    table = peftc.sites(model, sample=sample)
    roots = [site.module for site in table.sites if site.steps[-1][0] == "layer"]
    assert roots == [f"layers.{name}" for name in names]
    base, before = model(**sample), deepcopy(model.state_dict())
    is_hidden = run not in (records, dicts)
    spec = SPEC if is_hidden else SPEC[: SPEC.index("edit l")]  # a record has no `h`
    peftc.compile(spec, model, seed=0, sample=sample)
    assert len(peftc.parameters(model)) == 3 * (2 + 4 + 4 * is_hidden)
    torch.testing.assert_close(model(**sample), base, rtol=0, atol=1e-12)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.normal_(std=0.3)
    model(**sample).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in peftc.parameters(model).values())
    report = peftc.verify(model)
    assert report.ok, str(report)
    assert report.witnessed == report.sites or run is forwards  # past the hooks of the reference
    if is_hidden:
        changed, model.run = model(**sample), call if isinstance(model.layers, nn.Sequential) else loop
        torch.testing.assert_close(model(**sample), changed, rtol=0, atol=1e-12)
    peftc.remove(model)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Attributes(nn.Module):
    """Blocks that no list holds: their names differ in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block1, self.block2, self.block10 = nn.Linear(3, D), Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for name in ("block1", "block2", "block10"):
            x = getattr(self, name)(x)
        return x


class Letters(nn.Module):
    """The names of the blocks have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.low, self.high = nn.Linear(3, D), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(self.embed(x)))


class Linked(nn.Module):
    """Each block is held by the one before."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D) if depth else nn.Linear(3, D)
        self.block, self.next = Block(), Linked(depth + 1) if depth < 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.next(self.block(self.embed(x)))


class Alone(nn.Module):
    """One layer, which runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Linear(3, D), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.encoder(x)
        return x


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Attributes, ["block1", "block2", "block10"]),
        (Letters, ["low", "high"]),
        (lambda: Linked(0), ["block", "next.block", "next.next.block"]),
        (Alone, ["encoder"]),
    ],
    ids=["numbers", "letters", "linked", "alone"],
)
def test_attributes_are_layers(build: Callable[[], nn.Module], names: list[str]) -> None:
    torch.manual_seed(0)
    model, sample = build().double().eval(), {"x": torch.randn(2, 5, 3, dtype=torch.float64)}
    roots = [site.module for site in peftc.sites(model, sample=sample).sites if site.steps[-1][0] == "layer"]
    assert roots == names
    peftc.compile(SPEC, model, seed=0, sample=sample)
    report = peftc.verify(model)
    assert report.ok, str(report)
    assert report.witnessed == report.sites == 3 * len(names)
