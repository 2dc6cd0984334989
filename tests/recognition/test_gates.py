"""Gates of feed-forward parts that one function computes, and gates of whole sub-layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Layers, Network, functional

D, T = 8, 5
SAMPLE = {"x": torch.randn(2, T, D)}
SITES = ("attn.self.q", "attn.self.o", "ffn.up", "ffn.gate", "ffn.down")


class Glu(nn.Module):
    def __init__(self, glu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.glu = glu
        self.both, self.out = nn.Linear(D, 24), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.glu(self.both(x)))


class BareAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(D, D)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.q @ (x @ self.k).mT).softmax(-1) @ (x @ self.v)


class AdaptiveNorm(nn.Module):
    """The shifts, scales and gates of both sub-layers come from the mean of the input tokens."""

    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attn, self.ffn, self.modulation = attn, ffn, nn.Linear(D, 6 * D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(functional.silu(x.mean(1, keepdim=True))).chunk(6, -1)
        x = x + c * self.attn(self.norm(x) * (1 + a) + b)
        return x + f * self.ffn(functional.layer_norm(x, (D,)) * (1 + d) + e)


class Plain(nn.Module):
    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(D), ffn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class Highway(nn.Module):
    """Srivastava et al. 2015, arXiv:1505.00387: each sum has a share of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn, self.gate, self.carry = Attention(D), Network(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, carry = self.gate(x).sigmoid(), self.carry(x).sigmoid()
        x = x * (1 - gate) + gate * self.attn(x)
        return carry * x + self.ffn(x) * (1 - carry)


class Rows(nn.Module):
    """The rows of an image attend, with bare parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn = BareAttention(), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x.flatten(0, 1)).view(x.shape)
        return x + self.ffn(x)


class TokenReplacement(nn.Module):
    """Nothing adds what the Linears of an attention compute, which has no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.ffn = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ffn(x)
        q, k = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1
        return torch.cat([x[:, :1], q @ (k.mT @ self.v(x))], 1)[:, :T]


def weights(model: nn.Module, sample: dict[str, Tensor] = SAMPLE) -> dict[str, str]:
    """Those of the first layer, by role."""
    sites = {site.path.partition("layer[0].")[2]: site for site in peftc.sites(model, sample=sample).sites}
    refs = {role: ref for role in SITES if role in sites and (ref := sites[role].states["w"].weight) is not None}
    rows = {role: f"[{ref.rows.start}:{ref.rows.stop}]" if ref.rows else "" for role, ref in refs.items()}
    return {r: f"{ref.module}.{ref.attribute}".removeprefix("layers.0.") + rows[r] for r, ref in refs.items()}


ATTENTION = {"attn.self.q": "attn.q.weight", "attn.self.o": "attn.o.weight"}
NETWORK = {"ffn.up": "ffn.up.weight", "ffn.down": "ffn.down.weight"}
HALVES = {"ffn.up": "ffn.both.weight[0:12]", "ffn.gate": "ffn.both.weight[12:24]", "ffn.down": "ffn.out.weight"}


@pytest.mark.parametrize("glu", [nn.GLU(), nn.GLU(2), functional.glu, lambda y: functional.glu(y, dim=-1)])
def test_glu_multiplies_the_first_half_of_a_linear_by_a_gate_from_the_second(glu: Callable[[Tensor], Tensor]) -> None:
    assert weights(Layers(*(Plain(Glu(glu)) for _ in range(2)))) == ATTENTION | HALVES


def test_glu_of_tokens_has_no_gate() -> None:
    tokens = Layers(*(Plain(Glu(lambda y: functional.glu(torch.cat([y, y], 1), dim=1)[..., :12])) for _ in range(2)))
    assert "ffn.gate" not in weights(tokens)


@pytest.mark.parametrize(
    ("attn", "query"), [(Attention, ATTENTION), (lambda _: BareAttention(), {"attn.self.q": "attn.q"})]
)
def test_gates_from_the_input_of_a_layer_are_no_part_of_its_networks(
    attn: Callable[[int], nn.Module], query: dict[str, str]
) -> None:
    model = Layers(*(AdaptiveNorm(attn(D), Network(D)) for _ in range(2)))
    assert weights(model) == query | NETWORK
    edits = (f"edit {name} at layer[*].{name} {{ h += adapter(x, r=2, act=tanh) }}\n" for name in ("attn", "ffn"))
    compiled = peftc.compile("".join(["peft 2\n", *edits]), model, seed=0, sample=SAMPLE)
    assert not peftc.verify(compiled, SAMPLE).findings


def test_a_share_of_the_stream_is_the_stream() -> None:
    model = Layers(Highway(), Highway())
    assert weights(model) == ATTENTION | NETWORK
    spec = "peft 2\nedit e at layer[*].ffn { h += lora(x, r=2) }\nedit f at layer[*].attn { h += lora(x, r=2) }\n"
    assert not peftc.verify(peftc.compile(spec, model, seed=0, sample=SAMPLE), SAMPLE).findings


def test_bare_parameters_in_the_rows_of_an_image_are_no_factors_of_streams() -> None:
    sample = {"x": torch.randn(2, 3, T, D)}
    assert weights(Layers(Rows(), Rows()), sample) == {"attn.self.q": "attn.q"} | NETWORK


def test_linears_without_a_sub_layer_that_are_multiplied_may_attend() -> None:
    """An edit of `attn` would leave them out, and says so."""
    unplaced = peftc.sites(Layers(TokenReplacement(), TokenReplacement()), sample=SAMPLE).unplaced
    assert {part.module for part in unplaced if "attn" in part.roles} == {
        f"layers.{i}.{r}" for i in (0, 1) for r in "qkv"
    }
