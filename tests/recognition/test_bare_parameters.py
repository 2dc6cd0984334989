"""Code that multiplies by parameters itself, without calling a Linear: roles and laws of edits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc

D, H, K, T = 16, 4, 4, 5
functional: Any = nn.functional


def parameter(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(sizes, dtype=torch.float64) * 0.3)


class Block(nn.Module):
    def __init__(self, attn: nn.Module, ff: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.ff = nn.LayerNorm(D), nn.LayerNorm(D), attn, ff

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Model(nn.Module):
    def __init__(self, attn: Callable[[], nn.Module], ff: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attn(), ff()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class HeadsInOneParameter(nn.Module):
    """Parameters (d, heads, d_head), as in einsum code."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (parameter(*s) for s in ((D, H, K), (D, H, K), (D, H, K), (H, K, D)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,dhk->bhnk", x, w) for w in (self.wq, self.wk, self.wv))
        weights = (torch.einsum("bhik,bhjk->bhij", q, k) * K**-0.5).softmax(-1)
        return torch.einsum("bhnk,hkd->bnd", torch.einsum("bhij,bhjk->bhik", weights, v), self.wo)


class MatrixOfEachHead(nn.Module):
    """Matrices (heads, d, d_head), by which one input is multiplied; a bias behind one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (parameter(*s) for s in ((H, D, K), (H, D, K), (H, D, K), (D, D)))
        self.bq = parameter(H, 1, K)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        q, k, v = heads @ self.wq + self.bq, torch.matmul(input=heads, other=self.wk), torch.matmul(heads, self.wv)
        out = functional.scaled_dot_product_attention(query=q, key=k, value=v).transpose(1, 2)
        return functional.linear(weight=self.wo, input=out.flatten(2))


class Packed(nn.Module):
    """One parameter (3, heads, d_head, d) with a bias, and talking heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.bqkv, self.wo = parameter(3, H, K, D), parameter(3, H, K), parameter(D, H, K)
        self.talk = parameter(H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bnd,chkd->cbhnk", x, self.wqkv) + self.bqkv[:, None, :, None]
        weights = torch.softmax(input=torch.einsum("bhij,hg->bgij", q @ k.mT, self.talk), dim=-1)
        return torch.einsum("bhnk,dhk->bnd", weights @ v, self.wo)


class Chunks(nn.Module):
    """Rows of one parameter, each in a product of its own; positions are a parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.positions = parameter(3 * D, D), nn.Linear(D, D), parameter(T, K)

    def forward(self, x: Tensor) -> Tensor:
        heads = (functional.linear(x, w).unflatten(-1, (H, K)).transpose(1, 2) for w in self.qkv.chunk(3))
        q, k, v = heads
        scores = q @ k.mT + torch.einsum("bhik,jk->bhij", q, self.positions)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = parameter(D, 4 * D), parameter(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bnd,df->bnf", x, self.w1).chunk(2, -1)
        return torch.einsum("bnf,fd->bnd", functional.silu(gate) * up, self.w2)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = parameter(D, 2 * D), parameter(2 * D), parameter(2 * D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x @ self.w1 + self.b1) @ self.w2 + self.b2


class Tensordots(nn.Module):
    """Sums over pairs of dimensions: `tensordot` by a number and by lists, and `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (parameter(*s) for s in ((D, H, K), (H, K, D), (D, D), (H, K, D)))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.tensordot(x, self.wq, dims=1).transpose(1, 2)
        k = torch.tensordot(self.wk, x, dims=([-1], [2])).permute(2, 0, 3, 1)
        v = torch.inner(x, self.wv).unflatten(-1, (H, K)).transpose(1, 2)
        return torch.tensordot(((q @ k.mT).softmax(-1) @ v).transpose(1, 2), self.wo)


class Lists(nn.Module):
    """Einsums with lists of labels, and `torch.linalg.matmul`."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = parameter(D, 4 * D), parameter(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.linalg.matmul(x, self.w1).chunk(2, -1)
        return torch.einsum(functional.silu(gate) * up, [..., 0], self.w2, [1, 0], [..., 1])


class BiasBeside(nn.Module):
    """A Linear that returns its bias beside the product, for others to add (Megatron)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(d_out, d_in), parameter(d_out)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.linear(x, self.weight), self.bias


class BiasesBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = BiasBeside(D, 2 * D), BiasBeside(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.up(x)
        y, bias = self.down(functional.gelu(y + bias))
        return bias + y


def encoder(**arguments: Any) -> nn.Module:
    layer: Any = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, **arguments)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "heads in one parameter": lambda: Model(HeadsInOneParameter, Gated),
    "a matrix of each head": lambda: Model(MatrixOfEachHead, Plain),
    "packed": lambda: Model(Packed, Plain),
    "chunks": lambda: Model(Chunks, Gated),
    "biases beside": lambda: Model(Packed, BiasesBeside),
    "sums over pairs": lambda: Model(Tensordots, Lists),
    "encoder": lambda: encoder(batch_first=True, norm_first=True),
    "encoder, tokens first": lambda: encoder(),
}
ROLES: dict[str, dict[str, str]] = {
    "heads in one parameter": {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "gate": "w1[0:32]", "up": "w1[32:64]"},
    "a matrix of each head": {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "up": "w1", "down": "w2"},
    "packed": {"q": "wqkv[0:16]", "k": "wqkv[16:32]", "v": "wqkv[32:48]", "o": "wo", "down": "w2"},
    "chunks": {"q": "qkv[0:16]", "k": "qkv[16:32]", "v": "qkv[32:48]", "o": "out.weight"},
    "biases beside": {"q": "wqkv[0:16]", "up": "up.weight", "down": "down.weight"},
    "sums over pairs": {
        "q": "wq",
        "k": "wk",
        "v": "wv",
        "o": "wo",
        "gate": "w1[0:32]",
        "up": "w1[32:64]",
        "down": "w2",
    },
    "encoder": {
        "q": "in_proj_weight[0:16]",
        "v": "in_proj_weight[32:48]",
        "o": "out_proj.weight",
        "up": "linear1.weight",
    },
    "encoder, tokens first": {"k": "in_proj_weight[16:32]", "o": "out_proj.weight", "down": "linear2.weight"},
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return model


def sample_of(model: nn.Module) -> dict[str, Tensor]:
    name = "x" if isinstance(model, Model) else "src"
    return {name: torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def draw(parameters: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)


@pytest.mark.parametrize("name", MODELS)
def test_roles(name: str) -> None:
    model = model_of(name)
    table = peftc.sites(model, sample=sample_of(model))
    roles: dict[str, str] = {}
    for site in table.sites:
        weight = site.states["w"].weight if "w" in site.states else None
        if weight is not None and "layer[0]" in site.path:
            rows = f"[{weight.rows.start}:{weight.rows.stop}]" if weight.rows else ""
            owner = weight.module.rpartition(".")[2]
            text = f"{owner}.{weight.attribute}" if weight.attribute == "weight" else weight.attribute
            roles[site.path.rpartition(".")[2]] = text + rows
    assert {role: roles.get(role) for role in ROLES[name]} == ROLES[name]
    assert not table.untraced


@pytest.mark.parametrize("equation", ["h += lora(x, r=2)", "w += lowrank(r=2)"])
@pytest.mark.parametrize("name", MODELS)
def test_laws(name: str, equation: str) -> None:
    """Identity, effect, gradients, fold, and removal bit for bit, of an edit at every Linear."""
    model = model_of(name)
    sample, original = sample_of(model), copy.deepcopy(model.state_dict())
    before = model(**sample)
    places = [f"layer[*].{place}" for place in ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down")]
    peftc.compile(f"peft 1 edit e at {' | '.join(places)} {{ {equation} }}", model, seed=0, sample=sample)
    assert torch.allclose(model(**sample), before, atol=1e-10)
    parameters = peftc.parameters(model)
    draw(parameters.values())
    after = model(**sample)
    assert (after - before).abs().max() > 1e-3
    after.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in parameters.values())
    with torch.no_grad():
        assert torch.allclose(model(**sample), after, atol=1e-10)
        folded = copy.deepcopy(model)
        report = peftc.fold(folded)
        assert not report.refused
        assert torch.allclose(folded(**sample), after, atol=1e-10)
    peftc.remove(model)
    assert torch.equal(model(**sample), before)
    assert all(torch.equal(value, original[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["a matrix of each head", "packed", "encoder"])
def test_a_lora_is_the_product_of_its_factors(name: str) -> None:
    """W' = W + B A, written into the rows of q by hand."""
    model = model_of(name)
    sample, reference = sample_of(model), copy.deepcopy(model)
    peftc.compile("peft 1 edit e at layer[0].attn.q { h += lora(x, r=2, alpha=2) }", model, seed=0, sample=sample)
    draw(peftc.parameters(model).values())
    down, up = sorted(peftc.parameters(model).values(), key=lambda p: p.shape[0])
    delta = up @ down  # (out, in)
    with torch.no_grad():
        if name == "encoder":
            reference.get_parameter("layers.0.self_attn.in_proj_weight")[:D] += delta
        elif name == "packed":
            reference.get_parameter("blocks.0.attn.wqkv")[0] += delta.view(H, K, D)
        else:
            reference.get_parameter("blocks.0.attn.wq").add_(delta.view(H, K, D).transpose(1, 2))
    assert torch.allclose(model(**sample), reference(**sample), atol=1e-10)


def test_other_calls_of_an_attention() -> None:
    """An edit of q, k and v in an attention that is called in another way than in the sample."""
    attention: Any = nn.MultiheadAttention(D, H, batch_first=True)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn, self.ff = nn.LayerNorm(D), copy.deepcopy(attention), Plain()

        def forward(self, x: Tensor, context: Tensor | None = None, weights: bool = False) -> Tensor:
            y = self.norm(x)
            c = y if context is None else context
            x = x + self.attn(y, c, c, need_weights=weights)[0]
            return x + self.ff(x)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor, context: Tensor | None = None, weights: bool = False) -> Tensor:
            for layer in self.layers:
                x = layer(x, context, weights)
            return x

    torch.manual_seed(0)
    model = Stack().double().eval()
    x, context = torch.randn(2, T, D, dtype=torch.float64), torch.randn(2, 7, D, dtype=torch.float64)
    spec = "peft 1 edit e at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v { h += lora(x, r=2) }"
    peftc.compile(spec, model, seed=0, sample={"x": x})
    draw(peftc.parameters(model).values())
    folded = copy.deepcopy(model)
    peftc.fold(folded)
    for arguments in ((x,), (x, context), (x, context, True), (x, None, True)):
        assert torch.allclose(model(*arguments), folded(*arguments), atol=1e-10)


class HalfBias(nn.Module):
    """The bias of a product counts half."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = parameter(D, 2 * D), parameter(2 * D), parameter(2 * D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        z = functional.gelu(torch.addmm(self.b1, x.flatten(0, 1), self.w1, beta=0.5))
        return torch.addmm(self.b2, z, self.w2).view(x.shape)


class HalfProduct(HalfBias):
    """The product counts half."""

    def forward(self, x: Tensor) -> Tensor:
        z = functional.gelu(torch.addmm(self.b1, x.flatten(0, 1), self.w1))
        return torch.addmm(self.b2, z, self.w2, alpha=0.5).view(x.shape)


def test_a_bias_with_a_factor_does_not_fold() -> None:
    """h = W x + b / 2: a scale of h is none of `b`."""
    model = Model(Packed, HalfBias).double().eval()
    sample = sample_of(model)
    peftc.compile("peft 1 edit e at layer[*].ffn.up { h *= vector(init=1) }", model, seed=0, sample=sample)
    report = peftc.fold(model)
    assert [refusal.reason for refusal in report.refused] == ["the model's code computes its bias"]


def test_a_product_with_a_factor_has_no_role() -> None:
    """h = W x / 2: folded into W, an edit of `down` would count half."""
    model = Model(Packed, HalfProduct).double().eval()
    table = peftc.sites(model, sample=sample_of(model))
    assert not [site.path for site in table.sites if site.path.endswith("ffn.down")]
    assert {module.module for module in table.unplaced} >= {"blocks.0.ff.w2", "blocks.1.ff.w2"}
