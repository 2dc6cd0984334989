"""`--strict`: warnings are findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from peftc.cli.main import main
from tests import zoo

CLEAN = "peft 1\ntrain n = [w] at layer[*].norm\n"
WITH_WARNING = "peft 1\ntrain n = [w, b] at layer[*].norm\n"  # P204: norms of LLaMA have no bias


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_warnings_are_findings_with_strict(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.config("llama").save_pretrained(tmp_path)
    spec, output = tmp_path / "s.peft", tmp_path / "out"
    arguments = [command, str(spec), "--model", str(tmp_path / "config.json")]
    arguments += ["-o", str(output)] if command == "compile" else []
    spec.write_text(WITH_WARNING)
    assert main([*arguments, "--strict"]) == 1
    assert "warning[P204]" in capsys.readouterr().err
    assert not output.exists()
    assert main(arguments) == 0
    spec.write_text(CLEAN)
    assert main([*arguments, "--strict"]) == 0
