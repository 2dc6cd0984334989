"""Classes derived from nn.Linear with a forward of their own: what it returns tells the roles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Layers

D, T = 8, 5
functional: Any = nn.functional


class Gated(nn.Linear):
    """HDiT (`LinearGEGLU`): 2 d rows, the first half times an activation of the second."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, 2 * d_out)
        self.out_features = d_out

    def forward(self, x: Tensor) -> Tensor:
        x, gate = functional.linear(x, self.weight, self.bias).chunk(2, dim=-1)
        return x * functional.gelu(gate)


class Halves(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.weight.chunk(2)
        return functional.linear(x, up) * functional.gelu(functional.linear(x, gate))


class GatedByHand(Gated):
    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight.mT
        x, gate = (x if self.bias is None else x + self.bias).chunk(2, dim=-1)
        return x * functional.gelu(gate)


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias).tanh()


class Normalizing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.layer_norm(x, x.shape[-1:]))


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Flattening(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.saved_tensors[0], None


class Opaque(nn.Linear):
    """As modules of quantized weights: a function without code to read."""

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias  # pyright: ignore


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight - self.weight.mean(-1, keepdim=True), self.bias)


class Layer(nn.Module):
    def __init__(self, up: type[nn.Linear]) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), Attention(D)
        self.up, self.down = up(D, 12), nn.Linear(12, D)
        self.act = nn.Identity() if issubclass(up, Gated) else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


def model_of(up: type[nn.Linear]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Layers(Layer(up), Layer(up)).double().eval(), {"x": torch.randn(2, T, D, dtype=torch.float64)}


def roles(model: nn.Module, sample: dict[str, Tensor]) -> dict[str, str]:
    """The weights of the first feed-forward part, and where they are read."""
    weights: dict[str, str] = {}
    for site in peftc.sites(model, sample=sample).sites:
        weight = site.states["w"].weight if "w" in site.states else None
        if weight is not None and ".layer[0].ffn." in site.path:
            rows = f"[{weight.rows.start}:{weight.rows.stop}]" if weight.rows else ""
            weights[site.path.rpartition(".")[2]] = weight.module.removeprefix("layers.0.") + rows
    return weights


@pytest.mark.parametrize("up", [Gated, GatedByHand, Halves])
def test_rows_of_a_gate_in_the_class(up: type[nn.Linear]) -> None:
    expected = {"up": "up[0:12]", "gate": "up[12:24]", "down": "down", "norm": "norm2"}
    assert roles(*model_of(up)) == expected


@pytest.mark.parametrize("up", [Activated, Normalizing, Casting, Flattening, Opaque, Standardized])
def test_one_product_is_one_role(up: type[nn.Linear]) -> None:
    model, sample = model_of(up)
    assert roles(model, sample) == {"up": "up", "down": "down", "norm": "norm2"}
    assert peftc.sites(model, sample=sample).unplaced == ()


@pytest.mark.parametrize("up", [Gated, GatedByHand, Casting, Flattening, Opaque])
def test_edits_of_h_are_those_of_the_product(up: type[nn.Linear]) -> None:
    """A matrix that is added to the rows of `up`, by hand, computes the same; a fold does, too."""
    model, sample = model_of(up)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        peftc.compile("peft 1  edit e at layer[*].ffn.up { h += lora(x, r=2, alpha=2) }", model, seed=0, sample=sample)
        assert torch.equal(model(**sample), reference(**sample))
        for parameter in peftc.parameters(model).values():
            nn.init.normal_(parameter, std=0.3)
        for i in range(2):
            own = [p for name, p in peftc.parameters(model).items() if f"layer[{i}]" in name]
            down, up_matrix = sorted(own, key=lambda p: p.shape[0])
            reference.get_parameter(f"layers.{i}.up.weight")[:12] += up_matrix @ down
        torch.testing.assert_close(model(**sample), reference(**sample), rtol=0, atol=1e-10)
        assert not peftc.fold(model).refused
        torch.testing.assert_close(model(**sample), reference(**sample), rtol=0, atol=1e-10)


class Grouped(nn.Linear):
    """DeepSeek V4: a matrix for each group of features."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.in_features))
        return torch.einsum("btgi,goi->btgo", groups, self.weight.unflatten(0, (groups.shape[2], -1))).flatten(2)


class GroupedOutput(nn.Module):
    """The attention's result goes through it, and then through a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o_b = (nn.Linear(D, D) for _ in range(4))
        self.o_a = Grouped(D // 2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o_b(self.o_a(functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))))


def test_a_matrix_for_each_group_is_no_linear_and_is_named() -> None:
    table = peftc.sites(Layers(GroupedOutput(), GroupedOutput()), sample={"x": torch.randn(2, T, D)})
    assert [site.module for site in table.sites if site.path.endswith("[0].attn.self.o")] == ["layers.0.o_b"]
    assert [(part.module, part.roles) for part in table.unplaced] == [(f"layers.{i}.o_a", {"attn.o"}) for i in (0, 1)]
