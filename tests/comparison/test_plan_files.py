"""`plan -o`, `compile --plan` and `lock`: a written plan is applied, or its drift is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from peftc.cli.main import main
from tests.comparison.test_diff import NEW, config

SPEC = "peft 1\nedit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=4) }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qv.peft").write_text(SPEC)
    (tmp_path / "new.peft").write_text(NEW)
    config().save_pretrained(tmp_path / "bart")
    llama(3).save_pretrained(tmp_path / "llama")
    return tmp_path


def llama(layers: int) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 60}
    return LlamaConfig(**sizes, num_hidden_layers=layers, architectures=["LlamaForCausalLM"])


def change(path: Path, edit: Any) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_a_plan_is_applied_without_its_spec(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qv.peft", "--model", "llama", "--set", "x=1", "-o", "plan.json"]) == 1  # no such setting
    assert not (folder / "plan.json").exists()
    assert main(["plan", "qv.peft", "--model", "llama", "-o", "plan.json"]) == 0
    (folder / "qv.peft").unlink()
    assert main(["compile", "--plan", "plan.json", "-o", "out"]) == 0
    files = json.loads((folder / "plan.json").read_text())
    assert (folder / "out" / "spec.peft").read_text() == "\n".join([*files["spec"], ""])
    compiled = json.loads((folder / "out" / "plan.json").read_text())
    for ours, theirs in zip(files["plans"][0]["edits"], compiled["edits"], strict=True):
        assert {name: theirs[name] for name in ours if name != "shapes"} == {
            n: v for n, v in ours.items() if n != "shapes"
        }


def test_another_model_is_drift(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qv.peft", "--model", "llama", "-o", "plan.json"]) == 0
    llama(4).save_pretrained(folder / "llama")
    capsys.readouterr()
    assert main(["compile", "--plan", "plan.json", "-o", "out"]) == 1
    message = capsys.readouterr().err
    assert "error[P850]" in message
    assert "+ decoder.layer[3].attn.self.v" in message
    assert "stored     768 → 1,024 (+256)" in message
    assert not (folder / "out").exists()


def test_a_renamed_module_is_drift(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qv.peft", "--model", "llama", "-o", "plan.json"]) == 0

    def rename(data: Any) -> None:
        site = data["plans"][0]["edits"][0]["sites"][0]
        site["module"] = site["module"].replace("q_proj", "query")

    change(folder / "plan.json", rename)
    capsys.readouterr()
    assert main(["compile", "--plan", "plan.json"]) == 1
    message = capsys.readouterr().err
    assert "modules    - model.layers.{0..2}.self_attn.query × 3" in message
    assert "+ model.layers.{0..2}.self_attn.q_proj × 3" in message


def test_a_lock_has_each_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "qv.peft", "--model", "llama", "--model", "bart"]) == 0
    lock = json.loads((folder / "qv.lock.json").read_text())
    assert [plan["model"]["type"] for plan in lock["plans"]] == ["llama", "bart"]
    assert set(lock["versions"]) == {"peftc", "torch", "transformers"}
    before = (folder / "qv.lock.json").read_bytes()
    assert main(["lock", "qv.peft", "--model", "llama", "--model", "bart"]) == 0
    assert (folder / "qv.lock.json").read_bytes() == before
    capsys.readouterr()
    assert main(["diff", "qv.lock.json", "new.peft", "--model", "bart", "--format", "json"]) == 0
    changes = {edit["name"]: edit["change"] for edit in json.loads(capsys.readouterr().out)["edits"]}
    assert changes == {"qv": "removed", "ffn": "added", "v": "added"}


def test_nothing_is_locked_if_an_expectation_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "qv.peft").write_text(SPEC + "expect stored <= 10\n")
    assert main(["lock", "qv.peft", "--model", "llama"]) == 1
    assert not (folder / "qv.lock.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["compile", "qv.peft"], 2),
        (["compile", "--plan", "plan.json", "--model", "llama"], 2),
        (["compile", "--plan", "plan.json", "--set", "r=2"], 2),
        (["compile", "--plan", "none.json"], 2),
        (["compile", "--plan", "qv.peft"], 1),
        (["compile", "--plan", "two.lock.json"], 1),
        (["lock", "-", "--model", "llama"], 2),
        (["plan", "qv.peft", "--model", "llama", "-o", "none/plan.json"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    assert main(["plan", "qv.peft", "--model", "llama", "-o", "plan.json"]) == 0
    (folder / "two.peft").write_text(SPEC)
    assert main(["lock", "two.peft", "--model", "llama", "--model", "bart"]) == 0
    assert main(arguments) == code
    assert "Traceback" not in capsys.readouterr().err


CONFIGURATION = """
exclude = ["new.peft"]

