"""Parts of a sub-layer side by side: heads that are modules of a list, and branches of one
structure that are summed. Each has its roles, and edits act on all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import peftc
from tests.layers import Network

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
