"""Code of a model's repository: it runs only where it is trusted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

import peftc
from peftc.cli.main import main
from tests import zoo
from tests.refusals import Q, refused

CONFIGURATION = """
from transformers import {config}
with open({marker!r}, "a") as file:
    file.write("configuration ")

class OwnConfig({config}):
    model_type = "somebody-s-own"
"""
MODELLING = """
from transformers import {model}
from .configuration_own import OwnConfig
with open({marker!r}, "a") as file:
    file.write("modelling ")

class OwnForCausalLM({model}):
    config_class = OwnConfig
"""
GENERATION = """
with open({marker!r}, "a") as file:
    file.write("generation ")

def generate(model, **kwargs):
    return "own"
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder with a model whose code creates a file when it runs, and that file's path."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    folder, marker = tmp_path / f"own_{tmp_path.name}", tmp_path / "ran"
    zoo.build("llama").save_pretrained(folder)
    names = {"config": "LlamaConfig", "model": "LlamaForCausalLM", "marker": str(marker)}
    (folder / "configuration_own.py").write_text(CONFIGURATION.format(**names))
    (folder / "modeling_own.py").write_text(MODELLING.format(**names))
    change(folder, model_type="somebody-s-own", architectures=["OwnForCausalLM"])
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder, auto_map=auto)
    return folder, marker


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_code_of_a_repository_is_not_run(repository: tuple[Path, Path]) -> None:
    folder, marker = repository
    for name in (str(folder), str(folder / "config.json")):
        for call in (peftc.sites, peftc.trace):
            diagnostic = refused("P504", lambda call=call, name=name: call(name))
            assert "trust_remote_code=True" in str(diagnostic.help)
            assert "--trust-remote-code" in str(diagnostic.help)
        for both in (peftc.plan, peftc.compile):
            refused("P504", lambda both=both, name=name: both(Q, name))
    assert not marker.exists()


def test_code_of_a_repository_is_run_where_it_is_trusted(repository: tuple[Path, Path]) -> None:
    folder, marker = repository
    table = peftc.sites(folder, trust_remote_code=True)
    assert set(marker.read_text().split()) == {"configuration", "modelling"}
    assert [s.path for s in table.sites] == [s.path for s in peftc.sites(zoo.build("llama")).sites]
    assert table.model_type == "somebody-s-own"
    assert peftc.plan(Q, str(folder / "config.json"), trust_remote_code=True).totals.trained > 0
    assert peftc.trace(folder, trust_remote_code=True)
    model = peftc.compile(Q, folder, seed=0, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    there = zoo.build("llama").state_dict()
    now = peftc.remove(model).state_dict()
    assert all(torch.equal(now[k], v) for k, v in there.items())


def test_a_trusted_repository_uses_its_own_generate(repository: tuple[Path, Path]) -> None:
    folder, marker = repository
    (folder / "custom_generate").mkdir()
    text = GENERATION.format(marker=str(marker))
    (folder / "custom_generate" / "generate.py").write_text(text)
    refused("P504", lambda: peftc.compile(Q, folder))
    assert not marker.exists()
    model = peftc.compile(Q, folder, seed=0, trust_remote_code=True)
    assert "generation" in marker.read_text()
    assert model.generate(inputs=torch.ones(1, 2, dtype=torch.long)) == "own"


def test_the_command_line_asks_before_it_runs_code(
    repository: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, marker = repository
    spec = tmp_path / "q.peft"
    spec.write_text(Q)
    commands = (["sites"], ["plan", str(spec)], ["compile", str(spec)])
    for command in commands:
        assert main([*command, "--model", str(folder)]) == 1
        assert "P504" in capsys.readouterr().err
    assert not marker.exists()
    for command in commands:
        assert main([*command, "--model", str(folder), "--trust-remote-code"]) == 0
    assert marker.exists()


def test_a_class_that_transformers_has_needs_no_code(repository: tuple[Path, Path]) -> None:
    """transformers' own class is used for a known type; code in the folder is not run."""
    folder, marker = repository
    change(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    assert peftc.plan(Q, folder).totals.trained > 0
    assert isinstance(peftc.compile(Q, folder), transformers.LlamaForCausalLM)
    change(folder, architectures=["OwnForCausalLM"])
    refused("P504", lambda: peftc.plan(Q, folder))
    config = transformers.LlamaConfig.from_pretrained(folder)
    refused("P504", lambda: peftc.plan(Q, config))
    assert not marker.exists()


@pytest.mark.parametrize("breakage", ["raise ValueError('no')", "import nothing_that_there_is", None])
def test_trusted_code_that_fails_is_a_diagnostic(repository: tuple[Path, Path], breakage: str | None) -> None:
    folder, _ = repository
    path = folder / "modeling_own.py"
    if breakage is None:
        path.unlink()
    else:
        path.write_text(breakage)
    assert refused("P510", lambda: peftc.plan(Q, folder, trust_remote_code=True)).notes


def test_trusting_a_model_without_code_changes_nothing() -> None:
    assert peftc.plan(Q, "gpt2", trust_remote_code=True) == peftc.plan(Q, "gpt2")
