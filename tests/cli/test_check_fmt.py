"""The commands that need no model: arguments, output, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from peftc import __version__
from peftc.cli.main import main
from peftc.filesystem import resources

GOOD = "peft 1\n\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }\n"
LOOSE = GOOD.replace("h += adapter", "h+=adapter").replace("\n\n", "\n# note\n")
BAD = (
    "peft 1\nedit prefix at layer[*].attn.croos { kv = concat(prefix(len=30), kv) }\n"
    "edit b at layer[*].ffn { h += adaptr(x) }\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.peft").write_text(GOOD)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "bad.peft").write_text(BAD)
    (tmp_path / "other.txt").write_text("not a spec")
    return tmp_path


Out = pytest.CaptureFixture[str]


def test_check_finds_nothing(folder: Path, capsys: Out) -> None:
    assert main(["check", str(folder / "good.peft")]) == 0
    assert capsys.readouterr().out == "nothing wrong in 1 file\n"


def test_check_shows_the_place(folder: Path, capsys: Out) -> None:
    path = folder / "sub" / "bad.peft"
    assert main(["check", str(folder)]) == 1
    assert (
        capsys.readouterr().out
        == f"""\
error[P208]: there is no site named `croos`
  --> {path}:2:30
   |
 2 | edit prefix at layer[*].attn.croos {{ kv = concat(prefix(len=30), kv) }}
   |                              ^^^^^
   = help: did you mean `cross`?

error[P101]: there is no form `adaptr`
  --> {path}:3:31
   |
 3 | edit b at layer[*].ffn {{ h += adaptr(x) }}
   |                               ^^^^^^
   = help: did you mean `adapter`?

