"""What people see: progress, notes, colours and lines that fit."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from peftc.cli.main import main
from peftc.cli.progress import Log, ProgressLine, progress_of
from peftc.diagnostics.activity import activity, listening, note
from tests import zoo

Out = pytest.CaptureFixture[str]
SPEC = "peft 1\nedit qv at layer[*].attn.q { h += lora(x, r=2) }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    zoo.config("llama").save_pretrained(tmp_path)
    (tmp_path / "s.peft").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path / "cache"))
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return tmp_path


def test_verbose_says_where_plans_come_from(folder: Path, capsys: Out) -> None:
    words = ["plan", "s.peft", "--model", "config.json", "-v"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "peftc: the sites of config.json are not in the cache\n" in first.err
    assert re.search(r"^peftc: tracing config\.json: \d+\.\d\d s$", first.err, re.M)
    assert main(words) == 0
    second = capsys.readouterr()
    assert "peftc: the sites of config.json are from the cache\n" in second.err
    assert "tracing" not in second.err
    assert second.out == first.out
    assert main(words[:-1]) == 0
    assert capsys.readouterr().err == ""


def test_a_note_is_there_once(capsys: Out) -> None:
    with listening(Log()):
        note("a\x1b[2J")
        note("a\x1b[2J")
    assert capsys.readouterr().err == "peftc: a\\x1b[2J\n"


def test_quiet_leaves_results_and_diagnostics(folder: Path, capsys: Out) -> None:
    assert main(["plan", "s.peft", "--model", "config.json"]) == 0
    table = capsys.readouterr().out
    assert main(["plan", "s.peft", "--model", "config.json", "-q"]) == 0
    assert capsys.readouterr().out == table
    assert main(["check", "s.peft", "--quiet"]) == 0
    assert main(["fmt", "s.peft", "-q"]) == 0
    assert main(["lock", "s.peft", "--model", "config.json", "-q"]) == 0
    assert main(["compile", "s.peft", "--model", "config.json", "-o", "out", "--output-format", "junit", "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("<?xml")
    assert not captured.err
    assert (folder / "out" / "plan.json").is_file()
    (folder / "bad.peft").write_text(SPEC.replace("lora", "lra"))
    assert main(["check", "bad.peft", "-q"]) == 1
    out = capsys.readouterr().out
    assert "error[P101]" in out
    assert "1 error" not in out


# The progress line


class Terminal:
    """Stderr as a terminal."""

    def __init__(self, stream: object) -> None:
        self.stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def test_the_line_shows_the_innermost_activity_and_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: Out, folder: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    line, err = ProgressLine(delay=0), ""
    with listening(line):
        with activity("outer"), contextlib.suppress(ValueError), activity("tracing [b]\x1b[5m<x>"):
            for _ in range(1000):
                err += capsys.readouterr().err
                if "tracing" in err:
                    break
                time.sleep(0.01)
            raise ValueError
        with activity("later"):
            pass
    assert "tracing [b]\\x1b[5m<x> …" in err
    assert line._status is line._timer is None
    err += capsys.readouterr().err
    assert err.endswith(("\x1b[?25h", "\x1b[2K", "\x1b[1A"))  # the cursor is back, the line gone


def test_what_is_short_has_no_line(monkeypatch: pytest.MonkeyPatch, capsys: Out, folder: Path) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with listening(ProgressLine(delay=3600)), activity("short"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False,) * 3])
def test_a_line_is_for_terminals(terminal: bool, quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours in a pipe are no line in a pipe
    if terminal:
        monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    begun: list[str] = []
    monkeypatch.setattr(ProgressLine, "begin", lambda self, text: begun.append(text))
    monkeypatch.setattr(ProgressLine, "end", lambda self, text, seconds: None)
    with progress_of(Namespace(quiet=quiet, verbose=False)), activity("work"):
        pass
    assert begun == ["work"] * shown


# Colours and width


@pytest.mark.parametrize("words", [["plan", "s.peft", "--model", "config.json"], ["sites", "--model", "config.json"]])
def test_colours(words: list[str], folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(words) == 0
    colored = capsys.readouterr().out
    assert "\x1b[1m" in colored
    text = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in text.splitlines()] == plain.splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    assert capsys.readouterr().out == plain


def test_colours_of_diagnostics(folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["check", "none.peft"]) == 2
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["check", "none.peft"]) == 2
    assert "\x1b[1;31merror" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-405B", "facebook/bart-large", "mistralai/Mixtral-8x7B-v0.1"])
@pytest.mark.parametrize("command", ["plan", "sites"])
def test_lines_fit_and_numbers_are_whole(
    command: str, model: str, folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [command, "--model", model, *(["s.peft"] if command == "plan" else [])]
    assert main(words) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 60
    assert set(re.findall(r"\d+(?:,\d{3})+", wide)) == set(re.findall(r"\d+(?:,\d{3})+", narrow))
