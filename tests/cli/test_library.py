"""`recipes`, `forms` and `new`: what comes with peftc."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import peftc
from peftc.cli.main import main
from peftc.equations.table import FORMS
from peftc.filesystem import resources
from peftc.semantics.recipes import recipes
from tests import zoo

Out = pytest.CaptureFixture[str]
WITHOUT_ARXIV = {
    "attention_fusion",
    "frod",
    "hira",
    "hypernetwork_adaptbert",
    "hypernetwork_adaptbert_narrow",
    "psoft",
    "lora_adapter",
    "lora_adapter_narrow",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def test_every_recipe_has_a_paper_and_places() -> None:
    assert recipes().keys() == resources.recipes().keys()
    for name, recipe in recipes().items():
        authors, _, number = recipe.paper
        assert authors, name
        assert (number is None) == (name in WITHOUT_ARXIV), name
        assert number is None or f"arXiv:{number}" in " ".join(recipe.comment)
        assert recipe.places, name
        assert recipe.summary[-1] not in ".:;", name
    assert recipes()["lora"].paper == (
        "Hu et al. 2021",
        "LoRA: Low-Rank Adaptation of Large Language Models",
        "2106.09685",
    )
    assert recipes()["lora"].places == ["attn.q", "attn.v"]
    assert recipes()["lora"].parameters == {"r": "8", "alpha": "16", "dropout": "0"}


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_a_line_for_each(columns: int, folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command, names in (("recipes", sorted(recipes())), ("forms", list(FORMS))):
        assert main([command]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == names
        assert max(map(len, lines)) <= columns


def test_lists_as_json(folder: Path, capsys: Out) -> None:
    assert main(["recipes", "--json"]) == 0
    data = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert data.keys() == recipes().keys()
    assert data["mam"]["arxiv"] == "2110.04366"
    assert main(["forms", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == list(FORMS)
    assert main(["forms", "lora", "--json"]) == 0
    (lora,) = json.loads(capsys.readouterr().out)
    assert lora["facts"]["Folds"] == "yes"
    assert lora["arguments"][0]["name"] == "r"


def test_one_of_each(folder: Path, capsys: Out) -> None:
    assert main(["recipes", "scaled-parallel"]) == 0
    assert capsys.readouterr().out == resources.recipes()["scaled_parallel"].read_text(encoding="utf-8")
    assert main(["forms", "lora"]) == main(["explain", "lora"]) == 0
    own, explained = capsys.readouterr().out.split("lora(x, r", 2)[1:]
    assert own == explained
    for words, message in (
        (["recipes", "scaled_paralel"], "did you mean `scaled_parallel`?"),
        (["forms", "adaptor"], "there is no form `adaptor`; did you mean `adapter`?"),
        (["new", "lroa"], "there is no recipe `lroa`; did you mean `lora`?"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_costs_of_recipes(folder: Path, capsys: Out) -> None:
    zoo.config("llama").save_pretrained(folder)
    assert main(["recipes", "lora", "ia3", "--model", "config.json"]) == 0
    out = capsys.readouterr().out
    for name in ("lora", "ia3"):
        trained = peftc.plan(resources.recipes()[name], "config.json").totals.trained
        assert re.search(rf"^{name} .* {trained:,} ", out, re.M)
    assert main(["recipes", "cross_attention", "--model", "config.json"]) == 1
    captured = capsys.readouterr()
    assert "P201" in captured.out
    assert captured.out.startswith("peft 1\n")
    assert "error[P201]" in captured.err
    assert main(["recipes", "lora", "ia3", "--model", "config.json", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 2


# New specs


@pytest.mark.parametrize("name", resources.recipes())
def test_a_recipe_becomes_a_spec_that_checks(name: str, folder: Path) -> None:
    assert main(["new", name, "-o", "s.peft", "-q"]) == 0
    assert main(["check", "s.peft", "--strict", "-q"]) == 0
    assert (folder / "s.peft").read_text(encoding="utf-8") == recipes()[name].text


def test_a_new_spec_replaces_nothing(folder: Path, capsys: Out) -> None:
    (folder / "lora.peft").write_text("mine")
    assert main(["new", "lora"]) == 2
    assert "lora.peft is there already: name another file with -o" in capsys.readouterr().err
    assert (folder / "lora.peft").read_text() == "mine"
    assert main(["new", "lora", "-o", "-"]) == 0
    assert capsys.readouterr().out == recipes()["lora"].text
    assert main(["new", "scaled_parallel"]) == 0
    assert "wrote scaled-parallel.peft" in capsys.readouterr().out
    assert main(["new", "lora", "-o", "no/such/folder.peft"]) == 2
    assert main(["new", "lora", "--model", "gpt2"]) == 2
    (folder / "empty").mkdir()
    assert main(["new", "empty"]) == 2
    assert "there is no adapter_config.json in empty" in capsys.readouterr().err


# The sites of a selector


def test_sites_of_a_selector(folder: Path, capsys: Out) -> None:
    zoo.config("bart").save_pretrained(folder)
    words = ["sites", "--model", "config.json"]
    selector = "layer[*].attn.q | encoder.layer[0].ffn"
    assert main([*words, selector, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["sites"]
    assert main([*words, "--json"]) == 0
    every = json.loads(capsys.readouterr().out)["sites"]
    plan = peftc.plan("peft 1\nedit e at " + selector + " { h *= vector() }", "config.json")
    assert [one["path"] for one in entries] == [one.path for one in plan.edits[0].sites.ranges]
    assert all(one["states"] in [other["states"] for other in every] for one in entries)
    assert main([*words, selector]) == 0
    out = capsys.readouterr().out
    assert f"({len(plan.edits[0].sites)} sites)" in out
    assert "encoder.layer[0].ffn" in out
    assert main([*words, "layer[*].atn"]) == 1
    assert "did you mean `attn`?" in capsys.readouterr().err
    assert main([*words, "head { h = h } edit e at head"]) == 2
    assert main([*words, "layer["]) == 1


def test_a_recipe_comes_before_a_folder_of_its_name(folder: Path, capsys: Out) -> None:
    own = folder / "lora"
    own.mkdir()
    (own / "adapter_config.json").write_text("{}")
    assert main(["new", "lora", "-o", "-"]) == 0
    assert capsys.readouterr().out == recipes()["lora"].text
    assert main(["new", "./lora", "-o", "-"]) != 0  # its configuration is no adapter's
    assert main(["new", "lora", "--model", "gpt2"]) == 2
    assert "the folder is ./lora" in capsys.readouterr().err
