"""Calls with an optional argument that the traced call did not have, or without one that it had:
edits act at their sites.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import peftc
from peftc.installation.record import installation_of
from peftc.rewriting.anchors import Ordinal
from tests.laws.harness import close
from tests.matrix import checkerboard

D = 8


class Block(nn.Module):
    """Attention and ffn in one forward. `extra` is added to the input of both, and reshaped first,
    like the attention output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate, self.up, self.down = nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens, _ = x.shape
        z = self.n1(x)
        if extra is not None:
            z = z + extra.reshape(batch, tokens, D)
        q, k, v = (t.view(batch, tokens, 2, 4).transpose(1, 2) for t in self.qkv(z).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, D)
        x = x + functional.linear(mixed, self.out.weight, self.out.bias)
        z = self.n2(x)
        if extra is not None:
            z = z * extra.reshape(batch, tokens, D)
        return x + self.down(torch.relu(self.gate(z)) * self.up(z))


class Branches(Block):
    """One operation in two branches; only one of them calls `out`."""

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens, _ = x.shape
        z = self.n1(x)
        q, k, v = (t.view(batch, tokens, 2, 4).transpose(1, 2) for t in self.qkv(z).chunk(3, -1))
        if extra is None:
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, D)
            x = x + self.out(mixed)
        else:
            k = k + extra.view(batch, tokens, 2, 4).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, D)
            x = x + functional.linear(mixed, self.out.weight, self.out.bias)
        z = self.n2(x)
        return x + self.down(torch.relu(self.gate(z)) * self.up(z))


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, extra)
        return x


