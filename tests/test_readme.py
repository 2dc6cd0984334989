"""The README's commands print what it shows, its Python runs, and its JSON has the keys
of a plan.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

import peftc
from peftc.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.S | re.M)


@pytest.mark.parametrize("block", blocks("console"), ids=lambda b: b.partition("\n")[0])
def test_commands_print_what_the_readme_shows(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    command, _, expected = block.partition("\n")
    main(shlex.split(command.removeprefix("$ peftc ")))
    printed = "".join(capsys.readouterr())
    assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines()


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert list(tmp_path.glob("adapter/*.safetensors"))


def keys(value: object) -> object:
    """The keys of nested objects; for a list, those of its first item."""
    if isinstance(value, BaseModel):
        value = json.loads(value.model_dump_json())
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [keys(item) for item in value[:1]]
    return type(value)


def test_json_has_the_keys_of_a_plan() -> None:
    (block,) = blocks("json")
    example, plan = json.loads(block), peftc.plan(ROOT / "specs" / "mam.peft", "facebook/bart-large")
    assert keys(example) == keys(plan)
    assert example["totals"] == plan.totals.model_dump()
    assert example["model"]["parameters"] == plan.model.parameters
    (first, *_), (edit,) = plan.edits, example["edits"]
    assert {k: v for k, v in edit.items() if k not in ("sites", "reason")} == {
        k: v for k, v in first.model_dump().items() if k not in ("sites", "reason")
    }
    assert edit["sites"][0] == first.sites[0].model_dump()
