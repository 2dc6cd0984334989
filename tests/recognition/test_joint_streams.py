"""Layers with two streams: keys that a layer adds to, tokens that join an attention, and one Linear
for both; layers of one class that differ in a flag.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o((self.q(q) @ self.k(k).transpose(1, 2)).softmax(-1) @ self.v(v))


class TwoWay(nn.Module):
    """SAM: both streams read each other, and the first layer's self-attention has no residual."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.itself, self.forth, self.back = Attention(), Attention(), Attention()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.itself(x, x, x)
        x = self.norm(h if self.replaces else x + h)
        x = x + self.forth(x, y, y)
        return x, y + self.back(y, x, x)


class Joined(nn.Module):
    """Stable Diffusion 3's last layer: the text's queries, keys and values join, and it ends."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.add_q, self.add_k, self.add_v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pairs = (self.q, self.add_q), (self.k, self.add_k), (self.v, self.add_v)
        q, k, v = (torch.cat([own(x), added(y)], dim=1) for own, added in pairs)
        out = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return x + self.o(out[:, : x.shape[1]]), y


class OneForBoth(nn.Module):
    """CogVideoX: the tokens of both streams go through one network together."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(D, 16), nn.Linear(16, D), nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        n, joint = y.shape[1], torch.cat([y, x], dim=1)
        h = self.down(self.up(joint).relu())
        return x + self.gate * h[:, n:], y + h[:, :n]


class ClassToken(nn.Module):
    """CaiT: a layer adds to its second argument, the class token, alone."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([y, x], dim=1)
        y = y + self.attention(both[:, :3], both, both)
        return x, y + self.down(self.up(y).relu())


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(True), layer(False)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x, y = layer(x, y)
        return torch.cat([x, y], dim=1)


def sample() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 5, D), "y": torch.randn(2, 3, D)}


def modules(layer: type[nn.Module], role: str) -> dict[str, str]:
    """The modules of a role, by their paths without the stack's name."""
    sites = peftc.sites(Model(layer), sample=sample()).sites
    return {s.path.partition(".")[2]: s.module for s in sites if role in dict(s.steps) and len(s.steps) > 3}


def test_streams_that_read_each_other_and_a_stream_that_an_attention_replaces() -> None:
    queries = {path: module for path, module in modules(TwoWay, "q").items() if path.endswith(".q") or "q[" in path}
    for i in range(2):
        own = {path.removeprefix(f"layer[{i}].attn."): m for path, m in queries.items() if f"layer[{i}]" in path}
        names = {path: module.removeprefix(f"layers.{i}.") for path, module in own.items()}
        assert names == {"self.q": "itself.q", "cross[0].q": "forth.q", "cross[1].q": "back.q"}


def test_tokens_that_join_an_attention_have_roles() -> None:
    assert list(modules(Joined, "k").values()) == ["layers.0.k", "layers.0.add_k", "layers.1.k", "layers.1.add_k"]


def test_the_stream_may_be_the_second_argument() -> None:
    assert list(modules(ClassToken, "q").values()) == ["layers.0.attention.q", "layers.1.attention.q"]
    assert list(modules(ClassToken, "up").values()) == ["layers.0.up", "layers.1.up"]


def test_one_network_for_two_streams_is_edited_for_both() -> None:
    model, inputs = Model(OneForBoth).double(), {name: value.double() for name, value in sample().items()}
    peftc.compile("peft 1  edit e at layer[*].ffn { h += linear(x, bias=false) }", model, seed=0, sample=inputs)
    weights = [nn.init.normal_(weight) for weight in peftc.parameters(model).values()]
    edited = model(**inputs)
    peftc.remove(model)
    for layer, weight in zip(model.layers, weights, strict=True):
        seen: list[Tensor] = []
        layer.up.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        layer.down.register_forward_hook(lambda _, args, h, seen=seen, w=weight: h + seen[-1] @ w.T)
    torch.testing.assert_close(edited, model(**inputs))


