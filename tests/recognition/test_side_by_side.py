"""Parts of a sub-layer side by side: heads that are modules of a list, and branches of one
structure that are summed. Each has its roles, and edits act on all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers, Network

D, H, T = 8, 2, 5
functional: Any = nn.functional


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D // H, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * (D // H) ** -0.5
        return scores.softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head() for _ in range(H)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Branches(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return sum(branch(x) for branch in self.branches)  # pyright: ignore[reportReturnType]


class Experts(nn.Module):
    """Networks of one structure that a router weighs: one feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList(Network(D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # pyright: ignore


class Block(nn.Module):
    def __init__(self, attention: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm1, self.norm2 = attention, network, nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.block(branches) for _ in range(2))

    def block(self, branches: bool) -> Block:
        if branches:
            return Block(Branches(Heads(), Heads(), Heads()), Branches(Network(D), Network(D)))
        return Block(Heads(), Network(D))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


X = torch.randn(2, T, D)


def paths(model: nn.Module, last: str) -> dict[str, str]:
    """The sites of a role in the first layer, with their modules there."""
    sites = [site for site in peftc.sites(model, sample={"x": X}).sites if site.steps[-1][0] == last]
    first = [(site.path.partition("layer[0].")[2], site.module) for site in sites if "layer[0]." in site.path]
    return {path: module.removeprefix("blocks.0.") for path, module in first}


def test_each_head_has_its_roles() -> None:
    model = Model(branches=False)
    names = {"q": "query", "k": "key", "v": "value"}
    for role, name in names.items():
        assert paths(model, role) == {f"attn.self.{role}[{i}]": f"attn.heads.{i}.{name}" for i in range(H)}
    assert peftc.sites(model, sample={"x": X}).unplaced == ()


def test_each_branch_is_a_sub_layer() -> None:
    model = Model(branches=True)
    assert paths(model, "o") == {f"attn.self[{i}].o": f"attn.branches.{i}.proj" for i in range(3)}
    assert paths(model, "up") == {f"ffn[{i}].up": f"mlp.branches.{i}.up" for i in range(2)}
    assert paths(model, "add").keys() == {*(f"attn.self[{i}].add" for i in range(3)), "ffn[0].add", "ffn[1].add"}


def test_networks_that_a_router_weighs_are_one_part() -> None:
    model = Model(branches=False)
    for block in model.blocks:
        block.mlp = Experts()
    assert {path.partition(".")[0] for path in paths(model, "add")} == {"attn", "ffn"}


def test_edits_of_heads_and_branches_are_those_of_the_equations() -> None:
    for branches in (False, True):
        model = Model(branches).eval()
        spec = """peft 1
        edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }
        edit ffn at layer[*].ffn { h += adapter(x, r=2) }
        edit attn at layer[*].attn { h = h + adapter(h, r=2) }
        """
        peftc.compile(spec, model, seed=0, sample={"x": X})
        result = peftc.verify(model)
        assert result.ok, str(result)


class Message(nn.Module):
    """LoFTR: what an attention returns stands beside the stream in front of the ffn."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.merge = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(2 * D, 3 * D, bias=False), nn.ReLU(True), nn.Linear(3 * D, D, bias=False))
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("nld,nsd->nls", self.q_proj(x), self.k_proj(x))
        message = self.norm1(self.merge(torch.einsum("nls,nsd->nld", scores.softmax(-1), self.v_proj(x))))
        return x + self.norm2(self.mlp(torch.cat([x, message][:: self.order], dim=2)))


@pytest.mark.parametrize("order", [1, -1])
def test_an_ffn_of_an_attention_beside_the_stream(order: int) -> None:
    torch.manual_seed(0)
    model, x = Layers(Message(order), Message(order)).double().eval(), torch.randn(2, T, D, dtype=torch.float64)
    places = {site.path.partition("layer[0].")[2]: site.module for site in peftc.sites(model, sample={"x": x}).sites}
    roles = {"attn.self.q": "q_proj", "attn.self.o": "merge", "ffn.up": "mlp.0", "ffn.down": "mlp.2"}
    assert places.items() >= {role: f"layers.0.{module}" for role, module in roles.items()}.items()
    spec = """peft 1
    edit a at layer[*].attn { h += linear(h, bias=false) }
    edit f at layer[*].ffn { h += linear(x, bias=false) }
    """
    peftc.compile(spec, model, seed=0, sample={"x": x})
    parameters = {name: nn.init.normal_(p).detach() for name, p in peftc.parameters(model).items()}
    edited = model(x)
    peftc.remove(model)
    for i, layer in enumerate(model.layers):
        own = {name[0]: p for name, p in parameters.items() if f"layer[{i}]" in name}
        layer.merge.register_forward_hook(lambda _, args, h, w=own["a"]: h + h @ w.T)  # pyright: ignore
        seen: list[Tensor] = []
        layer.mlp.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))  # pyright: ignore
        layer.norm2.register_forward_hook(lambda _, args, h, w=own["f"], seen=seen: h + seen.pop() @ w.T)  # pyright: ignore
    torch.testing.assert_close(edited, model(x), rtol=0, atol=1e-10)
