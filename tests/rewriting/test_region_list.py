"""The regions of layers that are alike are made once, and are those that each layer has alone."""

from typing import Any

import pytest

from peftc.installation.compilations import plan_on
from peftc.installation.compiled_model import analyse_base
from peftc.planning.planner import PlanResult
from peftc.recognition.analysis import Analysis
from peftc.rewriting.assembly import regions_of
from peftc.rewriting.region_list import RegionList
from peftc.semantics.spec_argument import flat_spec
from tests import zoo

LINEARS = "edit a at layer[*].attn.q | layer[*].attn.v | layer[*].ffn.up { h += lora(x, r=2) }"
SOME_LAYERS = """
edit f at layer[1..].ffn { h += adapter(x, r=2) }
edit a at layer[*].attn.q | layer[0].attn.v { h += lora(x, r=2) }
"""
OUTSIDE = "edit l at layer[*] { h += adapter(h, r=2) }\nedit e at head { h += lora(x, r=2) }"
EXPERTS = """
edit x at layer[*].ffn.experts[*].up | layer[*].ffn.experts[1].down { w += lowrank(r=2) }
edit a at layer[*].attn.o { h += lora(x, r=2) }
"""
CASES = [
    *((name, spec) for name in ("llama", "bart") for spec in (LINEARS, SOME_LAYERS)),
    ("llama", OUTSIDE),
    ("mixtral", EXPERTS),
]


def planned(name: str, spec: str) -> tuple[PlanResult, Analysis]:
    layers: dict[str, Any] = {} if name == "bart" else {"num_hidden_layers": 4}
    analysis = analyse_base(zoo.build(name, **layers))
    return plan_on(analysis, flat_spec(f"peft 1\n{spec}", None, ())), analysis


def contents(regions: RegionList) -> list[Any]:
    return [
        (r.module, r.inline, [e.fingerprint for e in r.edits], [(p.edit, p.site, p.instances) for p in r.site_edits])
        for r in regions
    ]


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_regions_of_alike_layers_are_those_of_each_layer(name: str, spec: str) -> None:
    plan, analysis = planned(name, spec)
    regions = regions_of(plan.site_edits, analysis.structure)
    assert contents(regions) == contents(regions_of(list(plan.site_edits), analysis.structure))
    templates = {id(block.template) for block in regions.blocks}
    assert len(templates) < len(regions.blocks)


def test_no_region_of_a_further_layer_is_made_before_it_is_asked_for() -> None:
    plan, analysis = planned("llama", LINEARS)
    regions = regions_of(plan.site_edits, analysis.structure)
    assert len(regions) == 4 * 3
    assert len({id(block.template) for block in regions.blocks}) == 1
    assert "_all" not in vars(regions) | vars(plan.site_edits)