class Option(nn.Module):
    """One class, two codes: the sub-layers are beside each other, or in a row."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.option, self.attention = value, Attention()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x)
        if self.option:
            return x + h + self.down(self.up(x).relu())
        x = x + h
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize("values", [(True, False), (1, 0), ("beside", ""), ("beside", None)])
def test_layers_of_one_class_with_other_options_are_traced_each(values: tuple[Any, Any]) -> None:
    table = peftc.sites(nn.Sequential(*map(Option, values)), sample={"input": torch.randn(2, 3, D)})
    read = [site.states["x"].activation for site in table.sites if site.path.endswith("ffn.up")]
    assert [place and place.node for place in read] == ["x", "add"]


class CalledForEach(nn.Module):
    """LightGlue and CogView 4: the same modules run for one stream, then for the other."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(2 * D, 16), nn.Linear(16, D)

    def one(self, x: Tensor) -> Tensor:
        message = self.attention(x, x, x)
        return x + self.down(self.up(torch.cat([x, message], dim=-1)).relu())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.one(y)


class SharedQueries(nn.Module):
    """LightGlue: the queries of one stream are the keys of the other."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.qk, self.v, self.o, self.up, self.down = (nn.Linear(D, D) for _ in range(5))

    def both(self, f: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return f(x), f(y)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (a, b), (v, w) = (self.both(f, x, y) for f in (self.qk, self.v))
        m, n = self.both(self.o, (a @ b.transpose(1, 2)).softmax(-1) @ w, (b @ a.transpose(1, 2)).softmax(-1) @ v)
        x, y = x + m, y + n
        return x + self.down(self.up(x).relu()), y + self.down(self.up(y).relu())


@pytest.mark.parametrize("layer", [CalledForEach, SharedQueries])
@pytest.mark.parametrize("site", ["attn", "ffn"])
def test_one_module_that_is_called_for_each_of_two_streams_is_edited_for_both(
    layer: type[nn.Module], site: str
) -> None:
    model, inputs = Model(layer).double(), {name: value.double() for name, value in sample().items()}
    base = model(**inputs)
    peftc.compile(f"peft 1  edit e at layer[1].{site} {{ h *= vector(init=1) }}", model, seed=0, sample=inputs)
    for vector in peftc.parameters(model).values():
        nn.init.constant_(vector, 2.0)
    assert not torch.isclose(model(**inputs), base).all(-1).any()
    assert len(peftc.parameters(model)) == 2


def test_the_linears_of_two_streams_have_one_site_and_act_for_both() -> None:
    for layer, role in ((CalledForEach, "up"), (SharedQueries, "q"), (SharedQueries, "o")):
        assert len(modules(layer, role)) == 2
        model, inputs = Model(layer), sample()
        base = model(**inputs)
        place = "ffn.up" if role == "up" else f"attn.{role}"
        peftc.compile(f"peft 1  edit e at layer[1].{place} {{ h *= vector(init=1) }}", model, seed=0, sample=inputs)
        nn.init.normal_(*peftc.parameters(model).values(), std=9.0)
        assert (model(**inputs) - base).abs().sum(-1).gt(1e-4).all()


def test_features_beside_the_stream_are_no_hidden_ones() -> None:
    assert list(modules(CalledForEach, "up").values()) == ["layers.0.up", "layers.1.up"]
    assert list(modules(CalledForEach, "o").values()) == ["layers.0.attention.o", "layers.1.attention.o"]


class Evoformer(nn.Module):
    """A stream that another one biases, and which is added to that one in turn."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.attention, self.bias, self.outer = Attention(), nn.Linear(D, 1), nn.Linear(D, D)
        self.up, self.down, self.up_2, self.down_2 = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.attention.q(x), self.attention.k(x), self.attention.v(x)
        scores = q @ k.transpose(1, 2) + self.bias(y).mean(1, keepdim=True)
        x = x + self.attention.o(scores.softmax(-1) @ v)
        x = x + self.down(self.up(x).relu())
        y = y + self.outer(x.mean(1, keepdim=True))
        return x, y + self.down_2(self.up_2(y).relu())


def test_a_stream_that_is_added_to_another_one_keeps_its_sub_layers() -> None:
    own = {path: module for path, module in modules(Evoformer, "q").items() if path.endswith(".q")}
    assert own == {f"layer[{i}].attn.self.q": f"layers.{i}.attention.q" for i in range(2)}
    ups = [name for i in range(2) for name in (f"layers.{i}.up", f"layers.{i}.up_2")]
    assert list(modules(Evoformer, "up").values()) == ups
