"""Selectors that are short for others name the same sites, on models of several families."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.pytorch_utils import Conv1D

import peftc
from peftc.addressing.paths import glob_pattern
from peftc.addressing.sites import Site, SiteTable
from peftc.cli.plan.planning import selector_of
from peftc.planning.selection.selectors import resolve
from peftc.semantics.expand import expand
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from tests import zoo

FAMILIES = ("bart", "bert", "t5", "t5-gated", "gpt2", "llama", "mixtral", "vit")
LINEARS = (nn.Linear, Conv1D, MixtralTopKRouter)


@cache
def tables(family: str) -> SiteTable:
    return peftc.sites(zoo.build(family))


def select_sites(selector: str, table: SiteTable) -> list[Site]:
    return resolve(selector_of(selector), table)


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_are_all_that_hold_a_product(family: str) -> None:
    """`**.linear` names the Linears among the modules of `**`, and LoRA folds there."""
    model = zoo.build(family)
    (edit,) = peftc.plan("peft 1 edit e at layer[*].**.linear { h += lora(x, r=1) }", model).edits
    below = {site.module for site in select_sites("layer[*].**", tables(family))}
    linears = {name for name, module in model.named_modules() if isinstance(module, LINEARS) and name in below}
    assert {site.module for site in select_sites("layer[*].**.linear", tables(family))} == linears
    assert edit.foldable
    assert len(edit.sites) == len(linears) < len(below)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_form_of_linears_elsewhere_is_a_warning(family: str) -> None:
    """P220 counts the norms of `layer[*].**`; Linears, sub-layers, and other forms have none."""
    model = zoo.build(family)
    others = len(select_sites("layer[*].**", tables(family))) - len(select_sites("layer[*].**.linear", tables(family)))
    with pytest.warns(peftc.PeftcWarning, match=rf"P220.*`lora` is for Linears, and {others} of"):
        peftc.plan("peft 1 edit e at layer[*].** { h += lora(x, r=1) }", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peftc.plan("peft 1 edit e at layer[*].**.linear | layer[*].ffn | embed { h += lora(x, r=1) }", model)
        peftc.plan("peft 1 edit e at layer[*].** { h *= vector(init=1) }", model)


MEANS = "peft 2 form m(x, r) { param A[r, d(x)] = kaiming param B[d(out), r] = 0 f = B @ (A @ (x - mean(x, tokens))) } "


@pytest.mark.parametrize(("family", "selector", "decodes"), [
    ("bart", "encoder.layer[*].ffn", False), ("bart", "decoder.layer[*].ffn", True), ("bart", "layer[*].ffn", True),
    ("bert", "layer[*].ffn", False), ("llama", "layer[*].ffn", True),
])  # fmt: skip
def test_a_mean_over_tokens_in_a_decoder_is_a_warning(family: str, selector: str, decodes: bool) -> None:
    for text in (
        f"peft 2 edit e at {selector} {{ h *= gate(x) }}",
        f"{MEANS} edit e at {selector} {{ h += m(x, r=2) }}",
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peftc.plan(text, zoo.build(family))
        assert [str(one.message).partition("]")[0].rpartition("[")[2] for one in caught] == ["P325"] * decodes


SHORT = {  # a selector: what it is short for
    "layer[*].attn.{q, v}": "layer[*].attn.q | layer[*].attn.v",
    "layer[0, 2].{attn.{q, v}, ffn.up}": "layer[0, 2].attn.q | layer[0, 2].attn.v | layer[0, 2].ffn.up",
    "layer[*].{attn, ffn}.norm": "layer[*].attn.norm | layer[*].ffn.norm",
    "layer[*].attn.{q, k} - layer[0].{attn.q, attn.k}": "layer[1..].attn.q | layer[1..].attn.k",
    "layer[*].ffn.{up, gate?}": "layer[*].ffn.up",
    "layer[*].attn.{q, v} | head?": "layer[*].attn.q | layer[*].attn.v",
    "both": "layer[*].attn.q | layer[*].attn.v",
    "both - layer[0].attn.q": "layer[1..].attn.q | layer[*].attn.v",
    "layer[*].attn.k | both?": "layer[*].attn.q | layer[*].attn.k | layer[*].attn.v",
}
GATED = ("t5-gated", "llama")
GROUPS = "peft 2  let both at layer[*].attn.{q, v}  "


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_selector_is_the_long_one(family: str) -> None:
    """Expanded, they name the same sites; arms with `?` are those that the model has."""
    table = tables(family)
    for short, long in SHORT.items():
        if family == "mixtral" and "up" in short:  # it has experts
            continue
        own = long
        own += " | head" if "head?" in short and any(site.path == "head" for site in table.sites) else ""
        own += " | layer[*].ffn.gate" if "gate?" in short and family in GATED else ""
        (edit,) = expand(parse_text(f"{GROUPS} edit e at {short} {{ h = h }}")).statements
        assert isinstance(edit, ast.Edit)
        selected = resolve(edit.selector, table)
        assert [site.path for site in selected] == [site.path for site in select_sites(own, table)], short


@pytest.mark.parametrize("family", ["bart", "llama", "gpt2"])
def test_a_short_selector_changes_the_model_in_the_same_way(family: str) -> None:
    """With the same parameters, drawn by name, the outputs have the same bits."""
    outputs: list[torch.Tensor] = []
    for selector in ("both", "layer[*].attn.{q, v}", "layer[*].attn.q | layer[*].attn.v", "layer[*].attn.{q?, v}"):
        model = zoo.build(family)
        lets = GROUPS if selector == "both" else "peft 1 "
        peftc.compile(f"{lets} edit e at {selector} {{ h += adapter(x, r=2) }}", model, seed=3)
        outputs.append(model(**zoo.inputs(family, model)).logits)
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert not torch.equal(outputs[0], zoo.build(family)(**zoo.inputs(family, model)).logits)


@pytest.mark.parametrize(
    ("selector", "code"),
    [
        ("layer[*].ffn.{up, gate}", "P201"),  # without `?`, each arm must match
        ("layer[*].ffn.gate?", "P201"),  # a statement needs a site
        ("layer[*].ffn.gate? - layer[*].ffn.up?", "P201"),
        ("layer[*].ffn.up? - layer[*].ffn.down?", "P203"),
        ("layer[99].ffn.up?", "P202"),  # the site is there, and the layer is not
        ("layer[*].ffn.gaet?", "P208"),  # a misspelling is no arm that matches nothing
        ("layer[*].**.linear - layer[*].**.linear", "P203"),
        ('"no.such.*"', "P201"),
    ],
)
def test_what_matches_nothing(selector: str, code: str) -> None:
    with pytest.raises(peftc.PeftcError) as error:
        peftc.plan(f"peft 1 edit e at {selector} {{ h += lora(x, r=1) }}", zoo.build("gpt2"))
    assert [one.code for one in error.value.diagnostics] == [code]


def test_groups_are_of_their_method() -> None:
    """A group of a method may have the name of one of the file, and `apply … at` takes a group."""
    text = """peft 2
    let low at encoder
    let part at layer[*].attn.q
    method m() { let part at layer[*].{attn.k, ffn.up}  edit e at part { h = h } }
    edit other at part { h = h }
    apply m() at low
    """
    flat = print_spec(expand(parse_text(text)))
    assert "edit other at layer[*].attn.q {" in flat
    assert "edit e at encoder.layer[*].attn.k | encoder.layer[*].ffn.up {" in flat


NAMES = ["a.q", "a.k", "a.v", "a.to_q", "b1.q", "b2.q", "a.b.q", "a.]", "a.q!", "a.^", "a.-"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.[qv]", ["a.q", "a.v"]),
        ("a.[!qv]", ["a.k", "a.]", "a.^", "a.-"]),
        ("b[1-2].q", ["b1.q", "b2.q"]),
        ("b[2-1].q", []),  # a range that is none
        ("a.[^q]", ["a.q", "a.^"]),  # no negation, as in a shell
        ("a.[q-]", ["a.q", "a.-"]),
        ("a.?[!]", ["a.q!"]),
        ("a.q[!]", ["a.q!"]),
        ("**.[q]", ["a.q", "b1.q", "b2.q", "a.b.q"]),
    ],
)
def test_characters_of_patterns(pattern: str, names: list[str]) -> None:
    assert [name for name in NAMES if glob_pattern(pattern).fullmatch(name)] == names


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_pattern_of_characters_is_a_union(family: str) -> None:
    table = tables(family)
    short, long = select_sites('"**.[qv]_proj"', table), select_sites('"**.q_proj" | "**.v_proj"', table)
    assert short == long
    assert select_sites('"**.[!kv]_proj"', table) == select_sites('"**.q_proj" | "**.?_proj" - "**.[kv]_proj"', table)


def test_a_star_that_should_be_two() -> None:
    """A `*` anywhere in a pattern, of which `**` would match."""
    with pytest.raises(peftc.PeftcError) as error:
        peftc.plan('peft 1 edit e at "model.*.q_proj" { h += lora(x, r=1) }', zoo.build("llama"))
    assert str(error.value.diagnostics[0].help) == 'did you mean `"model.**.q_proj"`?'
