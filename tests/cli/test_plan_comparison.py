"""`peftc plan` of several specs, or on several models: one table with the numbers of the plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from junitparser import JUnitXml

import peftc
from peftc.checking.models import ModelPlans
from peftc.cli.main import main
from peftc.planning.report.plan import Plan
from peftc.semantics.expand import expand
from tests import zoo

Out = pytest.CaptureFixture[str]
LORA = "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n"
CROSS = "peft 1\nedit q at decoder.layer[*].attn.cross.q { h += lora(x, r=2) }\n"
PROMPT = "peft 1\nedit p at embed { h = concat(prompt(len=2), h) }\n"  # the graph decides
FAILS = LORA + "expect trained == 1\n"
BAD = "peft 1\nedit q at layer[*].attn.q { h += lra(x, r=2) }\n"
WARNS = "peft 1\ntrain n = [w, b] at layer[*].norm\n"  # P204 on LLaMA, whose norms have no bias
METHODS = "peft 2\nmethod one(r = 2) { edit q at layer[*].attn.q { h += lora(x, r=r) } }\nmethod two() { }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("llama", "bart"):
        zoo.config(name).save_pretrained(tmp_path / "models" / name)
    (tmp_path / "specs").mkdir()
    for name, text in {"lora": LORA, "cross": CROSS, "prompt": PROMPT}.items():
        (tmp_path / "specs" / f"{name}.peft").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


MODELS = ("--model", "models/llama", "--model", "models/bart")


def test_methods_and_models(folder: Path, capsys: Out) -> None:
    assert main(["plan", "specs", *MODELS]) == 1  # LLaMA has no attention to an encoder
    captured = capsys.readouterr()
    rows = re.split(r"^(?=cross|lora|prompt)", captured.out, flags=re.M)
    assert [row.split()[0] for row in rows[1:]] == ["cross", "lora", "prompt"]
    for row in rows[1:]:
        name = row.split()[0]
        for model in ("llama", "bart"):
            if (name, model) == ("cross", "llama"):
                assert row.split()[1] == "P201"
                continue
            plan = peftc.plan(f"specs/{name}.peft", f"models/{model}")
            assert f"{plan.totals.trained:,}" in row
            assert f" {sum(len(edit.sites) for edit in plan.edits)} site" in row
    assert captured.err.count("error[P201]") == 1
    assert "matches nothing in models/llama" in captured.err


def test_one_model_has_all_counts(folder: Path, capsys: Out) -> None:
    assert main(["plan", "specs/lora.peft", "specs/prompt.peft", "--model", "models/llama"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^method +sites +trained +stored +changed +served$", out, re.M)
    totals = peftc.plan("specs/lora.peft", "models/llama").totals
    counts = [totals.trained, totals.stored, totals.changed, totals.served]
    (row,) = re.findall(r"^lora .*$", out, re.M)
    assert row.split()[2:] == [f"{count:,}" for count in counts]


def test_json(folder: Path, capsys: Out) -> None:
    assert main(["plan", "specs/lora.peft", "specs/cross.peft", *MODELS, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["format_version"] == "1.0"
    assert data["specs"] == ["specs/lora.peft", "specs/cross.peft"]
    assert data["models"] == ["models/llama", "models/bart"]
    pairs = [(one["spec"], one["model"]) for one in data["plans"]]
    assert pairs == [(spec, model) for spec in data["specs"] for model in data["models"]]
    for one in data["plans"]:
        if one["plan"] is None:
            assert [d["code"] for d in one["diagnostics"]] == ["P201"]
        else:
            assert not one["diagnostics"]
            assert Plan.model_validate(one["plan"]) == peftc.plan(one["spec"], one["model"])
    assert sum(one["plan"] is None for one in data["plans"]) == 1


def test_one_spec_on_one_model_is_a_plan(folder: Path, capsys: Out) -> None:
    assert main(["plan", "specs/lora.peft", "--model", "models/llama", "--model", "models/llama"]) == 0
    lines = capsys.readouterr().out.splitlines()
    plain = str(peftc.plan("specs/lora.peft", "models/llama")).splitlines()
    assert [line for line in lines if not line.startswith("  shapes")] == plain
    assert main(["plan", "specs/lora.peft", "--model", "models/llama", "--json"]) == 0
    assert Plan.model_validate_json(capsys.readouterr().out) == peftc.plan("specs/lora.peft", "models/llama")


def test_each_failure_has_its_code(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "fails.peft").write_text(FAILS)
    (folder / "specs" / "bad.peft").write_text(BAD)
    (folder / "specs" / "methods.peft").write_text(METHODS)  # has no plan, and is left out of a folder
    assert main(["plan", "specs", "--model", "models/llama", "--model", "models/none"]) == 1
    captured = capsys.readouterr()
    rows = dict(re.findall(r"^(bad|fails|lora|methods) (.*(?:\n .*)*)", captured.out, re.M))
    assert "methods" not in rows
    assert rows["bad"].split() == ["P101", "P101"]
    assert rows["lora"].split()[1] == "P501"
    assert "P304" in rows["fails"]
    assert f"{peftc.plan('specs/lora.peft', 'models/llama').totals.trained:,}" in rows["fails"]
    for code in ("P101", "P201", "P304", "P501"):
        assert captured.err.count(f"error[{code}]") == 1, code


def test_warnings_fail_with_strict(folder: Path, capsys: Out) -> None:
    (folder / "w.peft").write_text(WARNS)
    words = ["plan", "w.peft", "specs/lora.peft", "--model", "models/llama"]
    assert main(words) == 0
    assert "warning[P204]" in capsys.readouterr().err
    assert main([*words, "--strict"]) == 1


def test_reports(folder: Path, capsys: Out) -> None:
    """In junit each spec is a suite, and each model a test of it."""
    assert main(["plan", "specs/lora.peft", "specs/cross.peft", *MODELS, "--output-format", "junit"]) == 1
    xml = JUnitXml.fromstring(capsys.readouterr().out)
    names = {suite.name: [case.name for case in suite] for suite in xml}
    assert names == {key: ["on models/llama", "on models/bart"] for key in ("specs/lora.peft", "specs/cross.peft")}
    assert xml.failures == 1
    assert main(["plan", "specs/lora.peft", *MODELS, "--output-format", "json"]) == 0
    captured = capsys.readouterr()
    assert "trained parameters" in captured.out
    assert not captured.err


def test_wrong_usage(folder: Path, capsys: Out) -> None:
    assert main(["plan", "specs", "--model", "models/llama", "-o", "plan.json"]) == 2
    assert "-o writes one plan" in capsys.readouterr().err
    assert main(["plan", "specs/lora.peft", "none.peft", "--model", "models/llama"]) == 2
    assert "there is no file none.peft" in capsys.readouterr().err
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize("cache", ["", "cache"])
def test_a_model_is_traced_once(folder: Path, cache: str, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEFTC_CACHE", cache and str(folder / cache))
    words = ["plan", "specs", "specs/lora.peft", *MODELS, "-v"]
    for traces in (2, 0 if cache else 2):
        main(words)
        assert capsys.readouterr().err.count("peftc: tracing") == traces


def test_plans_of_a_model_are_those_of_a_plan_each(folder: Path) -> None:
    plans = ModelPlans("models/bart", cache=False)
    for text in (LORA, PROMPT, CROSS):
        flat = expand(peftc.parse(text))
        assert plans.plan(flat).plan.totals == peftc.plan(text, "models/bart").totals
