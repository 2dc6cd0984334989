"""The command `peftc breaking`: its sides, its outputs and its exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig

import peftc
from peftc.cli.main import main
from tests import zoo

OLD = "peft 1\nedit qv at layer[*].attn.q { h += lora(x, r=4) }\n"
NEW = "peft 1\nedit qv at layer[*].attn.q { h += 2 * lora(x, r=8) }\n"


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with specs, of which one has changed and one is gone; a configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "specs" / f"{name}.peft").write_text(OLD)
    (tmp_path / "specs" / "forms.peft").write_text("peft 2\nform twice(x) { f = 2 * x }\n")
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "one")
    (tmp_path / "specs" / "a.peft").write_text(NEW)
    (tmp_path / "specs" / "c.peft").unlink()
    (tmp_path / "specs" / "d.peft").write_text(NEW)
    config = BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=40, encoder_ffn_dim=8, decoder_ffn_dim=8
    )
    config.architectures = ["BartForConditionalGeneration"]
    config.save_pretrained(tmp_path / "bart")
    (tmp_path / "old.peft").write_text(OLD)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> Any:
    """The report as data."""
    assert main(["breaking", *arguments, "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)


def of(data: Any) -> dict[str, list[str]]:
    return {one["old"]: [finding["category"] for finding in one["findings"]] for one in data["comparisons"]}


def test_two_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(capsys, "specs/a.peft", "--against", "old.peft", "--model", "bart", code=1)
    assert data["format_version"] == "1.0"
    assert data["comparisons"][0]["model"] == "bart"
    load, numeric = data["comparisons"][0]["findings"]
    assert load["parameters"] == ["lora.A [4, 16] → [8, 16]", "lora.B [16, 4] → [16, 8]"]
    assert load["sites"] == [
        "encoder.layer[0].attn.self.q",
        "decoder.layer[0].attn.self.q",
        "decoder.layer[0].attn.cross.q",
    ]
    assert "`h = h + lora(x)` is now `h = h + 2 * lora(x)`" in numeric["reason"]
    assert of(run(capsys, "old.peft", "--against", "old.peft", code=0)) == {"old.peft": []}


def test_a_folder_against_a_revision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"specs/a.peft": ["LOAD", "NUMERIC"], "specs/b.peft": [], "specs/c.peft": ["LOAD"]}
    data = run(capsys, "specs", "--against", "git:HEAD", code=1)
    assert of(data) == {f"git:HEAD:{path}": categories for path, categories in expected.items()}
    named = run(capsys, "specs/b.peft", "specs/d.peft", "--against", "git:HEAD", code=0)
    assert of(named) == {"git:HEAD:specs/b.peft": []}
    git("worktree", "add", "--quiet", "before")
    assert of(run(capsys, "specs", "--against", "before/specs", code=1)) == {
        f"before/{path}": categories for path, categories in expected.items()
    }


def test_other_sides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = zoo.build("bart", torch.float32)
    peftc.save(peftc.compile(OLD, base, seed=0), folder / "adapter")
    assert of(run(capsys, "old.peft", "--against", "adapter", code=0)) == {"adapter": []}
    assert of(run(capsys, "specs/a.peft", "--against", "git:HEAD:specs/a.peft", code=1)) == {
        "git:HEAD:specs/a.peft": ["LOAD", "NUMERIC"]
    }
    assert main(["lock", "old.peft", "--model", "bart"]) == 0
    capsys.readouterr()
    locked = run(capsys, "specs/a.peft", "--against", "old.lock.json", code=1)
    assert locked["comparisons"][0]["model"] == "bart"
    (folder / "old.peft").write_text(
        "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }\n"
    )
    peftc.save(peftc.compile((folder / "old.peft").read_text(), zoo.build("bart", torch.float32), seed=0), folder / "p")
    assert of(run(capsys, "old.peft", "--against", "p", "--model", "bart", code=0)) == {"p": []}


def test_text_and_markdown_have_each_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["specs", "--against", "git:HEAD", "--model", "bart"]
    data = run(capsys, *arguments, code=1)
    for style in ("text", "markdown"):
        assert main(["breaking", *arguments, "--format", style]) == 1
        output = capsys.readouterr().out
        for finding in (one for pair in data["comparisons"] for one in pair["findings"]):
            for words in (
                finding["category"],
                finding["reason"],
                finding["help"],
                *finding["parameters"],
                *finding["sites"],
            ):
                assert words in output, (style, words)


def unusable() -> Iterator[tuple[list[str], str]]:
    yield ["specs", "--against", "old.peft"], "several specs"
    yield ["none.peft", "--against", "old.peft"], "there is no file none.peft"
    yield ["old.peft", "--against", "none.peft"], "none.peft"
    yield ["old.peft", "--against", "git:nowhere"], "P852"
    yield ["bad.peft", "--against", "old.peft"], "P101"
    yield ["old.peft", "--against", "bart/config.json"], "P851"
    yield ["old.peft", "--against", "specs/forms.peft"], "P119"
    yield ["old.peft", "--against", "../elsewhere"], "elsewhere"


@pytest.mark.parametrize(("arguments", "text"), list(unusable()))
def test_what_cannot_be_compared(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    (folder / "bad.peft").write_text("peft 1\nedit q at layer[*].attn.q { h += loraa(x, r=4) }\n")
    assert main(["breaking", *arguments]) == 2
    assert text in capsys.readouterr().err