def model_of(layer: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return Model(layer).double()


def model_inputs(*names: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    values = {name: torch.randn(2, 5, D, dtype=torch.float64, generator=draw) for name in ("x", "extra")}
    return {name: values[name] for name in ("x", *names)}


def compiled(base: nn.Module, equation: str, sample: dict[str, Any]) -> Any:
    """A compiled copy whose weights do not depend on the sample."""
    model = peftc.compile(f"peft 1\nedit e at layer[*].{equation}", copy.deepcopy(base), 0, sample=sample)
    draw = torch.Generator().manual_seed(2)
    for value in peftc.parameters(model).values():
        value.data = torch.randn(value.shape, dtype=value.dtype, generator=draw)
    return model


SUB_LAYERS = (
    "attn { h += adapter(x, r=2, act=tanh) }",
    "attn { h += adapter(h, r=2, act=tanh) }",
    "attn { kv = concat(prefix(len=2), kv) }",
    "ffn { h += adapter(x, r=2, act=tanh) }",
    "ffn { h += adapter(h, r=2, act=tanh) }",
    "ffn.hidden { h *= vector(init=1) }",
)
EQUATIONS = (
    *SUB_LAYERS,
    "attn.q { h += lora(x, r=2) }",
    "attn.v { h *= vector(init=1) }",
    "attn.o { h += lora(x, r=2) }",
    "ffn.up { h += lora(x, r=2) }",
    "ffn.add { h += adapter(h, r=2, act=tanh) }",
)


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("layer", [Block, Branches])
def test_every_sample_gives_the_same_model(layer: Callable[[], nn.Module], equation: str) -> None:
    """A sample is the reference for calls like it; a model compiled with the other sample must
    agree.
    """
    base = model_of(layer)
    models = [compiled(base, equation, model_inputs(*names)) for names in ((), ("extra",))]
    for names in ((), ("extra",)):
        first, second = (model(**model_inputs(*names)) for model in models)
        assert (first - base(**model_inputs(*names))).abs().max() > 1e-3
        close(first, second, f"{equation} {names}")


@pytest.mark.parametrize("names", [(), ("extra",)])
def test_a_low_rank_update_is_that_of_the_weight(names: tuple[str, ...]) -> None:
    base = model_of(Block)
    model = compiled(base, "attn.o { h += lora(x, r=2) }", model_inputs())
    values = peftc.parameters(model)
    for i, layer in enumerate(base.layers):
        down, up = (values[f"e/encoder.layer[{i}].attn.self.o/lora.{name}"] for name in "AB")
        layer.out.weight.data += up @ down
    close(model(**model_inputs(*names)), base(**model_inputs(*names)), "lora")


class Network(nn.Module):
    """A feed-forward network with an optional factor on the input of its Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        if extra is not None:
            x = x * extra
        return self.down(torch.relu(self.up(x)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.network = nn.LayerNorm(D), Network()

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.network(self.norm(x), extra)


class Expression(Network):
    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(torch.relu(self.up(x if extra is None else x * extra)))


class Renamed(Network):
    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        state = x
        if extra is not None:
            state = x * extra
        return self.down(torch.relu(self.up(state)))


class Method(Network):
    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.activated(x, extra))

    def activated(self, x: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
        if extra is not None:
            x = x * extra
        return torch.relu(self.up(x))


class UnrelatedBranch(Network):
    """A branch that changes neither inputs nor outputs of Linears."""

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        factor = None
        if extra is not None:
            factor = extra.mean()
        activation = torch.relu(self.up(x))
        activation = activation if factor is None else activation * factor
        return self.down(activation)


@pytest.mark.parametrize(
    ("network", "entered"),
    [(Network, True), (Expression, True), (Renamed, True), (Method, True), (UnrelatedBranch, False)],
)
def test_code_is_inlined_if_it_may_change_a_state(network: type[Network], entered: bool) -> None:
    class Own(Nested):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

    base, equation = model_of(Own), "ffn { h += adapter(x, r=2, act=tanh) }"
    models = [compiled(base, equation, model_inputs(*names)) for names in ((), ("extra",))]
    for names in ((), ("extra",)):
        close(models[0](**model_inputs(*names)), models[1](**model_inputs(*names)), str(names))
    assert list(peftc.graphs(models[0])) == ["layers.0.network", "layers.1.network"]
    assert ("respecialize" in peftc.graphs(models[0])["layers.0.network"].code) == entered


class Gated(nn.Module):
    """The addition to the residual stream has an optional factor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        output = self.down(torch.relu(self.up(self.norm(x))))
        if extra is not None:
            output = output * extra
        return x + output


def test_a_state_with_two_values_in_another_call_is_refused() -> None:
    """The `h` of the ffn is the output of `down` and the addition to the residual stream. With a
    factor these differ.
    """
    equation = "ffn { h += adapter(h, r=2, act=tanh) }"
    model = compiled(model_of(Gated), equation, model_inputs())
    model(**model_inputs())
    with pytest.raises(peftc.PeftcError, match="P403"):
        model(**model_inputs("extra"))
    either = compiled(model_of(Gated), equation, model_inputs("extra"))
    close(either(**model_inputs()), model(**model_inputs()), "without the factor")
    assert (either(**model_inputs("extra")) - either(**model_inputs())).abs().max() > 1e-3


class ReturnsLevel(nn.Module):
    """A network that also returns the mean square of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.down(torch.relu(self.up(x)))
        return output, output.square().mean()


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.network = nn.LayerNorm(D), ReturnsLevel()

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        output, level = self.network(self.norm(x))
        return x + output, level


class Summed(Model):
    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> Any:
        levels: list[torch.Tensor] = []
        for layer in self.layers:
            x, level = layer(x)
            levels.append(level)
        return x, levels


@pytest.mark.parametrize("state", ["res", "x"])
def test_values_computed_from_h_use_the_edited_h(state: str) -> None:
    torch.manual_seed(0)
    base: Any = Summed(Levels).double()
    model = compiled(base, f"ffn {{ h += lora({state}, r=2) }}", model_inputs())
    values = peftc.parameters(model)
    x, levels = model(**model_inputs())
    want = model_inputs()["x"]
    for i, layer in enumerate(base.layers):
        down, up = (values[f"e/encoder.layer[{i}].ffn/lora.{name}"] for name in "AB")
        source = want if state == "res" else layer.norm(want)
        output = layer.network(layer.norm(want))[0] + source @ down.T @ up.T
        close(levels[i], output.square().mean(), f"level {i}")
        want = want + output
    close(x, want, "stream")


# torch's layers
# ------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True, **options)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: Any = None, causal: Any = None) -> torch.Tensor:
        return self.stack(x, mask=causal, src_key_padding_mask=padding)


class Decoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(D, 2, 12, 0.0, batch_first=True, **options)
        self.stack = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: Any = None, causal: Any = None) -> torch.Tensor:
        return self.stack(x, x.flip(1) * 2, tgt_mask=causal, memory_key_padding_mask=padding)


def masks(name: str) -> dict[str, torch.Tensor]:
    x = model_inputs()["x"]
    padding = torch.zeros(2, 5, dtype=torch.float64)
    padding[1, 3:] = -torch.inf
    more = {"padding": padding, "causal": torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)}
    return {"x": x} | {k: v for k, v in more.items() if k in name}


CALLS = ("", "padding", "causal", "padding causal")


ORDERS = [(Encoder, {}), (Decoder, {"norm_first": True}), (Encoder, {"norm_first": True}), (Decoder, {})]
SAMPLES = [("", False), ("padding causal", True), ("", True), ("padding causal", False)]  # and the training flag


@pytest.mark.parametrize(("layer", "compiled_in"), checkerboard(ORDERS, SAMPLES, 4))
def test_masks_of_torchs_layers(layer: tuple[Any, dict[str, Any]], compiled_in: tuple[str, bool]) -> None:
    """A low-rank update of each Linear equals an update of its weight."""
    (make, options), (sample, training) = layer, compiled_in
    torch.manual_seed(0)
    base = make(**options).double().train(training)
    spec = "attn.o | layer[*].ffn.up | layer[*].ffn.down { h += lora(x, r=2) }"
    model, folded = (compiled(base, spec, masks(sample)) for _ in range(2))
    peftc.fold(folded)
    for name in CALLS:
        with torch.no_grad():
            first, want = model(**masks(name)), folded(**masks(name))
            assert (first - base(**masks(name))).abs().max() > 1e-3
            close(first, want, f"{make.__name__} {name}")


@pytest.mark.parametrize(("equation", "make"), checkerboard(SUB_LAYERS, [Encoder, Decoder]))
def test_masks_of_torchs_layers_and_their_states(make: Any, equation: str) -> None:
    torch.manual_seed(0)
    base = make().double().eval()
    models = [compiled(base, equation, masks(name)) for name in ("", "padding", "causal")]
    for name in CALLS:
        with torch.no_grad():
            first, *others = (model(**masks(name)) for model in models)
            assert (first - base(**masks(name))).abs().max() > 1e-3
            for other in others:
                close(other, first, f"{equation} {name}")


def test_tracing_adds_no_variants_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits of an encoder, of its layers and of their attention, nested: each has one variant for
    each call pattern.
    """
    monkeypatch.setattr("peftc.installation.reinstall.warm", lambda model, sample=None: None)
    torch.manual_seed(0)
    model = compiled(Encoder().double().eval(), "attn { kv = concat(prefix(len=2), kv) }", masks(""))
    with torch.no_grad():
        for name in CALLS:
            model(**masks(name))
    variants = {kind.name: len(kind.variants) for _, kind in installation_of(model).regions}
    encoder, layer, attention = nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention
    assert variants == {cls.__name__: len(CALLS) for cls in (encoder, layer, attention)}


# The n-th operation of one kind
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "here", "there", "expected"),
    [
        (1, "ab", "ab", 1),
        (0, "b", "ab", 1),  # one more operation before it
        (1, "ab", "b", 0),
        (1, "ab", "ac", 1),  # the other branch
        (1, "ab", "cd", 1),
        (1, "ab", "ca", None),  # `a` comes second there: ambiguous
        (1, "ab", "a", None),
        (0, "b", "a", 0),
        (0, "b", "acd", None),
        (1, "aa", "aa", 1),
        (0, "aa", "aaa", None),  # a loop with one more iteration
    ],
)
def test_an_operation_in_another_trace(index: int, here: str, there: str, expected: int | None) -> None:
    def turns(places: str) -> list[tuple[str, int]]:
        return [(place, places[:i].count(place)) for i, place in enumerate(places)]

    assert Ordinal(index, tuple(turns(here))).find_in(turns(there)) == expected
