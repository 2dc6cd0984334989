"""Selectors that are short for others name the same sites, on models of several families."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.pytorch_utils import Conv1D

import peftc
from peftc.addressing.sites import Site, SiteTable
from peftc.cli.plan.planning import selector_of
from peftc.planning.selection.selectors import resolve
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
