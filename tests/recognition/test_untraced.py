"""Modules that cannot be traced: nothing in them has a site, the plan names them with the reason,
and a selector that may mean something in them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.compiled_model import analyse_base, plan_on
from peftc.planning.report.plan import Plan
from peftc.semantics.spec_argument import flat_spec

D, H, T = 8, 2, 6
functional: Any = nn.functional


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.q(x), self.k(context), self.v(context)))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GridAttention(Attention):
    """Wan 2.1: positions from grid sizes that are the values of a tensor."""

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        frames, height, width = grid.tolist()
        return super().forward(x[:, : frames * height * width], x)


class GridNetwork(nn.Module):
    """A feed-forward network that branches on values, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.LayerNorm(2 * D)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return self.down(self.norm(torch.relu(self.up(x)))) * grid.tolist()[0]


class Chooser(nn.Module):
    """It returns indices, not hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(D, 1)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return self.score(x).squeeze(-1).topk(grid.tolist()[0]).indices


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return self.lin(x) * grid.tolist()[0]


class Block(nn.Module):
    def __init__(self, inner: nn.Module, where: str = "") -> None:
        super().__init__()
        self.inner, self.where, self.cross = inner, where, Attention()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(D) for _ in range(3))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, grid: Tensor, context: Tensor) -> Tensor:
        if self.where == "beside":
            return x + self.cross(self.norm1(x), context).take_along_dim(self.inner(x, grid)[..., None], 1).sum(1, True)
        if self.where == "instead":
            x = self.inner(x, grid)
        elif self.where == "inside":
            context = self.inner(context, grid)
        elif self.where == "in the layer":  # its own code branches on values
            x = x * grid.tolist()[0]
        else:
            x = x + self.inner(self.norm1(x), grid)
        x = x + self.cross(self.norm2(x), context)
        return x + self.down(torch.relu(self.up(self.norm3(x))))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, grid: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, grid, context)
        return x


REASON = "the number of segments is known only at run time"
SAMPLE = {"x": torch.randn(1, T, D), "grid": torch.tensor([1, 2, 3]), "context": torch.randn(1, 3, D)}


def model(inner: Callable[[], nn.Module], where: str = "") -> Model:
    torch.manual_seed(0)
    return Model(*(Block(inner(), where) for _ in range(2)))


def words(table: peftc.SiteTable) -> set[str]:
    return {".".join(name for name, _ in site.steps[2:]) for site in table.sites if len(site.steps) > 2}


def lora_at(selector: str) -> str:
    return f"peft 1\nedit e at {selector} {{ h += lora(x, r=2) }}\n"


def refused(selector: str, of: Model) -> list[Diagnostic]:
    with pytest.raises(PeftcError) as excinfo:
        peftc.plan(lora_at(selector), of, sample=SAMPLE)
    return list(excinfo.value.diagnostics)


@pytest.mark.parametrize("inner", [GridAttention, GridNetwork])
@pytest.mark.parametrize("where", ["", "instead"])
def test_an_untraced_module_has_no_site(inner: Callable[[], nn.Module], where: str) -> None:
    table = peftc.sites(model(inner, where), sample=SAMPLE)
    assert "mixer" not in words(table)
    assert not any(site.module.split(".")[2:3] == ["inner"] for site in table.sites)
    assert [m.module for m in table.untraced] == ["blocks.0.inner", "blocks.1.inner"]
    assert all(m.reason.startswith(f"{REASON}, at ") and "test_untraced.py:" in m.reason for m in table.untraced)
    if not where:  # the sub-layers around it keep their sites
        assert {"attn.cross", "attn.cross.q", "ffn", "ffn.up", "ffn.down"} <= words(table)


@pytest.mark.parametrize(
    ("inner", "selector"),
    [
        (GridAttention, "layer[*].attn.q"),
        (GridAttention, "layer[*].attn"),
        (GridAttention, "layer[*].attn.self.q"),
        (GridAttention, "layer[*].ffn | layer[1].attn.v"),
        (GridAttention, "layer[*].attn.q - layer[0].attn.q"),
        (GridNetwork, "layer[*].ffn"),
        (GridNetwork, "layer[*].mixer"),
        (GridNetwork, "layer[*].norm"),
    ],
)
def test_selectors_of_sites_that_may_be_in_it_are_refused(inner: Callable[[], nn.Module], selector: str) -> None:
    (diagnostic,) = refused(selector, model(inner))
    assert diagnostic.code == "P214"
    assert "inner" in diagnostic.message
    assert any(inner.__name__ in note and REASON in note for note in diagnostic.notes)
    assert diagnostic.span is not None
    assert lora_at(selector)[diagnostic.span.start : diagnostic.span.end] in ("attn", "ffn", "mixer", "norm")


@pytest.mark.parametrize(
    ("inner", "selector"),
    [
        (GridAttention, "layer[*].attn.cross.q"),
        (GridAttention, "layer[*].ffn.up"),
        (GridNetwork, "layer[*].attn.q"),
        (GridNetwork, "layer[*]"),
    ],
)
def test_selectors_of_other_sites_are_planned_with_a_warning(inner: Callable[[], nn.Module], selector: str) -> None:
    text = f"{lora_at(selector)}edit f at {selector} {{ h *= vector(init=1) }}\n"
    plan = plan_on(analyse_base(model(inner), SAMPLE), flat_spec(text))
    (warning,) = plan.warnings  # once, for the first that meets it
    assert (warning.code, warning.severity) == ("P215", "warning")
    assert any("blocks.{0..1}.inner" in note and inner.__name__ in note for note in warning.notes)
    assert [m.module for m in plan.plan.unread] == ["blocks.0.inner", "blocks.1.inner"]
    assert "not traced" in str(plan.plan)
    assert Plan.model_validate_json(plan.plan.model_dump_json()) == plan.plan


def test_a_glob_selects_its_modules() -> None:
    plan = peftc.plan(lora_at('"blocks.*.inner.q"'), model(GridAttention), sample=SAMPLE)
    assert [site.module for site in plan.edits[0].sites] == ["blocks.0.inner.q", "blocks.1.inner.q"]


def test_layers_without_it_can_be_edited() -> None:
    """One layer's attention is traced, the other's is not: a selector of the first layer misses
    nothing.
    """

    class Read(Attention):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x, x)

    mixed = Model(Block(Read()), Block(GridAttention()))
    assert refused("layer[*].attn.q", mixed)[0].code == "P214"
    plan = peftc.plan(lora_at("layer[0].attn.q"), mixed, sample=SAMPLE)
    assert [site.module for site in plan.edits[0].sites] == ["blocks.0.inner.q", "blocks.0.cross.q"]


def test_a_context_from_an_untraced_module() -> None:
    """An untraced module computes the context of the cross-attention; q, k and v are still the
    Linears of the cross-attention.
    """
    table = peftc.sites(model(Gate, "inside"), sample=SAMPLE)
    modules = {site.steps[-1][0]: site.module for site in table.sites if site.root == "blocks.0" and "w" in site.states}
    assert {modules[role] for role in "qkvo"} == {f"blocks.0.cross.{role}" for role in "qkvo"}
    assert [m.roles for m in table.untraced] == [frozenset(), frozenset()]


def test_a_module_that_returns_indices_hides_no_site() -> None:
    table = peftc.sites(model(Chooser, "beside"), sample=SAMPLE)
    assert [m.roles for m in table.untraced] == [frozenset(), frozenset()]
    peftc.plan(lora_at("layer[*].attn.q"), model(Chooser, "beside"), sample=SAMPLE)


def test_an_untraced_layer_is_refused_not_skipped() -> None:
    mixed = Model(Block(Gate(), "inside"), Block(GridNetwork(), "in the layer"))
    diagnostics = refused("layer[*].attn.q", mixed)
    assert [d.code for d in diagnostics] == ["P214"]
    assert "blocks.1" in diagnostics[0].message


class Softmaxes(nn.Module):
    """Queries and keys each have a softmax, and a third product changes the state between them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        state = self.k(x).softmax(1).transpose(1, 2) @ self.v(x)
        return self.q(x).softmax(-1) @ (state @ state)


