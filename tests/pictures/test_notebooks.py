"""What notebooks show of plans, tables of sites and saved adapters: nothing in a name is markup."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2LMHeadModel

import peftc
from peftc.exchange.inspection import Inspection
from peftc.planning.report.plan import Plan
from peftc.planning.report.site_tree import site_rows
from tests import zoo
from tests.pictures.test_page import Page

NASTY = "<script>alert('x')</script>&\"\x1b[2J"
SPEC = "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=2) }\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n"


def parsed(html: str) -> Page:
    page = Page(html)
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.all}
    return page


def text_of(html: str) -> str:
    return " ".join(parsed(html).texts)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return peftc.plan(SPEC + "expect trained == 1\n", zoo.build("bart"))


def test_a_plan_has_its_counts_and_its_picture(plan: Plan) -> None:
    html = plan._repr_html_()
    text = text_of(html)
    for one in (*plan.edits, plan.totals):
        assert f"{one.trained:,}" in text
        assert f"{one.served:,}" in text
    for one in plan.edits:
        assert one.reason.split("`")[0].strip() in text
    assert "fails" in text
    assert "trained == 1" in text
    assert "<svg" in html
    assert (plan._repr_svg_() or "").startswith("<svg")


def test_without_pygraphviz_there_are_tables(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.pictures import layout

    layout.layout_of.cache_clear()
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    html = plan._repr_html_()
    assert "<svg" not in html
    assert plan._repr_svg_() is None
    assert f"{plan.totals.trained:,}" in text_of(html)
    layout.layout_of.cache_clear()


def test_a_picture_is_no_part_of_a_plan(plan: Plan) -> None:
    for other in (
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
        Plan.model_validate_json(plan.model_dump_json()),
    ):
        assert other == plan
        assert "<svg" not in other._repr_html_()
        assert other._repr_svg_() is None
    assert "figure" not in plan.model_dump_json()
    assert plan.model_copy() == plan


def test_a_plan_does_not_keep_its_model() -> None:
    model = zoo.build("gpt2")
    reference, plan = weakref.ref(model), peftc.plan(SPEC, model)
    peftc.plan(SPEC, zoo.build("bart"))
    del model
    gc.collect()
    assert reference() is None
    assert "<svg" in plan._repr_html_()


def test_a_table_of_sites() -> None:
    table = peftc.sites(zoo.build("bart"))
    text = re.sub(r"\s+", " ", text_of(table._repr_html_()))
    for row in site_rows(table):
        for cell in row:
            assert re.sub(r"\s+", " ", cell.strip()) in text


def test_a_table_of_sites_has_a_picture_of_the_layers() -> None:
    svg = peftc.sites(zoo.build("bart"))._repr_svg_() or ""
    assert svg.startswith("<svg")
    for word in ("encoder.layer[0..1] × 2", "decoder.layer[0..2] × 3", "attn.cross", "ffn"):
        assert word in svg
    assert "lora" not in svg


def test_a_saved_adapter_has_the_picture_of_its_plan(tmp_path: Path) -> None:
    zoo.build("gpt2").save_pretrained(tmp_path / "base")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    peftc.compile(SPEC, model, seed=0)
    peftc.save(model, tmp_path / "a")
    inspection = peftc.inspect(tmp_path / "a")
    svg = inspection._repr_svg_() or ""
    planned = peftc.plan(inspection.spec, str(tmp_path / "base"))._repr_svg_()
    assert svg.replace(inspection.folder, "&lt;text&gt;") == planned
    assert "lora" in svg
    assert inspection.model_copy(update={"base": "nowhere"})._repr_svg_() is None


def test_a_saved_adapter(tmp_path: Path) -> None:
    model = zoo.build("gpt2")
    peftc.compile(SPEC, model, seed=0)
    peftc.save(model, tmp_path / "a")
    inspection = peftc.inspect(tmp_path / "a", model=zoo.build("gpt2"))
    text = text_of(inspection._repr_html_())
    for edit in inspection.edits:
        for layer in edit.layers:
            assert f"{layer.parameters:,}" in text
            assert f"{layer.norm:.3g}" in text
    assert "h += lora" in text


def test_names_are_data(plan: Plan, tmp_path: Path) -> None:
    model = plan.model.model_copy(update={"id": NASTY, "type": NASTY})
    edit = plan.edits[0].model_copy(update={"name": NASTY, "reason": NASTY})
    expectation = plan.expectations[0].model_copy(update={"text": NASTY})
    spec = plan.spec.model_copy(update={"path": NASTY})
    nasty: Any = plan.model_copy(
        update={"model": model, "edits": (edit,), "expectations": (expectation,), "spec": spec, "unread": ()}
    )
    table = peftc.sites(zoo.build("gpt2"))
    pages = [
        Plan.model_validate(nasty.model_dump())._repr_html_(),
        replace(table, model_id=NASTY, model_type=NASTY, warnings=(NASTY,))._repr_html_(),
        inspection(NASTY)._repr_html_(),
    ]
    for html in pages:
        assert "alert('x')" in text_of(html)
        assert "<script" not in html
        assert "\x1b" not in html


def inspection(name: str) -> Inspection:
    layer = {"layer": name, "parameters": 1, "norm": 1.0}
    totals = dict.fromkeys(("base", "trained", "stored", "changed", "served"), 1)
    values = dict.fromkeys(("folder", "peftc", "adapter_format", "spec", "base", "type"), name)
    others = {"origin": None, "seed": 0, "tasks": (name,), "dtypes": (name,), "bytes": 1, "notes": (name,)}
    return Inspection.model_validate(
        {**values, **others, "totals": totals, "edits": [{"name": name, "layers": [layer]}]}
    )
