"""Golden files of plans, site trees and diagnostics."""

import pytest

from peftc.diagnostics import PeftcError
from peftc.diagnostics.render import render_text
from peftc.planning.report.plan import Plan, plain_text, render_plan
from peftc.planning.report.site_tree import render_sites
from tests.plan import tables
from tests.plan.specs import planned

BART = tables.bart()
TABLES = {
    "bart": BART,
    "bert": tables.bert(),
    "t5": tables.t5(),
    "llama": tables.llama(layers=30, v_missing=(4, 9, 14, 19, 24)),
    "gpt2": tables.gpt2(layers=12),
}
SPECS = {
    "mam": """
        edit prefix at layer[*].attn { kv = concat(prefix(len=30, reparam=mlp(800)), kv) }
        edit ffn at layer[*].ffn { h += 4 * adapter(x, r=512, act=relu, init=lora) }
        expect stored <= 6.8%
        expect sites(prefix) == 36
        expect foldable(ffn)
        """,
    "folding": """
        edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=8, alpha=16) }
        edit dora at decoder.layer[0, 3..5].attn.cross.o { w = magnitude(w + lowrank(r=8)) }
        edit ff at layer[*].ffn.hidden { h *= vector(init=1) }
        train bias = [b] at **
        expect foldable(qv)
        expect served == 0
        """,
    "gated": """
        let A = shared(adapter(r=48))
        edit gated at layer[*].ffn { let g = gate(h)  h = (1 - g) * h + g * A(norm(h + res)) }
        edit heads at layer[6..].attn.heads { h += bottleneck(q, r=30, act=relu) }
        expect identity(gated)
        """,
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_plan(name, golden):
    result = planned(SPECS[name], BART)
    text = plain_text(render_plan(result.plan, result.site_edits))
    assert max(map(len, text.splitlines())) <= 80
    findings = (*result.failed_expectations, *result.warnings)
    golden(f"plan_{name}.txt", text + ("\n" + render_text(findings) if findings else ""))


@pytest.mark.parametrize("name", TABLES)
def test_sites(name, golden):
    text = plain_text(render_sites(TABLES[name]))
    assert max(map(len, text.splitlines())) <= 80
    golden(f"sites_{name}.txt", text)


MISTAKES = {
    "dead_step": "edit prefix at layer[*].attn.croos { kv = concat(prefix(len=30), kv) }",
    "dead_alias": "edit e at layer[*].ffn.fc2 | layer[*].q_proj { h += lora(x, r=8) }",
    "dead_glob": 'edit e at "model.decoder.layers.*.encoder_atn.q_proj" { w = w + lowrank(r=8) }',
    "index": "edit e at layer[0, 99].ffn { h += adapter(x, r=8) }",
    "difference": "edit e at layer[*].attn.self - decoder.layer[*].attn.cross { h += adapter(x, r=8) }",
    "state": "edit e at layer[*].ffn { h += adapter(c, r=8) }",
    "shapes": "edit e at layer[*].ffn { h += 2 * z }",
    "rank": "edit e at layer[*].attn.q { h += lora(x, r=4096) }",
    "assigned_twice": "edit a at layer[*].attn { kv = concat(prefix(len=3), kv) }\n"
    "edit b at layer[0..2].attn.self { kv = concat(prefix(len=4), kv) }",
    "shared": "let A = shared(lora(r=2))\nedit e at layer[*].ffn.up | layer[*].ffn.down { h += A(x) }",
    "nothing_to_train": "train t = [b] at embed",
    "concat": "edit e at layer[*].attn { kv = prefix(len=3) }",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_diagnostic(name, golden):
    with pytest.raises(PeftcError) as excinfo:
        planned(MISTAKES[name], BART)
    golden(f"error_{name}.txt", render_text(excinfo.value.diagnostics))


def test_uneven_coverage(golden):
    warnings = planned("edit e at layer[*].attn.v { h += lora(x, r=2) }", TABLES["llama"]).warnings
    golden("warning_uneven.txt", render_text(warnings))


def test_json_has_these_keys_and_reads_back():
    plan = planned(SPECS["folding"], BART).plan
    data = plan.model_dump()
    assert list(data) == ["format_version", "spec", "model", "edits", "totals", "expectations", "unread"]
    assert list(data["spec"]) == ["path", "sha256"]
    assert list(data["model"]) == ["id", "type", "parameters", "fingerprint", "fingerprint_version"]
    keys = ["name", "sites", "trained", "stored", "changed", "served", "foldable", "reason", "identity"]
    assert all(list(edit) == keys for edit in data["edits"])
    assert data["edits"][0]["sites"][0] == {
        "path": "encoder.layer[0].attn.self.q",
        "module": "model.encoder.layers.0.self_attn.q_proj",
    }
    assert list(data["totals"]) == ["base", "trained", "stored", "changed", "served"]
    assert data["expectations"][0] == {"text": "foldable(qv)", "holds": True}
    assert data["format_version"] == "2.0"
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert Plan.model_validate({**data, "format_version": "1.0"}) == plan  # its sites are ranges of one site each
    with pytest.raises(ValueError, match="format_version"):
        Plan.model_validate({**data, "format_version": "3.0"})
    with pytest.raises(ValueError, match="extra"):
        Plan.model_validate({**data, "more": 1})


def test_a_plan_prints_itself():
    result = planned(SPECS["mam"], BART)
    assert str(result.plan).startswith("test.peft on facebook/bart-large")
