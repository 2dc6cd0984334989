"""A spec that had no diagnostic on a model is not planned again, as long as nothing has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from peftc.cli.main import main

SPEC = "peft 1\nedit qv at layer[*].attn.q { h += lora(x, r=4) }\nexpect sites(qv) == 2\n"
FROM_CACHE = "has no diagnostic on model, from the cache"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path / "cache"))
    save_model(2)
    Path("a.peft").write_text(SPEC)
    return tmp_path


def save_model(layers: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 60}
    BertConfig(**sizes, num_hidden_layers=layers, architectures=["BertModel"]).save_pretrained("model")


def check(capsys: pytest.CaptureFixture[str], *options: str, spec: str = "a.peft") -> tuple[int, bool, str]:
    """The exit code, whether the cache had the outcome, and the report."""
    capsys.readouterr()
    code = main(["check", spec, "--model", "model", "--output-format", "json", "-v", *options])
    out, err = capsys.readouterr()
    return code, FROM_CACHE in err, out


def test_the_second_check_reports_the_same_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = check(capsys), check(capsys)
    assert (first[1], second[1]) == (False, True)
    assert (first[0], first[2]) == (second[0], second[2])
    assert check(capsys, "--no-cache") == first


def test_another_text_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    check(capsys)
    for text, code in ((SPEC.replace("r=4", "r=40"), 1), (SPEC.replace("== 2", "== 3"), 1), (SPEC + "# the same\n", 0)):
        Path("a.peft").write_text(text)
        assert check(capsys)[:2] == (code, code == 0)


def test_another_method_that_is_used_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    method = "peft 1\nmethod m(r = 4) { edit q at layer[*].attn.q { h += lora(x, r=r) } }\n"
    Path("m.peft").write_text(method)
    Path("a.peft").write_text('peft 1\nuse m from "m.peft"\napply m()\n')
    assert check(capsys)[:2] == (0, False)
    assert check(capsys)[:2] == (0, True)
    Path("m.peft").write_text(method.replace("r = 4", "r = 40"))
    assert check(capsys)[:2] == (1, False)


def test_another_model_of_the_name_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    check(capsys)
    save_model(3)
    assert check(capsys)[:2] == (1, False)  # three sites
    save_model(2)
    assert check(capsys)[:2] == (0, True)


def test_what_had_a_diagnostic_is_planned_again(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.peft").write_text("peft 1\ntrain n = [w, b] at layer[*].attn.norm | layer[*].add\n")
    first = check(capsys)
    assert json.loads(first[2])
    assert check(capsys) == first


def test_tasks_are_part_of_what_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.peft").write_text(
        "peft 1\nedit q at layer[*].attn.q per task { h += lora(x, r=4) }\nexpect trained == 256\n"
    )
    assert check(capsys)[:2] == (0, False)
    assert check(capsys)[:2] == (0, True)
    assert check(capsys, "--tasks", "a,b")[:2] == (1, False)


def test_damaged_entries_are_as_if_they_were_not_there(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    check(capsys)
    for path in (folder / "cache").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(b"specs", b"spec_"))
    assert check(capsys)[:2] == (0, False)
