"""Foldability verdicts: what folds into which weight, how many base entries change, and what
remains at inference.
"""

from dataclasses import replace

import pytest

from peftc.addressing.parameter_ranges import EntryChoice, RowRange, numel
from tests.plan import tables
from tests.plan.specs import only_edit, planned, refused

BART, LLAMA, GPT2 = tables.bart(layers=(1, 1)), tables.llama(layers=1), tables.gpt2(layers=1)
D, FF = 1024, 4096


@pytest.mark.parametrize(
    ("site", "equations", "state", "reason"),
    [
        ("attn.q", "h += lora(x, r=8)", D * D, "into q_proj, rank 8"),
        ("attn.q", "h += 2 * lora(x, r=8) - scalar() * lora(x, r=4) / 2", D * D, "into q_proj, rank 12"),
        ("attn.q", "w = w + lowrank(r=8)", D * D, "into q_proj, rank 8"),
        ("attn.q", "w = magnitude(w + lowrank(r=8))", D * D, "into q_proj"),
        ("attn.k", "h *= vector(init=1)", D * D + D, "into k_proj"),
        ("attn.k", "h = 2 * h", D * D + D, "into k_proj"),
        ("attn.k", "h = 1 * h + lora(x, r=2)", D * D, "into k_proj"),
        ("attn.k", "h = h + vector(init=0)", D, "into k_proj"),
        ("attn.k", "h += lora(h, r=2)", D * D + D, "into k_proj, rank 2"),
        ("attn.k", "h += adapter(x, r=2, act=none)", D * D + D, "into k_proj, rank 2"),
        ("attn.k", "h += adapter(x, r=2, act=none, bias=false)", D * D, "into k_proj, rank 2"),
        ("attn.k", "b += vector(init=0)", D, "into k_proj"),
        ("ffn.hidden", "h *= vector(init=1)", D * FF, "into columns of fc2"),
        ("ffn.hidden", "h += vector(init=0)", D, "into columns of fc2"),
        ("ffn", "z *= vector(init=1)", D * FF, "into columns of fc2"),
        ("ffn", "h *= vector(init=1)", D * FF + D, "into fc2"),
        ("attn.self", "h += lora(h, r=2)", D * D + D, "into out_proj, rank 2"),
    ],
)
def test_what_folds(site, equations, state, reason):
    edit = only_edit(f"edit e at encoder.layer[0].{site} {{ {equations} }}", BART)
    assert (edit.foldable, edit.reason, edit.changed, edit.served) == (True, reason, state, 0)


@pytest.mark.parametrize(
    ("site", "equations", "reason"),
    [
        ("ffn", "h += adapter(x, r=4)", "`adapter(x)`"),
        ("ffn", "h += adapter(h, r=4)", "`adapter(h)`"),
        ("attn.q", "h += adapter(x, r=4, act=gelu)", "gelu"),
        ("attn.q", "h += gate(x) * lora(x, r=4)", "`gate(x)`"),
        ("attn.q", "h = h * h", "`h * h`"),
        ("attn", "kv = concat(prefix(len=2), kv)", "concat(prefix(), kv)"),
        ("ffn", "h += lora(x, r=4)", "`x`"),
        ("ffn", "h = norm(h)", "norm"),
        ("attn", "q *= vector()", "`q`"),
    ],
)
def test_what_does_not_fold(site, equations, reason):
    edit = only_edit(f"edit e at encoder.layer[0].{site} {{ {equations} }}", BART)
    assert not edit.foldable
    assert reason in edit.reason
    assert edit.changed == 0
    assert edit.served == edit.stored


def test_no_bias_no_bias_to_change():
    assert only_edit("edit e at layer[*].attn.k { h *= vector() }", LLAMA).changed == 16 * 64


def test_a_bias_where_none_was_is_changed_too():
    edit = only_edit("edit e at layer[*].attn.k { h += vector(init=0) }", LLAMA)
    assert (edit.foldable, edit.changed) == (True, 16)


def test_rows_of_a_fused_projection():
    edit = only_edit("edit e at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }", GPT2)
    assert (edit.changed, edit.reason) == (2 * 64 * 64, "into rows of c_attn, rank 2")


def test_a_tied_weight_does_not_fold_at_one_use():
    edit = only_edit("edit e at head { w = w + lowrank(r=2) }", BART)
    assert not edit.foldable
    assert "tied" in edit.reason


def test_an_edit_that_folds_at_some_sites_only_does_not_fold():
    edit = only_edit(
        "edit e at encoder.layer[0].ffn | encoder.layer[0].ffn.up { h += lora(h, r=2) - lora(h, r=2) * 0 }", BART
    )
    assert edit.foldable
    edit = only_edit("edit e at encoder.layer[0].ffn | encoder.layer[0].ffn.up { h += lora(x, r=2) }", BART)
    assert not edit.foldable
    assert "1 of 2 sites" in edit.reason


