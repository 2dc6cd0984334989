"""Equations at a site: shapes, names, parameter sets, and refusals."""

from dataclasses import replace

import pytest

from peftc.forms.shapes import Heads, KeyValue, Rows, Scalar, Tokens, Vector, Weight
from peftc.planning.ir import Arithmetic, Concat, Constant, FormCall, FrozenCall, Read, combine_shapes
from tests.call_counts import calls
from tests.plan import tables
from tests.plan.specs import planned, refused, underlined

BART, LLAMA, GPT2 = tables.bart(layers=(2, 2)), tables.llama(), tables.gpt2()

EACH, ONE = Scalar(per_example=True), Scalar()
H, B, W, KV = Tokens(8), Vector(8), Weight(8, 4), KeyValue(2, 4)


@pytest.mark.parametrize(
    ("left", "op", "right", "result"),
    [
        (ONE, "*", ONE, ONE),
        (ONE, "-", EACH, EACH),
        (ONE, "*", H, H),
        (EACH, "*", H, H),
        (H, "/", EACH, H),
        (ONE, "/", H, H),
        (H, "+", H, H),
        (H, "*", B, H),
        (B, "+", H, H),
        (W, "+", W, W),
        (ONE, "*", W, W),
        (ONE, "*", KV, KV),
        (EACH, "*", KV, KV),
        (KV, "/", ONE, KV),
        (Rows(2, 4), "*", Rows(2, 4), Rows(2, 4)),
        (KV, "+", KV, None),
        (ONE, "+", KV, None),
        (ONE, "/", KV, None),
        (EACH, "*", W, None),
        (EACH, "*", B, None),
        (H, "+", Tokens(4), None),
        (H, "*", Vector(4), None),
        (W, "*", B, None),
        (W, "*", H, None),
        (Heads(2, 4), "+", Rows(2, 4), None),
    ],
)
def test_shapes_in_arithmetic(left, op, right, result):
    assert combine_shapes(op, left, right) == result


def test_an_equation_becomes_a_term():
    (first, *_) = planned("edit e at layer[*].ffn { h += 4 * adapter(x, r=8) }", BART).site_edits
    (assign,) = first.assigns
    value = assign.value
    assert isinstance(value, Arithmetic)
    assert isinstance(value.left, Read)
    assert (value.op, value.left.state, value.shape) == ("+", "h", Tokens(1024))
    assert isinstance(value.right, Arithmetic)
    assert isinstance(value.right.left, Constant)
    assert isinstance(value.right.right, FormCall)
    (instance,) = first.instances
    assert value.right.right.instance is instance
    assert (instance.key, instance.owner, instance.dims.d_model) == ("adapter", None, 1024)
    assert (instance.dims.input, instance.dims.target) == (Tokens(1024), Tokens(1024))


def test_every_site_has_parameters_of_its_own():
    result = planned("edit e at layer[*].ffn { h += adapter(x, r=8) + adapter(h, r=4) }", BART)
    assert [[one.key for one in p.instances] for p in result.site_edits] == [["adapter", "adapter_2"]] * 4
    assert len({(p.owner_path, one.key) for p in result.site_edits for one in p.instances}) == 8
    (first, *_) = result.site_edits
    count = sum(one.form.count(one.args, one.dims).stored for one in first.instances)
    assert result.plan.edit("e").stored == 4 * count


def test_let_is_computed_once_at_its_position():
    text = "edit e at layer[*].ffn { let g = gate(h)  h *= 2  let f = adapter(x, r=4)  h = (1 - g) * h + g * f }"
    (first, *_) = planned(text, BART).site_edits
    assert [at for at, _ in first.lets] == [0, 1]
    gate = first.lets[0][1]
    assert len(first.instances) == 2
    sums = first.assigns[1].value
    assert isinstance(sums, Arithmetic)
    assert isinstance(sums.left, Arithmetic)
    assert isinstance(sums.left.left, Arithmetic)
    assert isinstance(sums.right, Arithmetic)
    assert sums.left.left.right is gate
    assert sums.right.left is gate


def test_a_let_that_nothing_uses_makes_no_parameters():
    result = planned("edit e at layer[*].ffn { let g = gate(x)  h += adapter(x, r=4) }", BART)
    assert [one.key for one in result.site_edits[0].instances] == ["adapter"]
    assert [diagnostic.code for diagnostic in result.warnings] == ["P114"]


def test_a_reparametrised_prefix_is_one_set_for_each_attention_group():
    site_edits = planned("edit p at layer[*].attn { kv = concat(prefix(len=5, reparam=mlp(7)), kv) }", BART).site_edits
    owners = [(one.owner, one.index, one.dims.sites) for p in site_edits for one in p.instances]
    groups = ["encoder.self", "encoder.self", "decoder.self", "decoder.cross", "decoder.self", "decoder.cross"]
    assert [owner for owner, _, _ in owners] == [f"p.prefix.{group}" for group in groups]
    assert [index for _, index, _ in owners] == [0, 1, 0, 0, 1, 1]
    assert {sites for _, _, sites in owners} == {2}
    concat = site_edits[0].assigns[0].value
    assert isinstance(concat, Concat)
    assert concat.shape == KeyValue(16, 64)


