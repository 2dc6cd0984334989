"""Properties: any selector gives sites in model order or diagnostics; disjoint edits commute."""

from hypothesis import given, settings
from hypothesis import strategies as st

from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.render import render_text
from peftc.planning.selection.selectors import coverage_warnings, resolve
from peftc.syntax import ast
from tests.plan import tables
from tests.plan.specs import planned

TABLES = (tables.bart(layers=(3, 2)), tables.llama(v_missing=(1,)), tables.gpt2())
NAMES = {id(table): {module.name: i for i, module in enumerate(table.modules)} for table in TABLES}
WORDS = [
    "encoder",
    "decoder",
    "layer",
    "attn",
    "self",
    "cross",
    "q",
    "k",
    "v",
    "o",
    "heads",
    "ffn",
    "up",
    "gate",
    "down",
    "hidden",
    "norm",
    "add",
    "embed",
    "input",
    "output",
    "head",
    "q_proj",
    "mlp",
    "**",
]

numbers = st.one_of(st.none(), st.integers(-5, 5))
indices = st.one_of(st.none(), st.lists(st.builds(ast.Index, numbers, numbers), min_size=1, max_size=3).map(tuple))
steps = st.builds(ast.Step, st.sampled_from(WORDS), indices)
patterns = st.lists(
    st.sampled_from(["model", "*", "**", "layers", "transformer", "?", "0", "self_*", "q_proj"]), min_size=1
)
selectors = st.recursive(
    st.one_of(
        st.lists(steps, min_size=1, max_size=5).map(tuple).map(ast.Path),
        st.builds(ast.Glob, patterns.map(".".join)),
    ),
    lambda inner: st.one_of(
        st.builds(ast.Difference, inner, inner), st.lists(inner, min_size=2, max_size=3).map(tuple).map(ast.Union)
    ),
    max_leaves=3,
)


def outcome(selector: ast.Selector, table: SiteTable) -> tuple[list[Site], tuple[Diagnostic, ...]]:
    try:
        return resolve(selector, table), ()
    except PeftcError as error:
        return [], error.diagnostics


@settings(max_examples=400, deadline=None)
@given(selectors, st.sampled_from(TABLES))
def test_sites_in_model_order_or_diagnostics(selector, table):
    sites, wrong = outcome(selector, table)
    assert sites or render_text(wrong)
    assert len({site.path for site in sites}) == len(sites)
    order = [table.sites.index(site) for site in sites if site in table.sites]
    modules = [NAMES[id(table)].get(site.module, -1) for site in sites]
    assert order == sorted(order) if len(order) == len(sites) else modules == sorted(modules)
    assert all(warning.severity == "warning" for warning in coverage_warnings(selector, table))


EDITS = (
    "edit a at layer[*].attn.q { h += lora(x, r=2) }",
    "edit b at layer[*].ffn { h += adapter(x, r=2) }",
    "edit c at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(4)), kv) }",
    "edit d at layer[*].attn.k { h *= vector() }",
    "train e = [w] at layer[*].norm",
    "edit f at layer[0].attn.o { w = magnitude(w + lowrank(r=1)) }",
)


@settings(max_examples=30, deadline=None)
@given(st.permutations(EDITS), st.sampled_from(TABLES[:2]))
def test_disjoint_edits_commute(order, table):
    shuffled, plain = (planned("\n".join(texts), table).plan for texts in (order, EDITS))
    assert shuffled.totals == plain.totals
    assert {edit.name: edit for edit in shuffled.edits} == {edit.name: edit for edit in plain.edits}