@pytest.mark.parametrize("selector", ["layer[*].attn", "layer[*].attn.q", "layer[*].attn.self.q", "layer[*].ffn"])
def test_selectors_of_sites_that_may_be_in_untraced_layers_are_refused(selector: str) -> None:
    """Also in a model whose only other site is an embedding."""

    class Layer(Attention):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x if x.sum().item() > 1e9 else x + super().forward(x, x)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(9, D), nn.ModuleList(Layer() for _ in range(2))

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    spec = f"peft 1\nedit e at {selector} {{ h += lora(x, r=2) }}\n"
    with pytest.raises(PeftcError, match="P214"):
        peftc.plan(spec, Text(), sample={"ids": torch.ones(1, T, dtype=torch.long)})


def test_an_unknown_attention_is_no_mixer() -> None:
    of = model(Softmaxes)
    table = peftc.sites(of, sample=SAMPLE)
    assert "mixer" not in words(table)
    assert [(m.module, m.roles) for m in table.untraced[:1]] == [("blocks.0.inner", frozenset({"attn"}))]
    assert refused("layer[*].attn.q", of)[0].code == "P214"


class Computed(nn.Module):
    """An attention whose queries have a matrix that its code computes of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(D, D)) for _ in range(2))
        self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        projected = functional.linear(x, self.one * self.other), self.k(x), self.v(x)
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in projected)
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_role_missing_in_one_of_two_attentions_is_a_warning() -> None:
    warnings = plan_on(analyse_base(model(Computed), SAMPLE), flat_spec(lora_at("layer[*].attn.q"))).warnings
    assert [(warning.code, warning.severity) for warning in warnings] == [("P204", "warning"), ("P217", "warning")]
    assert any("attn.self" in note for note in warnings[0].notes)
    assert [note.split("`")[1] for note in warnings[1].notes] == ["blocks.{0..1}.inner.{one, other}"]


class Matrices(nn.Module):
    """An attention with one stacked parameter and no child modules."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvo = nn.Parameter(torch.randn(4, D, D))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        q, k, v = (functional.linear(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in self.qkvo[:3])
        return functional.linear(
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), self.qkvo[3]
        )


