"""`peftc diff`: what differs between specs, revisions, adapters and plans."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import peftc
from peftc.cli.main import main

OLD = """peft 2
form graded(x, r) {
    param A[r, d(x)] = kaiming
    param B[d(out), r] = zeros
    f = B @ A @ x
}
let width = 4
edit ffn at encoder.layer[*].ffn { h += graded(x, r=width) }
edit q at layer[*].attn.q { h += lora(x, r=4) }
expect stored <= 50%
"""
NEW = """peft 2
form graded(x, r) {
    param A[r, d(x)] = kaiming
    param B[d(out), r] = zeros
    f = 2 * B @ A @ x
}
edit ffn at layer[*].ffn { h += graded(x, r=8) }
edit v at layer[0..1].attn.v { h += lora(x, r=4) }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with OLD as its revision, NEW in the folder, and a model's configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.peft").write_text(OLD)
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "one")
    (tmp_path / "specs" / "a.peft").write_text(NEW)
    (tmp_path / "old.peft").write_text(OLD)
    config().save_pretrained(tmp_path / "bart")
    return tmp_path


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True)


def config() -> BartConfig:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 3), ("ffn_dim", 24))}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    result = BartConfig(vocab_size=60, d_model=16, max_position_embeddings=20, **sizes, **heads)
    result.architectures = ["BartForConditionalGeneration"]
    return result


def diff(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """The difference as data."""
    assert main(["diff", *arguments, "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)


def sides(data: Any, edit: str | None = None) -> dict[str, tuple[list[str], list[str]]]:
    entries = data["others"] if edit is None else next(e for e in data["edits"] if e["name"] == edit)["differences"]
    return {entry["name"]: (entry["old"], entry["new"]) for entry in entries}


def test_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = diff(capsys, "git:HEAD:specs/a.peft", "specs/a.peft")
    assert {edit["name"]: edit["change"] for edit in data["edits"]} == {"ffn": "changed", "v": "added", "q": "removed"}
    assert sides(data, "ffn") == {
        "at": (["encoder.layer[*].ffn"], ["layer[*].ffn"]),
        "equations": (["h += graded(x, r=4)"], ["h += graded(x, r=8)"]),
    }
    assert sides(data) == {
        "form graded": (["    f = B @ A @ x"], ["    f = 2 * B @ A @ x"]),
        "expectations": (["expect stored <= 50%"], []),
    }
    assert data["model"] is None


def test_on_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = diff(capsys, "git:HEAD:specs/a.peft", "specs/a.peft", "--model", "bart")
    ffn, added, removed = (sides(data, name) for name in ("ffn", "v", "q"))
    assert ffn["sites"] == ([], ["decoder.layer[0..2].ffn × 3"])
    # r (d(x) + d(out)) at 3 sites, then at 6
    assert ffn["stored"] == (["384"], ["1,536"]) == ([f"{3 * 4 * 32:,}"], [f"{6 * 8 * 32:,}"])
    attentions = (
        "encoder.layer[0..1].attn.self.v",
        "decoder.layer[0..1].attn.self.v",
        "decoder.layer[0..1].attn.cross.v",
    )
    assert added["sites"] == ([], [f"{path} × 2" for path in attentions])
    assert removed["shapes"] == (["lora: […, 16] -> […, 16]"], [])
    plans = [peftc.plan(spec, str(folder / "bart")) for spec in (OLD, NEW)]
    assert sides(data)["stored"] == tuple([f"{plan.totals.stored:,}"] for plan in plans)


def test_the_exit_code_is_that_of_git_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(capsys, "old.peft", "git:HEAD:specs/a.peft", "--exit-code")["edits"] == []
    assert main(["diff", "old.peft", "specs/a.peft"]) == 0
    assert main(["diff", "old.peft", "specs/a.peft", "--exit-code"]) == 1


def test_the_order_of_edits_matters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = OLD.splitlines()
    lines[7], lines[8] = lines[8], lines[7]
    (folder / "swapped.peft").write_text("\n".join(lines) + "\n")
    assert sides(diff(capsys, "old.peft", "swapped.peft")) == {"order": (["ffn", "q"], ["q", "ffn"])}


def test_an_adapter_has_its_spec(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    peftc.save(peftc.compile(NEW, BartForConditionalGeneration(config()), seed=0), folder / "tuned")
    assert diff(capsys, "specs/a.peft", "tuned")["edits"] == []
    assert {edit["name"] for edit in diff(capsys, "tuned", "old.peft", "--model", "bart")["edits"]} == {"ffn", "q", "v"}


def test_text_and_markdown_have_each_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["diff", "git:HEAD:specs/a.peft", "specs/a.peft", "--model", "bart"]
    data = diff(capsys, *arguments[1:])
    for style in ("text", "markdown"):
        assert main([*arguments, "--format", style]) == 0
        output = capsys.readouterr().out
        for difference in (
            one for part in (data, *data["edits"]) for one in part.get("differences", part.get("others"))
        ):
            for line in (*difference["old"], *difference["new"]):
                assert line in output, (style, difference["name"])


def test_a_used_file_is_that_of_the_revision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = "peft 1\nmethod m(r = 4) { edit q at layer[*].attn.q { h += lora(x, r=r) } }\n"
    (folder / "specs" / "m.peft").write_text(method)
    (folder / "specs" / "b.peft").write_text('peft 1\nuse m from "m.peft"\napply m()\n')
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "two")
    (folder / "specs" / "m.peft").write_text(method.replace("r = 4", "r = 8"))
    equations = sides(diff(capsys, "git:HEAD:specs/b.peft", "specs/b.peft"), "q")["equations"]
    assert [lines[0].partition(",")[2] for lines in equations] != ["", ""]
    assert "r=4" in equations[0][0] and "r=8" in equations[1][0]  # noqa: PT018


@pytest.mark.parametrize(
    ("side", "code", "text"),
    [
        ("git:HEAD", "P852", "no file of a revision"),
        ("git:HEAD:../a.peft", "P852", "no file of a revision"),
        ("git:HEAD:none.peft", "P852", "no spec `none.peft`"),
        ("git:--output=x:specs/a.peft", "P852", "cannot read the revision"),
        ("git:nowhere:specs/a.peft", "P852", "cannot read the revision"),
        ("bart/config.json", "P851", "no file of plans"),
        ("bart", "P520", ""),
    ],
)
def test_sides_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str], side: str, code: str, text: str
) -> None:
    assert main(["diff", side, "old.peft"]) == 1
    message = capsys.readouterr().err
    assert f"error[{code}]" in message
    assert text in message
    assert not (folder / "x").exists()


def test_a_mistake_in_a_revision_names_the_revision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "specs" / "a.peft").write_text("peft 1\nedit q at layer[*].attn.q { h += loraa(x, r=4) }\n")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--all", "--message", "two")
    assert main(["diff", "git:HEAD:specs/a.peft", "old.peft"]) == 1
    assert "--> git:HEAD:specs/a.peft:2:" in capsys.readouterr().err
