"""Verification reports every planted fault with its edit and site."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import peftc
from peftc.addressing.sites import Site
from peftc.installation import compilations, compiled_model
from peftc.planning import ir
from peftc.rewriting import insert
from peftc.verification import Verification, checks
from tests import zoo

QV = "peft 1\nedit e at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2, alpha=4) }\n"
Q = "peft 1\nedit e at layer[0].attn.q { h += lora(x, r=2, alpha=4) }\n"
SCALED = "peft 1\nedit e at layer[*].ffn { h += 3 * adapter(h, r=4, act=gelu) }\n"


def model(name: str = "llama", **options: Any) -> nn.Module:
    return zoo.build(name, torch.float64, **({"num_hidden_layers": 2} if name in ("llama", "bert") else {}), **options)


@pytest.fixture(autouse=True)
def own_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled with a fault stays in its test."""
    monkeypatch.setattr(compilations, "_recent", WeakKeyDictionary())


def codes(report: Verification) -> set[str]:
    return {finding.code for finding in report.findings}


def verified(spec: str, name: str = "llama", **options: Any) -> Verification:
    return peftc.verify(peftc.compile(spec, model(name, **options), seed=0))


def move_edits(monkeypatch: pytest.MonkeyPatch, change: Callable[[ir.SiteEdit], ir.SiteEdit]) -> None:
    """Moves edits to other sites, for the rewriter only."""
    original = compilations.regions_of

    def regions_of(site_edit: Iterable[ir.SiteEdit], anatomy: Any) -> Any:
        return original([change(one) for one in site_edit], anatomy)

    monkeypatch.setattr(compilations, "regions_of", regions_of)
    monkeypatch.setattr(compilations, "_recent", WeakKeyDictionary())


def rewritten(monkeypatch: pytest.MonkeyPatch, term: Callable[[Any, Any, Any], Any]) -> None:
    """Changes terms for the rewriter only: `term(assignment, original, term)`."""
    original = insert.EquationInserter.new_term

    def new_term(self: Any, value: Any) -> Any:
        return term(self, lambda t: original(self, t), value)

    monkeypatch.setattr(insert.EquationInserter, "new_term", new_term)


def test_no_findings_without_a_fault() -> None:
    for spec, name in ((QV, "llama"), (SCALED, "bert"), (Q, "gpt2")):
        report = verified(spec, name)
        assert report.ok, str(report)
        assert report.witnessed == report.sites


# Changes of a compiled model
# ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [("llama", "model.layers.1"), ("bart", "model.decoder.layers.1")])
def test_a_forward_of_an_instance_bypasses_the_edit(name: str, layer: str) -> None:
    """Also if the model has another output without the edit's effect."""
    compiled: Any = peftc.compile(QV, model(name), seed=0)
    linear = compiled.get_submodule(f"{layer}.self_attn.v_proj")
    vars(linear)["forward"] = functools.partial(nn.Linear.forward, linear)  # a plain assignment would run the edit, too
    report = peftc.verify(compiled)
    assert {"P602", "P604"} <= codes(report)
    for finding in report.findings:
        assert (finding.edit, finding.site, finding.state) == ("e", "decoder.layer[1].attn.self.v", "h")
    assert report.findings[0].size
    assert report.findings[0].size > 1e-6
    assert "`logits` differs by" in report.findings[0].message


def test_a_fast_path_without_gradients_bypasses_the_edit() -> None:
    """Like torch's own fast path for frozen encoder layers: only without gradients and hooks."""
    compiled: Any = peftc.compile(QV, model(), seed=0)
    linear = compiled.model.layers[0].self_attn.q_proj
    vars(linear)["forward"] = functools.partial(fast, linear)
    report = peftc.verify(compiled)
    assert codes(report) >= {"P602"}
    assert report.findings[0].site == "decoder.layer[0].attn.self.q"