def test_shared_parameters_are_counted_once():
    text = "let A = shared(adapter(r=8))\nedit e at layer[*].ffn { h += A(x) }\nedit f at layer[*].attn { h += A(h) }"
    result = planned(text, BART)
    assert {one.owner for p in result.site_edits for one in p.instances} == {"A"}
    one = 2 * 8 * 1024 + 8 + 1024
    assert [edit.trained for edit in result.plan.edits] == [one, one]
    assert result.plan.totals.trained == one


def test_frozen_modules():
    (first, *_) = planned("edit e at layer[*].ffn { h += adapter(norm(h + res), r=8) }", BART).site_edits
    applied = first.assigns[0].value
    assert isinstance(applied, Arithmetic)
    assert isinstance(applied.right, FormCall)
    norm = applied.right.input
    assert isinstance(norm, FrozenCall)
    assert (norm.function, norm.module) == ("norm", "model.encoder.layers.0.final_layer_norm")


def test_numbers_take_units():
    (first, *_) = planned("edit e at layer[*].ffn { h += 50% * adapter(x, r=8) - -2 * x }", BART).site_edits
    value = first.assigns[0].value
    assert isinstance(value, Arithmetic)
    constants = [n.value for n in _terms(value) if isinstance(n, Constant)]
    assert constants == [0.5, -2.0]


def test_a_minus_is_a_product_with_minus_one():
    (first, *_) = planned("edit e at layer[*].ffn { h += -adapter(x, r=8) }", BART).site_edits
    value = first.assigns[0].value
    assert isinstance(value, Arithmetic)
    assert isinstance(value.right, Arithmetic)
    assert (value.op, value.right.op, value.right.shape) == ("+", "*", Tokens(1024))
    assert isinstance(value.right.left, Constant)
    assert value.right.left.value == -1
    assert isinstance(value.right.right, FormCall)


def _terms(term):
    yield term
    for part in ("left", "right", "input"):
        if getattr(term, part, None) is not None:
            yield from _terms(getattr(term, part))


@pytest.mark.parametrize(
    ("text", "code", "span"),
    [
        ("edit e at layer[*].ffn { h += adapter(c, r=8) }", "P205", "c"),
        ("edit e at layer[*].attn { h += adapter(z, r=8) }", "P205", "z"),
        ("edit e at layer[*].attn { w = magnitude(w) }", "P205", "w"),
        ("edit e at layer[*].ffn { x += adapter(h, r=8) }", "P306", "x"),
        ("edit e at layer[*].ffn { h += z }", "P301", "z"),
        ("edit e at layer[*].ffn { h = gate(x) }", "P301", "gate(x)"),
        ("edit e at layer[*].ffn { h += 1 + adapter(x, r=8) * z }", "P301", "adapter(x, r=8) * z"),
        ("edit e at layer[*].ffn { h += adapter(norm(z), r=8) }", "P301", "z"),
        ("edit e at layer[*].attn.q { h += lora(x, r=1025) }", "P317", "r=1025"),
        ("edit e at layer[*].attn { kv = prefix(len=4) }", "P303", "prefix(len=4)"),
        ("edit e at layer[*].attn { kv *= 2 }", "P303", "2"),
        ("edit e at layer[*].attn { kv += prefix(len=4) }", "P301", "prefix(len=4)"),
        ("edit e at layer[*].attn { kv = concat(prefix(len=4), kv, kv) }", "P303", "concat(prefix(len=4), kv, kv)"),
        ("edit e at layer[*].attn { kv = concat(prefix(len=4), prefix(len=5)) }", "P303", None),
        ("edit e at layer[*].attn { kv = 2 * concat(prefix(len=4), kv) }", "P301", None),
        ("edit e at layer[*].attn { h += prefix(len=4) }", "P310", "prefix(len=4)"),
        ("edit e at layer[*].attn.q { w = w * gate(h) }", "P301", "w * gate(h)"),
        ("edit e at layer[*].attn.q { h += norm(x) }", "P307", "norm"),
        ("edit e at layer[*].attn { w = w }", "P205", "w"),
    ],
)
def test_refusals(text, code, span):
    diagnostics = refused(text, BART)
    assert [diagnostic.code for diagnostic in diagnostics] == [code]
    assert span is None or underlined(diagnostics[0]) == span


def test_a_mismatch_shows_both_shapes_and_their_sources():
    (diagnostic,) = refused("edit e at layer[*].ffn { h += adapter(x, r=8) + z }", BART)
    assert diagnostic.label == "[…, 1024] + […, 4096]"
    assert diagnostic.notes == (
        "`adapter(x, r=8)` is […, 1024]",
        "`z` is […, 4096]",
        "the same at 3 more sites of this edit",
    )