class GridMatrices(Matrices):
    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return super().forward(x, grid) * grid.tolist()[0]


def test_a_module_without_children_is_traced() -> None:
    table = peftc.sites(model(Matrices), sample=SAMPLE)
    assert not table.untraced
    assert {"attn.self", "attn.cross", "ffn.up"} <= words(table)
    assert all(index is None for site in table.sites for name, index in site.steps if name == "ffn")  # only one


def test_a_module_without_children_that_cannot_be_traced_has_no_site() -> None:
    table = peftc.sites(model(GridMatrices), sample=SAMPLE)
    assert [(m.module, m.roles) for m in table.untraced[:1]] == [("blocks.0.inner", frozenset({"attn"}))]
    assert "attn.self" not in words(table)
    assert all(index is None for site in table.sites for name, index in site.steps if name == "ffn")


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x)
        return x + self.down(self.up(x).relu())


class Head(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh())


class HeadsByName(nn.Module):
    """Z-Image: the model's own code depends on values, and calls one of several heads."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers, self.heads = nn.ModuleList([PlainLayer(), PlainLayer()]), nn.ModuleDict({"2-1": Head(features)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * float(x.abs().max().item() > 0)
        for layer in self.layers:
            x = layer(x)
        return self.heads["2-1"](x)


def test_a_head_whose_result_has_other_features_holds_no_layer() -> None:
    spec, sample = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }", {"x": torch.randn(2, T, D)}
    peftc.compile(spec, model := HeadsByName(3), sample=sample)
    assert len(peftc.parameters(model)) == 4
    with pytest.raises(PeftcError) as error:  # its result may be added to the stream
        peftc.compile(spec, HeadsByName(D), sample=sample)
    assert [d.code for d in error.value.diagnostics] == ["P214"]
