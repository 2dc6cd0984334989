"""The second coverage benchmark notices a wrong role, a bypassed edit, and a wrong fold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from benchmarks.foreign_checks.checks import checked
from benchmarks.foreign_checks.references import expanded, parse
from benchmarks.foreign_models.case import Case, Stack


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sample() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 8)}


QKV = {f"attn.{role}": f"layers.{{i}}.qkv.weight[{8 * n}:{8 * n + 8}]" for n, role in enumerate("qkv")}
ATTENTION = {**QKV, "attn.o": "layers.{i}.o.weight", "attn.norm": "layers.{i}.norm.weight"}
FEED_FORWARD = {f"ffn.{role}": f"layers.{{i}}.{role}.weight" for role in ("up", "down", "norm")}
ATTENDING = Case("attending", "test", lambda: Model(Attention), sample, (Stack((0, 1), ATTENTION),))
FEEDING = Case("feeding", "test", lambda: Model(FeedForward), sample, (Stack((0, 1), FEED_FORWARD),))


@pytest.mark.parametrize("case", [ATTENDING, FEEDING], ids=lambda case: case.name)
def test_a_right_table_passes(case: Case) -> None:
    result = checked(case, "abcd")
    assert result["verdict"] == "pass", result
    assert result["edits"]["a"].get("reason", "").startswith("P2") == (case is FEEDING)  # no queries: refused
    assert not any("not compared" in note for e in result["edits"].values() for note in e.get("notes", ()))


class TiedFeedForward(FeedForward):
    """Another module has the weight of `up`, too: what `up` computes is edited, and that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.gate.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.gelu(self.gate(y)) * self.up(y))


def test_an_edit_of_a_tied_module_is_none_of_its_weight() -> None:
    roles = FEED_FORWARD | {"ffn.gate": "layers.{i}.gate.weight"}
    result = checked(Case("tied", "test", lambda: Model(TiedFeedForward), sample, (Stack((0, 1), roles),)), "b")
    assert result["verdict"] == "pass", result


def other(case: Case, **roles: str) -> Case:
    """The case with another table."""
    table = {**case.stacks[0].roles, **{name.replace("_", "."): text for name, text in roles.items()}}
    return replace(case, stacks=(replace(case.stacks[0], roles={n: t for n, t in table.items() if t}),))


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        (other(ATTENDING, attn_q=QKV["attn.k"], attn_k=QKV["attn.q"]), "wrong"),
        (other(ATTENDING, attn_q="layers.{i}.qkv.weight[0:7]"), "wrong"),
        (other(ATTENDING, attn_o=""), "wrong"),  # a site that the table lacks
        (other(FEEDING, ffn_gate="layers.{i}.norm.bias"), "missing"),
        (replace(ATTENDING, stacks=(replace(ATTENDING.stacks[0], layers=(1, 0)),)), "wrong"),  # their order
    ],
)
def test_a_wrong_table_is_noticed(case: Case, verdict: str) -> None:
    result = checked(case, "")
    assert result["roles"]["verdict"] == verdict
    assert result["verdict"] == ("incomplete" if verdict == "missing" else "wrong")


def test_values_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference follows the table, also where the roles are not compared."""
    from benchmarks.foreign_checks import checks, roles

    wrong = other(ATTENDING, attn_q=QKV["attn.k"], attn_k=QKV["attn.q"])
    right = checks.compared

    def swapped(case: Case, model: nn.Module, table: Any) -> roles.Comparison:
        comparison = right(ATTENDING, model, table)
        entries = {(e.layer, e.role): e for e in roles.entries(wrong, model)}
        comparison.sites = {path: entries[e.layer, e.role] for path, e in comparison.sites.items()}
        return comparison

    monkeypatch.setattr(checks, "compared", swapped)
    edit = checked(ATTENDING, "a")["edits"]["a"]
    assert edit["verdict"] == "wrong"
    assert "values: off by" in edit["reason"]
    assert "gradients: off by" in edit["reason"]


def test_a_bypassed_edit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_with_a_fast_path(text: str, model: nn.Module, **options: Any) -> nn.Module:
        right(text, model, **options)
        linear = model.get_submodule("layers.0.qkv")
        linear.register_forward_hook(
            lambda m, args, out: out if torch.is_grad_enabled() else F.linear(*args, m.weight, m.bias)
        )
        return model

    right = peftc.compile
    monkeypatch.setattr(peftc, "compile", compile_with_a_fast_path)
    edit = checked(ATTENDING, "a")["edits"]["a"]
    assert edit["verdict"] == "wrong"
    assert "modes: eval and no_grad differ" in edit["reason"]


def test_a_wrong_fold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(model: nn.Module) -> None:
        right(model)
        with torch.no_grad():
            model.get_parameter("layers.0.qkv.weight")[0, 0] += 1e-6

    right = peftc.fold
    monkeypatch.setattr(peftc, "fold", fold)
    edit = checked(ATTENDING, "a")["edits"]["a"]
    assert edit["verdict"] == "wrong"
    assert "fold: off by" in edit["reason"]


def test_references_are_entries() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(2, 3, 4, 5))
    stored = torch.arange(120).view(2, 3, 4, 5)
    one = parse("w@1(d h k -> h k | d)[2:4, 6:7]", model)
    expected = stored[1].permute(1, 2, 0).reshape(20, 3)[[2, 3, 6]]
    assert torch.equal(one.matrix(model), expected)
    assert list(expanded(("b.{i}.{0..1}.w", "c"), "3.x")) == ["b.3.x.0.w", "b.3.x.1.w", "c"]
    for text in ("w@2", "v", "w[0:3]", "w(a b -> b | a)"):
        with pytest.raises(ValueError, match=r"w|v"):
            parse(text, model)
