"""Ways to add a sub-layer's result to the residual stream: `h` is what is added, without the
stream. Law: `h *= 0` at a sub-layer equals the layer whose sub-layer gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import peftc

D, HEADS = 8, 2
Way = Callable[[Tensor, Tensor], Tensor]


def tokens(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def entries(x: Tensor) -> Tensor:
    return tokens(x)[:, None].expand(x.shape)


def part(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] += y[:, 1:]
    return x


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.index_add_(1, tokens(x), y)
    return x


def half(x: Tensor) -> Tensor:
    return torch.full((D,), 0.5, dtype=x.dtype)


SUMS: dict[str, Way] = {
    "alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "alpha of the stream": lambda x, y: torch.add(y, x, alpha=0.5),
    "sum of a list": lambda x, y: sum([x, y]),  # pyright: ignore
    "difference": lambda x, y: x - y,
    "sub of the negative": lambda x, y: x.sub(-y),
    "rsub": lambda x, y: torch.rsub(-y, x),
    "index_add": lambda x, y: x.index_add(1, tokens(x), y),
    "index_add of some": lambda x, y: torch.index_add(x, dim=1, index=tokens(x)[1:], source=y[:, 1:], alpha=0.5),
    "index_add in place": written,
    "scatter_add": lambda x, y: x.scatter_add(1, entries(x), y),
    "scatter_add by names": lambda x, y: torch.scatter_add(x, dim=1, index=entries(x), src=y),
    "addcmul": lambda x, y: torch.addcmul(x, y, half(x)),
    "addcmul, the factor first": lambda x, y: torch.addcmul(x, half(x), y, value=2.0),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, half(x)),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp from the other end": lambda x, y: y.lerp(x, 0.25),
    "lerp by hand": lambda x, y: x + half(x) * (y - x),
    "where": lambda x, y: x + torch.where(entries(x) > 1, y, torch.zeros_like(y)),
    "dropout": lambda x, y: functional.dropout(x + y, 0.1, False),
    "some tokens": part,
}
NO_SUMS: dict[str, Way] = {
    "index_put": lambda x, y: x.index_put((torch.arange(len(x))[:, None], tokens(x)[None]), y, accumulate=True),
    "scatter_reduce": lambda x, y: x.scatter_reduce(1, entries(x), y, "sum"),
    "sum": lambda x, y: torch.stack([x, y]).sum(0),
    "mean": lambda x, y: torch.stack([x, y]).mean(0),
    "einsum": lambda x, y: torch.einsum("nbtd->btd", torch.stack([x, y])),
    "baddbmm": lambda x, y: x.baddbmm(y, torch.eye(D, dtype=x.dtype).expand(len(x), D, D)),
    "where": lambda x, y: torch.where(entries(x) > 1, x, y),
    "maximum": torch.maximum,
    "neg": lambda x, y: -(-x - y),
    "cat": lambda x, y: torch.cat([x[..., :4], x[..., 4:] + y[..., 4:]], -1),
}


class Block(nn.Module):
    way: Way
    last: Way
    zero = ""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def attn(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = functional.scaled_dot_product_attention(q, k, v)
        h = self.o(h.transpose(1, 2).flatten(-2))
        return torch.zeros_like(h) if self.zero == "attn" else h

    def ffn(self, x: Tensor) -> Tensor:
        h = self.down(functional.gelu(self.up(x)))
        return torch.zeros_like(h) if self.zero == "ffn" else h

    def forward(self, x: Tensor) -> Tensor:
        cls = type(self)
        x = cls.way(x, self.attn(self.n1(x)))
        return cls.last(x, self.ffn(self.n2(x)))


class Gathered(Block):
    """A mixture of depths: sub-layers compute some tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, x.shape[1], 2)
        at = rows[None, :, None].expand(x.shape[0], -1, D)
        x = x.scatter_add(1, at, self.attn(self.n1(x.gather(1, at))))
        return x.index_add(1, rows, self.ffn(self.n2(x.index_select(1, rows))))


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(D, D), nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(way: Way, last: Way | None = None, block: type[Block] = Block) -> tuple[Any, type[Block]]:
    cls = type("Block", (block,), {"way": staticmethod(way), "last": staticmethod(last or way)})
    torch.manual_seed(0)
    return Model(cls).double().eval(), cls


X = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(0)).double()


def without(place: str, model: Any, block: type[Block]) -> Tensor:
    block.zero = place
    result = model(X)
    block.zero = ""
    return result


@pytest.mark.parametrize("name", SUMS)
def test_no_h_is_no_sub_layer(name: str) -> None:
    model, block = model_of(SUMS[name])
    base = model(X)
    for place in ("attn", "ffn"):
        expected = without(place, model, block)
        peftc.compile(f"peft 1 edit e at layer[*].{place} {{ h *= 0 }}", model, sample={"x": X})
        torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-10)
        assert not torch.allclose(expected, base)
        peftc.remove(model)


def test_a_sub_layer_of_some_tokens() -> None:
    """x and h are these tokens."""
    model, block = model_of(torch.add, block=Gathered)
    for place in ("attn", "ffn"):
        expected = without(place, model, block)
        peftc.compile(f"peft 1 edit e at layer[*].{place} {{ h = 0 * h + lora(x, r=2) }}", model, sample={"x": X})
        torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-10)
        peftc.remove(model)


@pytest.mark.parametrize("name", NO_SUMS)
def test_an_attention_that_joins_the_stream_by_no_sum(name: str) -> None:
    """Its `h` would have the stream in it. The error names the operation and its line."""
    model, block = model_of(NO_SUMS[name], torch.add)
    with pytest.raises(peftc.PeftcError, match="P214") as error:
        peftc.compile("peft 1 edit e at layer[*].attn { h *= 0 }", model, sample={"x": X})
    assert f"joins the residual stream by `{name}`" in str(error.value)
    assert "test_sums.py:" in str(error.value)
    expected = without("ffn", model, block)
    peftc.compile("peft 1 edit e at layer[*].ffn { h *= 0 }", model, sample={"x": X})
    torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-10)


def test_two_factors_of_the_stream() -> None:
    """Which one is `h` is not known."""

    class Gated(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.n1(x))
            return torch.addcmul(x, self.k(x).sigmoid(), self.ffn(self.n2(x)))

    with pytest.raises(peftc.PeftcError, match=r"P2(01|14)"):
        peftc.compile("peft 1 edit e at layer[*].ffn { h *= 0 }", model_of(torch.add, block=Gated)[0], sample={"x": X})