def test_an_edit_after_one_that_stays_does_not_fold():
    first = "edit a at layer[*].ffn { h += adapter(h, r=4) }\n"
    second = "edit b at layer[*].ffn { h *= vector() }\n"
    after = planned(first + second, BART).plan.edit("b")
    assert not after.foldable
    assert "`a`" in after.reason
    assert planned(second + first, BART).plan.edit("b").foldable


def test_an_adapter_on_down_reads_the_hidden_state():
    text = "edit a at layer[*].ffn.hidden { h *= vector() }\nedit b at layer[*].ffn.down { h += adapter(x, r=4) }"
    assert not planned(text, BART).plan.edit("a").foldable
    text = "edit a at layer[*].ffn.hidden { h *= vector() }\nedit b at layer[*].ffn { h += adapter(x, r=4) }"
    assert planned(text, BART).plan.edit("a").foldable


def test_totals_count_an_entry_once():
    text = "edit a at layer[*].attn.q { h += lora(x, r=2) }\nedit b at layer[*].attn.q { h += lora(x, r=4) }\n"
    plan = planned(text + "train c = [w, b] at layer[*].attn.q", BART).plan
    assert [edit.changed for edit in plan.edits] == [3 * D * D, 3 * D * D, 3 * (D * D + D)]
    assert plan.totals.changed == 3 * (D * D + D)
    assert plan.totals.trained == 3 * 2 * D * 6 + 3 * (D * D + D)
    assert plan.totals.served == 0


def test_regions():
    two = [RowRange("p", 0, 4, 3), RowRange("p", 2, 6, 3), RowRange("q", 0, 1)]
    assert numel(two) == 6 * 3 + 1
    assert numel([]) == 0


def test_selected_entries_are_counted_once_and_never_above_the_total():
    p, q = RowRange("p", 0, 4, 3), RowRange("q", 0, 1)
    assert numel([EntryChoice(("a",), 5, p), EntryChoice(("a",), 5, q)]) == 5
    assert numel([EntryChoice(("a",), 5, p), EntryChoice(("b",), 4, p)]) == 9
    assert numel([EntryChoice(("a",), 9, p), EntryChoice(("b",), 9, p)]) == 12
    assert numel([EntryChoice(("a",), 5, p), EntryChoice(("a",), 5, q), p]) == 13


def test_tied_parameters_are_trained_once():
    result = planned("train e = [w] at embed | head", BART)
    assert result.plan.totals.trained == 50265 * D
    assert result.trained_parameters == {"e/model.shared.weight": "model.shared.weight"}


def test_names_of_trained_parameters():
    result = planned("train n = [w] at layer[*].norm\ntrain all = [w, b] at layer[*].norm", LLAMA)
    assert result.trained_parameters == {
        "n/model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
        "n/model.layers.0.post_attention_layernorm.weight": "model.layers.0.post_attention_layernorm.weight",
    }
    assert [warning.code for warning in result.warnings] == ["P204"]


def test_part_of_a_parameter_cannot_be_trained():
    (diagnostic,) = refused("train q = [w] at layer[*].attn.q", GPT2)
    assert (diagnostic.code, diagnostic.help) == (
        "P309",
        'train all of it, by name: `at "transformer.h.*.attn.c_attn"`; or change its rows: `h += lora(x, r=8)`',
    )
    whole = planned("train q = [w] at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v", GPT2)
    assert whole.plan.totals.trained == 3 * 64 * 64
    assert list(whole.trained_parameters.values()) == ["transformer.h.0.attn.c_attn.weight"]


@pytest.mark.parametrize("equation", ["h = x * x", "h += lora(x, r=2) * lora(x, r=2)", "h = h * x", "h += x / x"])
def test_a_product_with_the_input_does_not_fold(equation):
    edit = only_edit(f"edit e at encoder.layer[0].attn.q {{ {equation} }}", BART)
    assert not edit.foldable
    assert "depend" in edit.reason


def test_an_edit_that_shares_parameters_with_one_that_stays_does_not_fold():
    common = "let s = shared(vera(r=4))\nedit a at layer[*].attn.q { h += s(x) }\n"
    folds = planned(common + "edit b at layer[*].attn.k { h += s(x) }", BART).plan
    assert [edit.foldable for edit in folds.edits] == [True, True]
    stays = planned(common + "edit b at layer[*].attn.k { h += gate(x) * s(x) }", BART).plan
    assert [edit.foldable for edit in stays.edits] == [False, False]
    assert "`b`, which stays, shares parameters with it" in stays.edits[0].reason


@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_a_weight_or_a_bias_that_is_tied_does_not_fold(attribute):
    modules = [f"model.{part}.layers.0.self_attn.q_proj" for part in ("encoder", "decoder")]
    tied = (tuple(f"{module}.{attribute}" for module in modules),)
    edit = only_edit("edit e at encoder.layer[0].attn.q { h = 2 * h }", replace(BART, tied=tied))
    assert not edit.foldable
    assert f"`model.encoder.layers.0.self_attn.q_proj.{attribute}` is tied" in edit.reason
