"""Weights whose role is not known: the table lists them, and a selector that leaves them out warns.
Layers that differ by design have no such weights, and give no warnings.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.compiler import plan_edits
from peftc.semantics.spec_argument import flat_spec
from tests.layers import Attention, Network

D, H, T = 8, 2, 6
functional: Any = nn.functional


class Block(nn.Module):
    """A plain layer, and what else stands in it."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.attn, self.mlp = kind, Attention(D), Network(D)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(D) for _ in range(3))
        if kind in ("beside", "in a row", "cross"):
            self.other = Attention(D)
        if kind == "conv":
            self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)
        if kind == "network beside":
            self.other_mlp = Network(D)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "beside":  # for the next layer, and not added to what this one returns
            context = self.other(context, x) * 2
        if self.kind == "network beside":
            context = self.other_mlp(x).mean(1, keepdim=True).expand_as(context)
        attended = self.attn(self.norm1(x))
        x = x + (self.other(attended, x) if self.kind == "in a row" else attended)
        if self.kind == "cross":
            x = x + self.other(self.norm3(x), context)
        if self.kind == "conv":
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x)), context


class Model(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x, context = block(x, context)
        return x + context.mean()


class Plain(nn.Module):
    """A loop of layers, then the same blocks without residual connections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.others = (
            nn.ModuleList(nn.ModuleList([Attention(D), Network(D)]) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attn, mlp in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x) + x
            x = mlp(x) + x
        for attn, _ in self.others:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x)
        return x


INPUTS = {"x": torch.randn(1, T, D), "context": torch.randn(1, 3, D)}


def lora_at(selector: str) -> str:
    return f"peft 1\nedit e at {selector} {{ h += lora(x, r=2) }}\n"


def warned(model: nn.Module, selector: str, sample: dict[str, Tensor] = INPUTS) -> set[str]:
    """The modules that the warnings of a selector name, with `*` for the layer."""
    planned = plan_edits(flat_spec(lora_at(selector), None, ()), model, sample)
    lines = [line for d in planned.warnings if d.code == "P217" for line in d.notes]
    return {line.split("`")[1] for line in lines}


@pytest.mark.parametrize(
    ("kind", "selector", "modules"),
    [
        ("beside", "layer[*].attn.q", {"blocks.{0..1}.other.{q, k, v, o}"}),
        ("network beside", "layer[*].ffn.up", {"blocks.{0..1}.other_mlp.{up, down}"}),
        ("in a row", "layer[*].attn.q", {"blocks.{0..1}.other"}),
    ],
)
def test_what_a_layer_leaves_out_is_named(kind: str, selector: str, modules: set[str]) -> None:
    assert warned(Model(kind, kind), selector) == modules


@pytest.mark.parametrize("selector", ["layer[*].attn.q", "layer[*].ffn.up", "layer[*].ffn", "layer[*]"])
def test_layers_that_differ_by_design_give_no_warning(selector: str) -> None:
    model = Model("", "cross", "conv", "")
    table = peftc.sites(model, sample=INPUTS)
    assert (*table.unplaced, *table.untraced) == ()
    assert warned(model, selector) == set()


class Products(Block):
    """A feed-forward part by functions that are no known product of two matrices."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.w1, self.w2 = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm1(x))
        y = self.norm2(x)
        match self.kind:
            case "chain":
                y = torch.linalg.multi_dot([y.flatten(0, 1), self.w1, self.w2]).view(y.shape)
            case "factor":
                y = torch.addmm(y.flatten(0, 1) @ self.w1, y.flatten(0, 1), self.w2, alpha=0.5).view(y.shape)
            case _:
                y = functional.bilinear(y, y, self.w1[:, :, None] * self.w2[:, None])
        return x + y, context


@pytest.mark.parametrize("kind", ["chain", "factor", "bilinear"])
def test_parameters_of_an_unknown_product_are_named(kind: str) -> None:
    """In one of two layers: a selector of the other's role would leave them out silently."""
    model = Model("")
    model.blocks.append(Products(kind))
    assert warned(model, "layer[*].ffn.up") == {"blocks.1.w1", "blocks.1.w2"}
    assert warned(model, "layer[*].attn.q") == set()


def test_blocks_in_no_layer_are_named() -> None:
    sample = {"x": torch.randn(1, T, D)}
    assert warned(Plain(), "layer[*].attn.q", sample) == {"others.{0..1}.0"}
    assert warned(Plain(), "layer[*].ffn", sample) == set()


class Middle(Model):
    """A block of the layers' class that is no element of a list."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.middle = Block()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.middle(super().forward(x, context), context)[0]


def test_a_block_beside_the_lists_is_a_layer() -> None:
    """`layer[*]` selects it, nothing is left out, and the layers in lists keep their paths."""
    model = Middle()
    assert warned(model, "layer[*].attn.q") == set()
    sites = peftc.sites(model, sample=INPUTS).sites
    assert {site.path: site.module for site in sites if site.path.endswith("self.q")} == {
        "encoder.layer[0].attn.self.q": "blocks.0.attn.q",
        "encoder.layer[1].attn.self.q": "blocks.1.attn.q",
        "middle.layer[0].attn.self.q": "middle.attn.q",
    }


@pytest.mark.parametrize(
    "selector",
    [
        "layer[0..1].attn.q",  # the layers that are meant
        'layer[*].attn.q | "others.*.0.q"',
    ],
)
def test_a_selector_that_says_what_it_means_does_not_warn(selector: str) -> None:
    assert warned(Plain(), selector, {"x": torch.randn(1, T, D)}) == set()


def test_the_warning_comes_before_a_change() -> None:
    model = Model("beside", "beside")
    before = {name: type(module) for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", peftc.PeftcWarning)
        with pytest.raises(peftc.PeftcWarning, match="P217"):
            peftc.compile(lora_at("layer[*].attn.q"), model, sample=INPUTS)
        peftc.compile(lora_at("layer[*].ffn.up"), model, sample=INPUTS)
        peftc.remove(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