[[specs]]
paths = ["qv.peft"]
models = ["llama", "bart"]
"""


def test_check_locked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "peftc.toml").write_text(CONFIGURATION)
    assert main(["check", ".", "--locked"]) == 1
    assert "error[P853]: qv.peft has no lock qv.lock.json" in capsys.readouterr().out
    assert main(["lock", "."]) == 0
    assert main(["check", ".", "--locked"]) == 0
    assert main(["check", ".", "--locked", "--isolated"]) == 0  # on the models of the lock
    before = (folder / "qv.lock.json").read_text()

    def forget(data: Any) -> None:
        del data["plans"][1]

    change(folder / "qv.lock.json", forget)
    capsys.readouterr()
    assert main(["check", "qv.peft", "--locked"]) == 1
    assert "error[P853]: qv.lock.json has no plan on bart" in capsys.readouterr().out
    (folder / "qv.lock.json").write_text(before)
    llama(4).save_pretrained(folder / "llama")
    assert main(["check", "qv.peft"]) == 0
    capsys.readouterr()
    assert main(["check", "qv.peft", "--locked"]) == 1
    output = capsys.readouterr().out
    assert output.count("error[P850]") == 1
    assert "the plan on llama is another than that in qv.lock.json" in output
    assert "+ decoder.layer[3].attn.self.q" in output
    (folder / "qv.lock.json").write_text("{}")
    assert main(["check", "qv.peft", "--locked"]) == 1
    assert "error[P851]" in capsys.readouterr().out


def test_a_spec_is_locked_for_the_models_of_its_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "qv.peft"]) == 1
    assert "qv.peft is for no model" in capsys.readouterr().err
    (folder / "peftc.toml").write_text(CONFIGURATION)
    assert main(["lock", "."]) == 0
    lock = json.loads((folder / "qv.lock.json").read_text())
    assert [plan["model"]["id"] for plan in lock["plans"]] == ["llama", "bart"]
    assert not (folder / "new.lock.json").exists()
    assert main(["lock", "none.peft"]) == 2


def test_models_with_different_tasks_have_no_lock(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "qv.peft").write_text(SPEC.replace("attn.v {", "attn.v per task {"))
    tables = [f'[[specs]]\npaths = ["qv.peft"]\nmodels = ["{name}"]\n' for name in ("llama", "bart")]
    (folder / "peftc.toml").write_text(
        "".join(f'{table}tasks = ["{i}a", "b"]\n' for i, table in zip("xy", tables, strict=True))
    )
    assert main(["lock", "qv.peft"]) == 1
    assert "error[P853]: the models of qv.peft have different tasks" in capsys.readouterr().err
    (folder / "peftc.toml").write_text("".join(f'{table}tasks = ["a", "b"]\n' for table in tables))
    assert main(["lock", "qv.peft"]) == 0
    assert json.loads((folder / "qv.lock.json").read_text())["tasks"] == ["a", "b"]
    assert main(["check", "qv.peft", "--locked"]) == 0
    assert main(["check", "qv.peft", "--locked", "--isolated"]) == 0
