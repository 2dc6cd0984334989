"""The class of a model by the task of an auto class: `NAME:TASK`, `--task`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BertForSequenceClassification
from transformers.models.auto import modeling_auto as auto

import peftc
from peftc.cli.main import main
from peftc.models.configs import auto_classes
from peftc.models.names import local_values, split_task
from peftc.models.sources import load_or_initialize, resolve
from tests import zoo
from tests.refusals import refused

HEAD = "peft 1\ntrain head = [w, b] at head\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.config("bert").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "question-answering", "base"])
def test_the_head_is_that_of_the_task(folder: Path, task: str) -> None:
    source = resolve(f"{folder}:{task}")
    assert source.model_class is auto_classes()[task]._model_mapping[type(zoo.config("bert"))]
    assert (source.id, source.checkpoint) == (f"{folder}:{task}", str(folder))
    assert source.model_class is not None
    model = source.model_class(zoo.config("bert"))
    totals = peftc.plan(HEAD, f"{folder}:{task}").totals
    assert totals == peftc.plan(HEAD, model).totals
    if task.endswith("-classification"):
        assert totals.trained == sum(p.numel() for n, p in model.named_parameters() if n.startswith("classifier"))


def test_every_auto_class_has_a_name() -> None:
    """Of those that transformers has a table of models for, each by its own name in kebab case."""
    names = {"CausalLM": "causal-lm", "Seq2SeqLM": "seq2seq-lm", "SequenceClassification": "sequence-classification"}
    for name, task in names.items():
        assert auto_classes()[task] is getattr(auto, f"AutoModelFor{name}")
    assert len(set(auto_classes().values())) == len(auto_classes()) > 25
    assert all(cls._model_mapping for cls in auto_classes().values())


def test_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    zoo.config("bert").save_pretrained(tmp_path / "bert:base")
    assert split_task(str(tmp_path / "bert:base")) == (str(tmp_path / "bert:base"), None)
    assert split_task(str(tmp_path / "bert:base:masked-lm")) == (str(tmp_path / "bert:base"), "masked-lm")
    local = local_values(str(tmp_path / "bert:base"))
    assert local is not None
    assert local.head is None


def test_no_model_for_a_task(folder: Path) -> None:
    near = refused("P513", lambda: peftc.plan(HEAD, f"{folder}:sequence-clasification"))
    assert "sequence-classification" in str(near.help)
    other = refused("P513", lambda: peftc.plan(HEAD, f"{folder}:image-classification"))
    assert "`token-classification`" in str(other.help)


def test_weights_come_from_the_folder(folder: Path) -> None:
    zoo.build("bert").save_pretrained(folder)  # type: ignore[operator]
    model, of = load_or_initialize(resolve(f"{folder}:sequence-classification"), 0)
    assert isinstance(model, BertForSequenceClassification)
    assert of == "its weights"


def test_the_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "s.peft"
    spec.write_text(HEAD)
    options = ["plan", str(spec), "--model", str(folder), "--json"]
    plans = list[object]()
    for more in (["--task", "sequence-classification"], ["--task", "sequence-classification", "--no-cache"]):
        assert main([*options, *more]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert main(["check", str(spec), "--model", str(folder), "--task", "sequence-classification"]) == 0
    assert main(["check", str(spec), "--model", str(folder), "--task", "image-classification"]) == 1
    capsys.readouterr()
    (tmp_path / "peftc.toml").write_text('models = ["bert:sequence-classification"]\n')
    assert main(["check", str(spec)]) == 0
    assert main(["lock", str(spec)]) == 0
    assert "bert:sequence-classification" in spec.with_suffix(".lock.json").read_text()
    with pytest.raises(SystemExit) as exit_:
        main(["check", str(spec), "--task", "base"])
    assert exit_.value.code == 2
    assert "name it: `--model`" in capsys.readouterr().err
