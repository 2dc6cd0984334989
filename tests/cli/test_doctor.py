"""`doctor`: versions, devices, the cache, the language, forms of others, and the self test."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.cli.doctor import environment
from peftc.cli.doctor.self_test import COUNT
from peftc.cli.main import main
from peftc.filesystem import resources
from tests import zoo

Out = pytest.CaptureFixture[str]
STEPS = ["plan", "compile", "train", "save", "fold", "remove"]


def doctor(capsys: Out, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_machine_on_which_peftc_works(capsys: Out) -> None:
    code, values = doctor(capsys)
    assert code == 0
    assert values["ok"]
    assert values["peftc"] == peftc.__version__
    libraries = {one["name"]: one for one in values["libraries"]}
    assert {"torch", "transformers", "pydantic"} <= {n for n, one in libraries.items() if one["extra"] is None}
    for name in ("torch", "transformers", "pydantic", "lark", "peft"):
        assert libraries[name]["version"] == version(name)
    assert "pytest" not in libraries
    assert values["devices"][0]["name"] == "cpu"
    assert "float32" in values["devices"][0]["dtypes"]
    assert values["cache"]["folder"] is None
    assert values["language"] == {
        "recipes": len(resources.recipes()),
        "forms": values["language"]["forms"],
        "problem": None,
    }
    assert [step["name"] for step in values["self_test"]["cpu"]] == STEPS
    assert all(step["ok"] for step in values["self_test"]["cpu"])
    assert values["self_test"]["cpu"][0]["detail"] == f"{COUNT:,} parameters"


@pytest.mark.parametrize("step", ["plan", "compile", "save", "fold", "remove"])
def test_a_step_that_fails(step: str, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step notices that its function does nothing, or raises; those before it are ok."""

    def broken(*_: object, **__: object) -> Any:
        if step in ("plan", "save"):
            raise OSError("no space is left")

    monkeypatch.setattr(peftc, step, broken)
    assert main(["doctor"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.partition("self test on cpu\n")[2].splitlines()]
    assert [line[1] for line in lines] == STEPS[: STEPS.index(step) + 1]
    assert [line[0] for line in lines] == ["ok"] * STEPS.index(step) + ["failed"]


def test_an_output_that_is_not_the_base(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    original = peftc.compile

    def shifted(spec: str, model: nn.Module, seed: int, **options: Any) -> nn.Module:
        return original(spec.replace("h +=", "h += 0.1 + "), model, seed, **options)

    monkeypatch.setattr(peftc, "compile", shifted)
    code, values = doctor(capsys)
    assert code == 1
    assert values["self_test"]["cpu"][-1]["detail"] == "the output is not the base's"


def test_tables_that_are_damaged(capsys: Out, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (resources.folder("specs") / "lora.peft").read_text(encoding="utf-8")
    damaged = tmp_path / "lora.peft"
    damaged.write_text(text.replace("method", "mehtod"))
    monkeypatch.setattr(environment.resources, "recipes", lambda: {"lora": damaged})
    code, values = doctor(capsys)
    assert code == 1
    assert values["language"]["problem"].startswith("lora.peft: PeftcError: ")


def test_the_state_of_the_cache(capsys: Out, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path / "cache"))
    assert doctor(capsys)[1]["cache"]["entries"] == 0
    assert not (tmp_path / "cache").exists()
    zoo.config("bert").to_json_file(tmp_path / "bert.json", use_diff=False)
    peftc.sites(tmp_path / "bert.json")
    (tmp_path / "cache" / "sites" / "damaged.json").write_text("{}")
    state = doctor(capsys)[1]["cache"]
    size = sum(path.stat().st_size for path in (tmp_path / "cache" / "sites").iterdir())
    assert state == {**state, "writable": True, "entries": 2, "unusable": 1, "size": size}
    assert main(["doctor"]) == 0
    assert f"{state['folder']}: 2 entries, 1 unusable, " in capsys.readouterr().out


def test_forms_of_other_packages(capsys: Out, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "offering.py").write_text(
        "from tests.forms.python_forms import LowRank\nclass Offered(LowRank):\n    name = 'offered'\n"
    )
    info = tmp_path / "offering-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text("[peftc.forms]\noffered = offering:Offered\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = doctor(capsys)[1]
    assert values["forms"] == {"offered": "`offering:Offered` of offering 2.1"}
    assert "offered" not in values["registered_forms"]
    try:
        assert doctor(capsys, "--forms", "offered")[1]["registered_forms"]["offered"] == "offering:Offered"
    finally:
        peftc.forms.unregister("offered")


def test_libraries_of_other_versions(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr(environment, "requires", lambda _: ["torch>=99", "nowhere>=1", "lark>=1; extra == 'some'"])
    needs = {one.name: (one.requirement, one.extra, one.is_unsuitable) for one in environment.libraries()}
    assert needs["torch"] == (">=99", None, True)
    assert needs["nowhere"] == (">=1", None, True)
    assert needs["lark"] == (">=1", "some", False)
    main(["doctor"])
    assert f"{torch.__version__}  peftc needs >=99" in capsys.readouterr().out
