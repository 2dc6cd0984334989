"""A call with an optional argument that the analysed call did not have, and the other way around: an edit stands where it belongs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import peftc
from peftc.rewriting.anchors import Ordinal
from tests.laws.harness import close

D = 8


class Block(nn.Module):
    """Attention and ffn in one forward. `extra` changes what both read, and is reshaped, as the attention is, before it is added."""

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
    """The same operation in two ways, one of which runs; `out` is called in one of them only."""

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


def model_of(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Model(layer).double()


def given(*names: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    values = {name: torch.randn(2, 5, D, dtype=torch.float64, generator=draw) for name in ("x", "extra")}
    return {name: values[name] for name in ("x", *names)}


def compiled(base: nn.Module, equation: str, sample: dict[str, Any]) -> nn.Module:
    """A compiled copy, with weights that are the same whatever the sample."""
    model = peftc.compile(f"peft 1\nedit e at layer[*].{equation}", copy.deepcopy(base), 0, sample=sample)
    draw = torch.Generator().manual_seed(2)
    for value in peftc.parameters(model).values():
        value.data = torch.randn(value.shape, dtype=value.dtype, generator=draw)
    return model


EQUATIONS = (
    "attn.q { h += lora(x, r=2) }",
    "attn.v { h *= vector(init=1) }",
    "attn.o { h += lora(x, r=2) }",
    "attn { h += adapter(x, r=2, act=tanh) }",
    "attn { h += adapter(h, r=2, act=tanh) }",
    "attn { kv = concat(prefix(len=2), kv) }",
    "ffn { h += adapter(x, r=2, act=tanh) }",
    "ffn { h += adapter(h, r=2, act=tanh) }",
    "ffn.hidden { h *= vector(init=1) }",
    "ffn.up { h += lora(x, r=2) }",
    "ffn.add { h += adapter(h, r=2, act=tanh) }",
)


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("layer", [Block, Branches])
def test_any_sample_makes_the_same_model(layer: Callable[[], nn.Module], equation: str) -> None:
    """Each sample is the reference for the calls like it; the other one has to agree."""
    base = model_of(layer)
    models = [compiled(base, equation, given(*names)) for names in ((), ("extra",))]
    for names in ((), ("extra",)):
        first, second = (model(**given(*names)) for model in models)
        assert (first - base(**given(*names))).abs().max() > 1e-3
        close(first, second, f"{equation} {names}")


@pytest.mark.parametrize("names", [(), ("extra",)])
def test_a_low_rank_update_is_that_of_the_weight(names: tuple[str, ...]) -> None:
    base = model_of(Block)
    model = compiled(base, "attn.o { h += lora(x, r=2) }", given())
    values = peftc.parameters(model)
    for i, layer in enumerate(base.layers):
        down, up = (values[f"e/encoder.layer[{i}].attn.self.o/lora.{name}"] for name in "AB")
        layer.out.weight.data += up @ down
    close(model(**given(*names)), base(**given(*names)), "lora")


class Gated(nn.Module):
    """What enters the residual sum has another factor where there is an argument for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        made = self.down(torch.relu(self.up(self.norm(x))))
        if extra is not None:
            made = made * extra
        return x + made


def test_a_value_that_is_two_in_another_call_is_refused() -> None:
    """The `h` of the ffn is what `down` gives, and what enters the sum: in a call with a factor in between these differ."""
    equation = "ffn { h += adapter(h, r=2, act=tanh) }"
    model = compiled(model_of(Gated), equation, given())
    model(**given())
    with pytest.raises(peftc.PeftcError, match="P403"):
        model(**given("extra"))
    either = compiled(model_of(Gated), equation, given("extra"))
    close(either(**given()), model(**given()), "without the factor")
    assert (either(**given("extra")) - either(**given())).abs().max() > 1e-3


# torch's own layers ------------------------------------------------------------------------------------------------


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
    x = given()["x"]
    padding = torch.zeros(2, 5, dtype=torch.float64)
    padding[1, 3:] = -torch.inf
    more = {"padding": padding, "causal": torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)}
    return {"x": x} | {k: v for k, v in more.items() if k in name}


CALLS = ("", "padding", "causal", "padding causal")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sample", ["", "padding causal"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(Encoder, {}), (Encoder, {"norm_first": True}), (Decoder, {}), (Decoder, {"norm_first": True})],
)
def test_masks_of_torchs_layers(make: Any, options: dict[str, Any], sample: str, training: bool) -> None:
    """A low-rank update of each Linear is that of its weight."""
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


@pytest.mark.parametrize(
    "equation",
    [
        "attn { h += adapter(x, r=2, act=tanh) }",
        "attn { h += adapter(h, r=2, act=tanh) }",
        "attn { kv = concat(prefix(len=2), kv) }",
        "ffn { h += adapter(x, r=2, act=tanh) }",
        "ffn { h += adapter(h, r=2, act=tanh) }",
        "ffn.hidden { h *= vector(init=1) }",
    ],
)
@pytest.mark.parametrize("make", [Encoder, Decoder])
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


# Operations of one sort --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "here", "there", "expected"),
    [
        (1, "ab", "ab", 1),
        (0, "b", "ab", 1),  # an operation more before it
        (1, "ab", "b", 0),
        (1, "ab", "ac", 1),  # the other one of two branches
        (1, "ab", "cd", 1),
        (1, "ab", "ca", None),  # `a` is the second there: neither is known to be it
        (1, "ab", "a", None),
        (0, "b", "a", 0),
        (0, "b", "acd", None),
        (1, "aa", "aa", 1),
        (0, "aa", "aaa", None),  # a loop that runs once more
    ],
)
def test_an_operation_among_those_of_another_trace(index: int, here: str, there: str, expected: int | None) -> None:
    def turns(places: str) -> list[tuple[str, int]]:
        return [(place, places[:i].count(place)) for i, place in enumerate(places)]

    assert Ordinal(index, tuple(turns(here))).among(turns(there)) == expected