2 errors in 2 files; `--fix` corrects 2
"""
    )


def test_check_as_records(folder: Path, capsys: Out) -> None:
    path = folder / "sub" / "bad.peft"
    assert main(["check", str(path), "--output-format", "json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "code": "P208",
        "severity": "error",
        "message": "there is no site named `croos`",
        "path": str(path),
        "line": 2,
        "column": 30,
        "end_line": 2,
        "end_column": 35,
        "help": "did you mean `cross`?",
        "fix": {
            "applicability": "safe",
            "replacements": [{"line": 2, "column": 30, "end_line": 2, "end_column": 35, "text": "cross"}],
        },
    }
    assert second["code"] == "P101"
    assert main(["check", str(folder / "good.peft"), "--output-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_check_for_github(folder: Path, capsys: Out) -> None:
    assert main(["check", str(folder), "--output-format", "github"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("::error file=")
    assert line.endswith(
        ",line=2,col=30,endLine=2,endColumn=35,title=P208::there is no site named `croos`%0Ahelp: did you mean `cross`?"
    )


def test_warnings_alone_exit_with_0(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "a.peft").write_text(GOOD + "let r = 3\n")
    assert main(["check", str(tmp_path)]) == 0
    assert "1 warning in 1 file" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fmt", "expand"])
def test_a_missing_file_is_wrong_usage(command: str, folder: Path, capsys: Out) -> None:
    assert main([command, str(folder / "god.peft")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"there is no file {folder / 'god.peft'}; did you mean `{folder / 'good.peft'}`?" in captured.err


def test_a_folder_without_specs_is_wrong_usage(tmp_path: Path) -> None:
    assert main(["check", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    "argv", [[], ["check"], ["check", "a", "--output-format", "xml"], ["fmt", "--check", "--diff", "a"]]
)
def test_wrong_usage(argv: list[str], capsys: Out) -> None:
    with pytest.raises(SystemExit) as excinfo:
        main(argv)
    assert excinfo.value.code == 2
    assert "usage: peftc" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"\xff\xfe", b"peft 1 \x80", b"\x00" * 100, b""])
def test_check_of_binary_files(data: bytes, tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "a.peft").write_bytes(data)
    assert main(["check", str(tmp_path), "--output-format", "json"]) == 1
    assert all(record["code"].startswith("P0") for record in json.loads(capsys.readouterr().out))


def test_fmt_rewrites(folder: Path, capsys: Out) -> None:
    path = folder / "good.peft"
    path.write_text(LOOSE)
    path.chmod(0o640)
    assert main(["fmt", "--check", str(path)]) == 1
    assert capsys.readouterr().out == f"would be formatted: {path}\n"
    assert path.read_text() == LOOSE
    assert main(["fmt", str(path)]) == 0
    assert path.read_text() == "peft 1\n\n# note\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert main(["fmt", "--check", str(path)]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["good.peft", "other.txt", "sub"]


def test_fmt_diff_shows_the_change(folder: Path, capsys: Out) -> None:
    path = folder / "good.peft"
    path.write_text(LOOSE)
    assert main(["fmt", "--diff", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"--- {path}" in out
    assert "-edit ffn at layer[*].ffn { h+=adapter(x, r=64) }\n+edit ffn" in out
    assert path.read_text() == LOOSE


def test_fmt_leaves_unreadable_files(folder: Path, capsys: Out) -> None:
    path = folder / "good.peft"
    path.write_text("peft 1\nedit { }")
    assert main(["fmt", str(path)]) == 1
    assert "error[P011]" in capsys.readouterr().err
    assert path.read_text() == "peft 1\nedit { }"


def test_the_shipped_specs_are_checked_and_formatted(capsys: Out) -> None:
    specs = str(resources.folder("specs"))
    assert main(["check", specs]) == 0
    assert main(["fmt", "--check", specs]) == 0


def test_expand(capsys: Out) -> None:
    path = str(resources.recipes()["prefix_lora_ffn"])
    assert main(["expand", path, "--set", "l=3", "--set", "reparam=mlp(8)"]) == 0
    out = capsys.readouterr().out
    assert "edit prefix at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(8)), kv) }\n" in out
    assert main(["expand", path, "--set", "ll=3"]) == 1
    assert "error[P110]: method `prefix_lora_ffn` has no parameter `ll` to set" in capsys.readouterr().err
    assert main(["expand", path, "--set", "ll=3", "--output-format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["code"] == "P110"


def test_explain(capsys: Out) -> None:
    assert main(["explain", "p106"]) == 0
    assert capsys.readouterr().out.startswith("P106: value out of range\n")
    assert main(["explain"]) == 0
    assert "P106  value out of range\n" in capsys.readouterr().out
    assert main(["explain", "P999"]) == 2


def test_version(capsys: Out) -> None:
    with pytest.raises(SystemExit) as excinfo:
        main(["--version"])
    assert excinfo.value.code == 0
    assert capsys.readouterr().out == f"peftc {__version__}\n"


def run(*argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "peftc.cli.main", *argv], input=text, capture_output=True, text=True)


def test_standard_input() -> None:
    done = run("fmt", "-", text=LOOSE)
    assert (done.returncode, done.stdout) == (
        0,
        "peft 1\n\n# note\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }\n",
    )
    done = run("check", "-", text=BAD)
    assert done.returncode == 1
    assert "--> <stdin>:2:30" in done.stdout
    assert "\033" not in done.stdout


IMPORTS = """
import sys
from peftc.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("argv", [["check"], ["fmt", "--check"], ["expand"]])
def test_no_torch(argv: list[str]) -> None:
    path = str(resources.recipes()["mam"])
    done = subprocess.run([sys.executable, "-c", IMPORTS, *argv, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_hooks_of_pre_commit_are_commands(folder: Path) -> None:
    """Each gets the names of files, and says by its exit code whether they are well."""
    hooks = yaml.safe_load((Path(__file__).parent.parent.parent / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    for hook in hooks:
        name, *words = hook["entry"].split()
        assert (name, hook["language"]) == ("peftc", "python")
        assert main([*words, str(folder / "good.peft")]) == 0
        assert main([*words, str(folder / "god.peft")]) == 2


def test_color_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.diagnostics.render import wants_color

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal())  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())  # pyright: ignore[reportArgumentType]


def test_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "peftc", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"peftc {__version__}\n"


@pytest.mark.parametrize("operation", ["replace", "fsync"])
def test_fmt_leaves_nothing_where_the_disk_is_full(
    operation: str, folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    (folder / "loose.peft").write_text(LOOSE)
    there = sorted(folder.iterdir())
    monkeypatch.setattr(os, operation, full)
    assert main(["fmt", str(folder / "loose.peft")]) == 2
    assert "No space left" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == there
    assert (folder / "loose.peft").read_text() == LOOSE
