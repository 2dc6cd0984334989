"""Parallel attention and feed-forward, summed before the residual: each equation applies to its own
sub-layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import peftc
from peftc.planning import ir
from peftc.verification import Verification
from tests.verification.test_faults import move_edits

SIZE: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 2}
WIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DEEP: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
NARROW: dict[str, Any] = {"intermediate_size": 48, "max_position_embeddings": 64}
MODELS: dict[str, Callable[..., Any]] = {
    "falcon": lambda **o: transformers.FalconForCausalLM(transformers.FalconConfig(**SIZE, **WIDE, **o)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZE, **WIDE, **NARROW)),
    "gptj": lambda: transformers.GPTJForCausalLM(transformers.GPTJConfig(**SIZE, **DEEP)),
    "codegen": lambda: transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**SIZE, **DEEP)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZE, **WIDE, **NARROW)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZE, **WIDE, **NARROW)),
}
SPECS = {
    "results": ("attn { h += adapter(h, r=4) }", "ffn { h += adapter(h, r=4) }"),
    "residual": ("attn { h += adapter(res, r=4) }", "ffn { h += 2 * adapter(h, r=4) }"),
    "total": ("attn.add { h += adapter(h, r=4) }", "ffn { h += adapter(res, r=4) }"),
}


def model(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](**options).double().eval()


def verified(name: str, kind: str, **options: Any) -> Verification:
    attn, ffn = SPECS[kind]
    spec = f"peft 1\nedit a at layer[*].{attn}\nedit f at layer[*].{ffn}\n"
    compiled = peftc.compile(spec, model(name, **options), seed=0)
    with torch.no_grad():
        for value in peftc.parameters(compiled).values():
            value.normal_(std=0.3)
    return peftc.verify(compiled)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", MODELS)
def test_edits_of_both_sub_layers(name: str, kind: str) -> None:
    report = verified(name, kind)
    assert report.ok, str(report)
    assert report.witnessed == report.sites == 4
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["outputs equal the equations, parameters moved"] == "holds"


@pytest.mark.parametrize("name", ["falcon", "gptj"])
def test_an_edit_of_the_sum_instead_of_one_term_is_a_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {site.path: site for site in peftc.sites(model(name)).sites}

    def change(site_edit: ir.SiteEdit) -> ir.SiteEdit:
        if "attn" not in site_edit.site.path:
            return site_edit
        states = {**site_edit.site.states, "h": table[f"{site_edit.site.path}.add"].states["h"]}
        return replace(site_edit, site=replace(site_edit.site, states=states))

    move_edits(monkeypatch, change)
    report = verified(name, "results")
    assert "P602" in {finding.code for finding in report.findings}


def test_a_dropout_between_the_sum_and_a_residual_that_an_equation_reads() -> None:
    """An equation that reads the residual is checked when it arrives; if the sum has another value
    by then, the site is not verified.
    """
    report = verified("falcon", "residual", hidden_dropout=0.2)
    assert report.ok, str(report)
    outcome = {check.name: check for check in report.checks}
    assert outcome["train, dropout 0: outputs"].outcome == "holds"
    assert outcome["train, dropout as a factor: outputs"].outcome == "not checked"
    assert verified("falcon", "results", hidden_dropout=0.2).ok