def fast(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return type(module).forward(module, x) if torch.is_grad_enabled() else nn.Linear.forward(module, x)


def test_a_module_in_two_layers() -> None:
    compiled: Any = peftc.compile(Q, model(), seed=0)
    compiled.model.layers[1].self_attn.q_proj = compiled.model.layers[0].self_attn.q_proj
    report = peftc.verify(compiled)
    assert "P602" in codes(report)
    assert report.findings[0].site == "decoder.layer[0].attn.self.q"
    assert str(report.findings[0].module).startswith("model.layers.1")


def test_a_parameter_of_the_base_that_is_not_frozen() -> None:
    compiled: Any = peftc.compile(QV, model(), seed=0)
    compiled.lm_head.weight.requires_grad_(True)
    report = peftc.verify(compiled)
    assert codes(report) == {"P611"}
    assert report.findings[0].module == "lm_head.weight"


def test_an_edit_that_acts_before_its_site() -> None:
    compiled: Any = peftc.compile("peft 1\nedit e at layer[1].attn.q { h += lora(x, r=2) }\n", model(), seed=0)
    first = compiled.model.layers[0]
    vars(first)["later"] = compiled.model.layers[1]
    first.mlp.register_forward_hook(functools.partial(ahead, first))
    report = peftc.verify(compiled)
    assert "P605" in codes(report)
    outcome = next(finding for finding in report.findings if finding.code == "P605")
    assert (outcome.site, outcome.module) == ("decoder.layer[1].attn.self.q", "model.layers.0.mlp")


def ahead(layer: Any, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    own = [p for n, p in vars(layer)["later"].named_parameters() if "lora" in n]
    return result + sum(p.sum() for p in own) if own else result


# Faults of the rewriter
# ---------------------------------------------------------------------------------------


def test_an_edit_that_is_scaled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(monkeypatch, lambda _, rewrite, t: rewrite(t) ** 2 if isinstance(t, ir.Constant) else rewrite(t))
    report = verified(SCALED, "bert")
    assert codes(report) == {"P602"}
    assert (report.findings[0].site, report.findings[0].state) == ("encoder.layer[0].ffn", "h")


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_edit_that_is_wrong_at_init(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding names the first state after it that differs."""
    rewritten(monkeypatch, lambda _, rewrite, t: rewrite(t) ** 2 if isinstance(t, ir.Constant) else rewrite(t))
    for step in ("layer[0].ffn", "layer[1].attn.heads"):
        report = verified(f"peft 1\nedit e at layer[*].attn.o {{ h += 0 * h }}\nedit f at {step} {{ h *= 3 }}\n", name)
        (finding,) = [one for one in report.findings if one.code == "P602"]
        site = str(finding.site).partition(".")[2].replace(".self", "")
        assert (finding.edit, site, finding.state) == ("f", step, "h")


def test_an_edit_without_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(monkeypatch, lambda _, rewrite, t: 1.0 if isinstance(t, ir.Constant) else rewrite(t))
    assert codes(verified(SCALED, "bert")) == {"P602"}


def test_an_edit_that_reads_x_in_place_of_h(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "peft 1\nedit e at layer[*].ffn { h += adapter(h, r=4) + vector(init=0) * x }\n"
    assert verified(spec, "bert").ok

    def swap(_: Any, rewrite: Any, t: Any) -> Any:
        reads = isinstance(t, ir.FormCall) and isinstance(t.input, ir.Read)
        return rewrite(replace(t, input=replace(t.input, state="x"))) if reads else rewrite(t)

    rewritten(monkeypatch, swap)
    report = verified(spec, "bert")
    assert codes(report) == {"P602"}
    assert report.findings[0].site == "encoder.layer[0].ffn"


def test_an_edit_at_another_site(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {site.path: site for site in peftc.sites(model()).sites}

    def change(site_edit: ir.SiteEdit) -> ir.SiteEdit:
        other = table[site_edit.site.path.removesuffix("q") + "v"]
        return replace(site_edit, site=replace(other, path=site_edit.site.path, steps=site_edit.site.steps))

    move_edits(monkeypatch, change)
    report = verified("peft 1\nedit e at layer[*].attn.q { h *= scalar(init=2) }\n")
    assert codes(report) >= {"P602"}


def test_an_edit_before_a_dropout_in_place_of_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {site.path: site for site in peftc.sites(model("bert")).sites}

    def change(site_edit: ir.SiteEdit) -> ir.SiteEdit:
        states = {**site_edit.site.states, "h": table[f"{site_edit.site.path}.down"].states["h"]}
        return replace(site_edit, site=replace(site_edit.site, states=states))

    assert verified(SCALED, "bert", dropout=0.3).ok
    move_edits(monkeypatch, change)
    report = verified(SCALED, "bert", dropout=0.3)
    assert codes(report) == {"P610"}
    assert "dropout as a factor" in report.findings[0].message


def test_a_detached_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(self: Any, rewrite: Any, t: Any) -> Any:
        return self.method("detach", rewrite(t)) if isinstance(t, ir.FormCall) and t.input is not None else rewrite(t)

    rewritten(monkeypatch, detached)
    report = verified("peft 1\nedit e at layer[*].ffn { h += scalar(init=1) * adapter(h, r=4, act=gelu) }\n", "bert")
    assert codes(report) == {"P603"}


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_rows_of_another_role(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan itself is wrong. Verification reads the same rows, but the attention gets other
    values.
    """
    other = {"q": "k", "k": "v", "v": "q"}[role]
    original = compiled_model.base_analysis

    def base_analysis(*args: Any, **kwargs: Any) -> Any:
        report, state = original(*args, **kwargs)
        sites = {site.path: site for site in report.table.sites}
        table = replace(report.table, sites=tuple(wrong(site, sites) for site in report.table.sites))
        return replace(report, table=table), state

    def wrong(site: Site, sites: dict[str, Site]) -> Site:
        return (
            replace(site, states=sites[site.path[:-1] + other].states)
            if site.path.endswith(f"attn.self.{role}")
            else site
        )

    monkeypatch.setattr(compiled_model, "base_analysis", base_analysis)
    report = verified(f"peft 1\nedit e at layer[*].attn.{role} {{ h += lora(x, r=2) }}\n", "gpt2")
    assert codes(report) == {"P606"}
    assert report.findings[0].site == f"decoder.layer[0].attn.self.{role}"


# Without edits, and in the weights
# ----------------------------------------------------------------------------------


def test_edits_that_leave_something_behind() -> None:
    base: Any = model()
    compiled = peftc.compile(QV, model(), seed=0)
    assert peftc.verify(compiled, base=base).ok
    with torch.no_grad():
        base.lm_head.weight[0, 0] += 1e-12
    assert codes(peftc.verify(compiled, base=base)) == {"P608"}


def test_disabled_edits_that_act(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(checks, "disabled", lambda model: nullcontext())
    spec = "peft 1\nedit e at layer[*].attn.q { h *= scalar(init=2) }\n"
    assert codes(verified(spec)) == {"P607"}


def test_a_fold_that_changes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(model: Any) -> Any:
        report = peftc.fold(model)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)
        return report

    monkeypatch.setattr(checks, "fold", fold)
    assert codes(verified(QV)) == {"P609"}


# Models that cannot be verified
# -----------------------------------------------------------------------------------------


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        skeleton = nn.ModuleList([nn.Linear(2, 2)])
    compiled: Any = peftc.compile(QV, model(), seed=0)
    compiled.model.layers[0].mlp.extra = skeleton
    with pytest.raises(peftc.PeftcError, match="P601"):
        peftc.verify(compiled)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    compiled: Any = peftc.compile(QV, model(), seed=0)
    compiled.lock = (i for i in ())
    with pytest.raises(peftc.PeftcError, match="P601"):
        peftc.verify(compiled)


def test_sites_that_no_hook_reaches_are_not_claimed() -> None:
    """The model's stack passes positions to the form; no hook reaches them."""
    report = verified("peft 1\nedit e at layer[*] { h += reft(h, r=2, first=2) }\n")
    assert report.ok
    assert (report.witnessed, report.sites) == (0, 2)
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["outputs equal the equations"] == "not checked"
    assert "2 × its form selects positions" in str(report)