def test_several_mistakes_are_reported_at_once_in_the_order_of_the_text():
    text = (
        "edit a at layer[*].ffn { h += z }\n"
        "edit b at layer[*].fnn { h += adapter(x, r=8) }\n"
        "train d = [b] at layer[*].attn.add\n"
        "edit c at layer[*].attn.q | layer[99].ffn { h += lora(x, r=4) }\n"
    )
    assert [one.code for one in refused(text, BART)] == ["P301", "P201", "P205", "P202"]


def test_two_assignments_of_one_state():
    text = (
        "edit a at layer[*].attn { kv = concat(prefix(len=3), kv) }\n"
        "edit b at layer[1].attn.self { kv = concat(prefix(len=4), kv) }"
    )
    (diagnostic,) = refused(text, BART)
    assert diagnostic.code == "P302"
    assert "`a` and `b`" in diagnostic.message


def test_one_state_under_two_names():
    """`z` of an ffn is `h` of its `hidden`; a fused weight is the weight of its parts."""
    whole = 'edit a at "transformer.h.0.attn.c_attn" { w = w + lowrank(r=2) }\n'
    part = "edit b at layer[*].attn.q { w = magnitude(w) }"
    (diagnostic,) = refused(whole + part, GPT2)
    assert diagnostic.code == "P302"
    states = "edit a at layer[*].ffn { z = 2 * z }\nedit b at layer[1].ffn.hidden { h = 3 * h }"
    (diagnostic,) = refused(states, GPT2)
    assert diagnostic.code == "P302"
    assert diagnostic.notes[0] == "`a` assigns `z` in line 2"
    parts = "edit a at layer[*].attn.q { w = magnitude(w) }\nedit b at layer[*].attn.k { w = magnitude(w) }"
    assert len(planned(parts, GPT2).site_edits) == 4


def test_adding_twice_is_fine():
    text = "edit a at layer[*].ffn { h += adapter(x, r=8) }\nedit b at layer[*].ffn { h += adapter(x, r=4) }"
    assert len(planned(text, BART).site_edits) == 8


def test_shared_parameters_need_one_shape():
    (diagnostic,) = refused(
        "let A = shared(lora(r=2))\nedit e at layer[*].ffn.up | layer[*].ffn.down { h += A(x) }", BART
    )
    assert diagnostic.code == "P305"
    assert diagnostic.notes[0] == "first used with […, 1024] to […, 4096]"


@pytest.mark.parametrize("form", ["hyper(r=2, nets=positions)", "vera(r=2)"])
def test_a_shared_form_of_any_shape_has_one_shape_at_a_site(form: str):
    (diagnostic,) = refused(f"let s = shared({form})\nedit e at layer[*].ffn.down {{ h += s(h) + s(x) }}", BART)
    assert diagnostic.code == "P305"
    (diagnostic,) = refused(
        "let s = shared(sparse(density=1%))\nedit e at layer[*].ffn.down { w += s()\n b += s() }", BART
    )
    assert diagnostic.code == "P305"


def test_grouped_queries_have_narrow_keys():
    plan = planned("edit p at layer[*].attn { kv = concat(prefix(len=3), kv) }", LLAMA).plan
    assert plan.totals.trained == 4 * 2 * 3 * 16
    (diagnostic,) = refused("edit e at layer[*].attn.k { h += lora(x, r=32) }", LLAMA)
    assert diagnostic.code == "P317"


def test_twice_the_layers_are_twice_the_work():
    text = (
        "edit q at layer[*].attn.q { h += lora(x, r=4) }\n"
        "edit f at layer[*].ffn { h += adapter(x, r=4) }\ntrain n = [w] at **"
    )
    small, large = (tables.llama(layers=layers) for layers in (50, 100))
    assert len(planned(text, large).site_edits) == 200
    assert calls(lambda: planned(text, large)) <= 2.2 * calls(lambda: planned(text, small))


def test_the_same_mistake_at_several_places_is_reported_once():
    text = (
        "edit e at layer[50].attn | layer[50].ffn { h += adapter(h, r=2) }\n"
        "edit f at layer[50].attn { h += adapter(h, r=2) }"
    )
    (diagnostic,) = refused(text, BART)
    assert underlined(diagnostic) == "50"
    assert diagnostic.notes[-1] == "the same 2 more times, in lines 2, 3"


def test_twice_the_arms_are_twice_the_work():
    table = tables.llama(layers=2)

    def work(arms: int) -> int:
        selector = " | ".join(["layer[*].attn.q", *["layer[0].attn.v"] * arms])
        return calls(lambda: planned(f"edit e at {selector} {{ h += lora(x, r=4) }}", table))

    assert work(400) <= 2.2 * work(200)


def test_a_prompt_names_the_embedding_of_a_model_that_has_one() -> None:
    spec = "edit p at layer[0] { h = concat(prompt(len=4), h) }"
    without = replace(LLAMA, sites=[site for site in LLAMA.sites if site.steps[-1][0] != "embed"])
    assert len(without.sites) < len(LLAMA.sites)
    assert "name `input.embed`" in (refused(spec, LLAMA)[0].help or "")
    assert f"{LLAMA.model_id} has no site `embed`" in (refused(spec, without)[0].help or "")
