"""What is computed once for each kind of layer is what each layer has, one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from peftc.addressing.site_list import SiteList
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import PeftcError
from peftc.explore import parse_selector
from peftc.planning.ir import Assign, FrozenCall, SiteEdit, subterms
from peftc.planning.lowering_context import DEFAULT_TASK
from peftc.planning.planner import Planner, PlanResult, make_plan
from peftc.planning.report.plan import Plan
from peftc.planning.report.sites_json import sites_data
from peftc.planning.selection.selectors import coverage_warnings, resolve
from peftc.recognition.analysis import Analysis, analyse
from peftc.recognition.layers import Stack
from peftc.recognition.moe.lists import ExpertModules
from peftc.recognition.moe.states import linear_states
from peftc.recognition.non_layer_sites import qualified
from peftc.recognition.site_builder import LayerSites, with_own_graph
from peftc.semantics.expand import expand
from peftc.syntax import parse_text
from tests import zoo
from tests.experts import models as experts

MIXED = ("deepseek_v3", "switch_transformers", "llama4_text", "jetmoe", "gpt_oss")  # experts in every form
MODELS = (*zoo.SPECIES, *MIXED)


@cache
def analysis(name: str) -> Analysis:
    return analyse(zoo.build(name) if name in zoo.SPECIES else experts.original(name)[0])


def one_by_one(table: SiteTable) -> SiteTable:
    """The same table, of which nothing is known but its sites."""
    return replace(table, sites=tuple(table.sites))


def sites_of_layers(name: str) -> Iterator[Site]:
    """The sites of layers, each from the graph of its type with the names of the layer itself."""
    for stack in analysis(name).structure.stacks:
        for i in range(len(stack.layers)):
            yield from sites_of_layer(name, stack, i)


def sites_of_layer(name: str, stack: Stack, i: int) -> Iterator[Site]:
    structure, kind = analysis(name).structure, stack.kinds[i]
    layer = LayerSites(stack.roots[i], stack.layers[i], kind, qualified(stack.name, (("layer", i),)), stack.name, {})
    calls = structure.seen.calls.get(stack.roots[i])
    runs = 1 if calls is None else calls.count
    items = [replace(item, site=replace(item.site, runs=runs)) for item in layer.items()]
    lists = {experts.count: experts for sub in kind.subs for experts in sub.experts}
    networks = {id(item.numbers): item.numbers for item in items if item.numbers is not None}
    seen = set[int]()
    for item in items:
        if item.numbers is None:
            yield item.site
        elif id(item.numbers) not in seen:
            seen.add(id(item.numbers))
            members = [other.site for other in items if other.numbers is networks[id(item.numbers)]]
            for number in range(item.numbers.count):
                yield from (network_site(one, number, lists[item.numbers.count], structure.model) for one in members)


def network_site(site: Site, number: int, of: object, model: object) -> Site:
    """The site of one network, by the module or the slice that it is."""
    steps = tuple((name, number if name in ("experts", "shared") else index) for name, index in site.steps)
    path = site.path.replace("experts[0]", f"experts[{number}]").replace("shared[0]", f"shared[{number}]")
    site = replace(site, steps=steps, path=path)
    if isinstance(of, ExpertModules):
        layer = site.module[: site.module.index(of.members[0])]
        module = f"{layer}{of.linears[site.steps[-1][0]][number]}"
        states = linear_states(module, model.get_submodule(module))  # type: ignore[attr-defined]
        return with_own_graph(replace(site, module=module, states=states))
    states = {}
    for key, state in site.states.items():
        assert state.weight is not None
        assert state.weight.stacked_slice is not None
        slice_ = replace(state.weight.stacked_slice, index=number)
        states[key] = replace(state, weight=replace(state.weight, stacked_slice=slice_))
    return replace(site, states=states)


@pytest.mark.parametrize("name", MODELS)
def test_the_sites_are_those_of_each_layer(name: str) -> None:
    sites = analysis(name).table.sites
    assert isinstance(sites, SiteList)
    assert name in MIXED or any(len(blocks) > 1 for blocks in sites.templates.values())
    listed = tuple(sites)
    assert [site for site in listed if any(step == "layer" for step, _ in site.steps)] == list(sites_of_layers(name))
    assert len(sites) == len(listed)
    assert [sites[i] for i in range(-len(sites), len(sites))] == [*listed, *listed]
    assert sites[1:-1] == listed[1:-1]
    places = list(sites.places())
    assert [sites.order(place) for place in places] == list(range(len(sites)))
    assert [sites.find(site.path) for site in listed] == places
    assert sites.find(f"{listed[0].path}.other") is None


SELECTORS = (
    "layer[*].attn.q",
    "layer[1..].ffn | layer[0].attn.o",
    "layer[-1].ffn.up - layer[0].ffn",
    "encoder.layer[*].attn",
    "input.layer[0].ffn.down | output.layer[*].attn",
    "output.layer[*].ffn.norm",
    "layer[*].ffn.experts[0..1, 3].up",
    "layer[*].ffn.experts[*].up | layer[1].ffn.experts[2].down",
    "layer[*].ffn.experts[*].up - layer[*].ffn.experts[1].up",
    "layer[0, 2].ffn.router",
    "layer[*].ffn.shared.up",
    "layer[*].attn.k - layer[*].attn.k",
    "layer[5..9].ffn",
    "layer[*].ffn[0].norm",
    "layer[*].attn.norm | embed",
    "layer[1].attn.**",
    '"**"',
    '"**.*up*"',
    "**",
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", SELECTORS)
def test_a_selector_names_the_sites_of_each_layer(name: str, text: str) -> None:
    table = analysis(name).table
    kinds, single = outcome(text, table), outcome(text, one_by_one(table))
    assert kinds == single


def outcome(text: str, table: SiteTable) -> object:
    selector = parse_selector(text)
    try:
        return resolve(selector, table), coverage_warnings(selector, table)
    except PeftcError as error:
        return error.diagnostics


SPECS = {
    "lora": "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2, alpha=4) }",
    "some layers": "edit a at layer[*].attn.o - layer[1].attn.o { h += lora(x, r=2) }"
    " edit b at layer[0..1].ffn.down { w = magnitude(w + lowrank(r=2)) }",
    "blocked": "edit a at layer[*].ffn { h += 4 * adapter(x, r=3, act=relu) } edit b at layer[*].ffn.down"
    " { h += lora(x, r=2) } edit c at layer[0].ffn.up { h += lora(x, r=2) }",
    "experts": "edit a at layer[*].ffn.experts[*].up { w += lowrank(r=2) }"
    " edit b at layer[*].ffn.experts[0..1].up | layer[1].ffn.experts[*].down { w += sparse(density=0.5) }"
    " edit c at layer[*].ffn.experts[1..2].down { w += lowrank(r=1) }",
    "norms": "edit a at layer[*].ffn.norm { wb += sparse(density=0.3) }"
    " edit b at layer[*].attn.norm | embed { h *= vector() }",
    "frozen": "edit a at layer[*].ffn { h += adapter(norm(h + res), r=2, act=relu) }",
    "prefix": "edit a at layer[*].attn { kv = concat(prefix(len=3), kv) } edit b at layer[-1].attn { h *= vector() }",
    "select": "edit a at layer[*].attn.q { w += sparse(density=0.4) }"
    " edit b at layer[*].attn.q | head { w += sparse(density=0.7) }",
    "shared": "let A = shared(adapter(r=2)) edit a at layer[*].ffn { h += A(h) }",
    "named": 'edit a at "**.*up*" | layer[*].attn.q { wb += sparse(density=0.2) }',
    "train": "train t = [b] at ** edit a at layer[*].attn.q { h += lora(x, r=2) }",
    "layers": "edit a at layer[*] { h += adapter(x, r=2) } edit b at layer[1..].ffn.hidden { h *= vector() }",
    "wrong": "edit a at layer[*].ffn | layer[*].attn.q { h += c } edit b at layer[*].ffn { h += lora(x, r=4096) }",
    "twice": "edit a at layer[*].ffn { h = 2 * h } edit b at layer[1..].ffn { h = 3 * h }",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_plan_is_that_of_each_site(name: str, spec: str) -> None:
    table = analysis(name).table
    flat = expand(parse_text(f"peft 1 {SPECS[spec]}"))
    source = flat.source
    kinds, single, plain = (
        plan_of(lambda: make_plan(flat, table)),
        plan_of(lambda: Planner(flat, table, source, (DEFAULT_TASK,), single=True).result(False)),
        plan_of(lambda: make_plan(flat, one_by_one(table))),
    )
    assert kinds == single
    assert without_ranges(kinds) == without_ranges(plain)


def plan_of(make: Callable[[], PlanResult]) -> tuple[object, ...]:
    """All that is in a plan, at every site; or what is wrong."""
    try:
        result = make()
    except PeftcError as error:
        return (error.diagnostics,)
    assert Plan.model_validate_json(result.plan.model_dump_json()) == result.plan
    assert len(result.site_edits) == len(list(result.site_edits))
    site_edits = [
        (
            one.edit,
            one.site,
            one.parameter_site,
            one.count,
            [shown(a) for a in one.assigns],
            one.instances and keys(one),
        )
        for one in result.site_edits
    ]
    return result.plan, site_edits, result.trained_parameters, result.failed_expectations, result.warnings


def keys(one: SiteEdit) -> list[object]:
    return [(i.key, i.form.name, i.args, i.dims, i.owner, i.index, i.tasks) for i in one.instances]


def shown(assign: Assign) -> object:
    modules = [term.module for term in subterms(assign.value) if isinstance(term, FrozenCall)]
    return assign.state, [(type(term), term.shape) for term in subterms(assign.value)], modules


def without_ranges(result: tuple[object, ...]) -> tuple[object, ...]:
    """The same with each site in the plan, which has no ranges where no layers are known."""
    plan, *others = result
    if not isinstance(plan, Plan):
        return result
    edits = [edit.model_dump(exclude={"sites"}) for edit in plan.edits]
    sites = [sorted((site.path, site.module) for site in edit.sites) for edit in plan.edits]
    return plan.model_dump(exclude={"edits"}), edits, sites, *others


def test_experts_are_one_range() -> None:
    plan = make_plan(expand(parse_text(f"peft 1 {SPECS['experts']}")), analysis("mixtral").table).plan
    assert plan.model_dump()["edits"][0]["sites"] == [
        {
            "path": "decoder.layer[{layer}].ffn.experts[{number}].up",
            "module": "model.layers.{layer}.mlp.experts",
            "layers": (0, 2),
            "numbers": (0, 3),
        }
    ]
    assert [len(edit.sites) for edit in plan.edits] == [12, 10, 6]
    assert plan.edits[0].sites[5].path == "decoder.layer[1].ffn.experts[1].up"


@pytest.mark.parametrize("name", MODELS)
def test_json_has_each_site_once(name: str) -> None:
    table = analysis(name).table
    data = json.loads(json.dumps(sites_data(table)))
    assert data["format_version"] == "2.0"
    sites = [
        (entry["path"].replace("{layer}", str(i)).replace("{number}", str(j)), entry["states"])
        for entry in data["sites"]
        for i in range(*within(entry.get("layers")))
        for j in range(*within(entry.get("numbers")))
    ]
    shapes = [(s.path, {name: str(state.shape) for name, state in s.states.items()}) for s in table.sites]
    assert sorted(sites, key=str) == sorted(shapes, key=str)
    assert len(data["sites"]) < len(table.sites) or name in MIXED


def within(ends: list[int] | None) -> tuple[int, int]:
    return (0, 1) if ends is None else (ends[0], ends[1] + 1)
