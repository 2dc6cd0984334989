"""Completion: what the scripts of shells ask, and the scripts in the shells that are there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peftc.cli.completion.candidates import candidates
from peftc.cli.completion.command import SCRIPTS
from peftc.cli.completion.line import words_of
from peftc.cli.main import main
from peftc.cli.parser.commands import COMMANDS
from peftc.equations.table import FORMS
from peftc.filesystem import resources
from peftc.models.catalogue import catalogue
from tests import zoo

Out = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    zoo.config("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "mine.peft").write_text("peft 1\n")
    (tmp_path / "with space.peft").write_text("peft 1\n")
    (tmp_path / ".hidden.peft").write_text("peft 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path / "cache"))
    return tmp_path


def words(*line: str) -> list[str]:
    return [one.word for one in candidates(line)]


def test_commands_and_options() -> None:
    assert words("") == [*COMMANDS, "--help", "--version"]
    assert words("pl") == ["plan"]
    assert words("nothing", "") == []
    assert words("plan", "--mo") == ["--model"]
    assert "--verbose" in words("fmt", "--")
    assert "--json" not in words("plan", "--json", "--")
    assert "--model" in words("plan", "--model", "gpt2", "--")  # it may be there twice
    assert words("check", "x", "--output-format", "js") == ["json", "jsonl"]
    assert words("check", "--output-format=js") == ["--output-format=json", "--output-format=jsonl"]
    assert words("plan", "--set", "") == []
    assert words("verify", "--sites", "") == ["sample", "all"]
    assert words("completion", "") == list(SCRIPTS)


def test_every_argument_has_an_answer(folder: Path) -> None:
    for name, command in COMMANDS.items():
        for one in command.every_argument:
            line = [one.names[0], ""] if one.is_option and not one.is_flag else [""]
            assert isinstance(words(name, *line), list)


def test_what_peftc_knows() -> None:
    assert set(words("new", "")) >= set(resources.recipes())
    assert words("recipes", "lora", "scaled") == ["scaled_parallel"]
    assert words("forms", "") == list(FORMS)
    assert words("explain", "P101") == ["P101"]
    assert words("explain", "lo") == ["lora", "lowrank"]
    models = words("plan", "s.peft", "--model", "")
    assert set(models) >= set(catalogue()) | {entry.also for entry in catalogue().values() if entry.also}
    assert words("plan", "--model=facebook/bart-b") == ["--model=facebook/bart-base"]


def test_files(folder: Path) -> None:
    assert words("plan", "") == ["mine.peft", "model/", "with space.peft"]
    assert words("plan", "mine.peft", "m") == ["mine.peft", "model/"]
    assert words("plan", ".h") == [".hidden.peft"]
    assert "model/config.json" in words("plan", "--model", "model/")
    assert words("inspect", "m") == ["model/"]
    assert words("plan", f"{folder}/mi") == [f"{folder}/mine.peft"]
    assert words("plan", "nowhere/x") == []


def test_sites_are_those_of_the_cached_table(folder: Path) -> None:
    line = ("sites", "--model", "model", "layer[*].attn.")
    assert words(*line) == []
    assert not (folder / "cache").exists()  # completion never traces
    assert main(["sites", "--model", "model"]) == 0
    assert {"layer[*].attn.self.q", "layer[*].attn.self.o"} <= set(words(*line))
    assert "decoder.layer[*].ffn" in words("sites", "--model=model", "")
    for selector in words("sites", "--model", "model", ""):
        assert main(["sites", selector, "--model", "model"]) == 0, selector


def test_lines() -> None:
    assert words_of("") == [""]
    assert words_of("peftc plan ") == ["peftc", "plan", ""]
    assert words_of(r"peftc 'a b' c\ d \"e ") == ["peftc", "a b", "c d", '"e', ""]
    assert words_of("peftc sites 'layer[*") == ["peftc", "sites", "layer[*"]
    assert words_of(r'peftc "a\"b"') == ["peftc", 'a"b']


def test_answers_for_scripts(folder: Path, capsys: Out) -> None:
    assert main(["__complete", "words", "pl"]) == 0
    assert capsys.readouterr().out == f"plan\t{COMMANDS['plan'].help}\n"
    breaks = " \t\n\"'><=;|&(:"
    assert main(["__complete", "bash", breaks, "peftc plan --model=facebook/bart-b"]) == 0
    assert capsys.readouterr().out == "facebook/bart-base\t\n"
    assert main(["__complete", "bash", " ", "peftc plan --model=facebook/bart-b"]) == 0
    assert capsys.readouterr().out == "--model=facebook/bart-base\t\n"
    for strange in ([], ["bash"], ["words"], ["bash", breaks, ""], ["x", "y"], ["words", "plan", "\ud800", "\0"]):
        assert main(["__complete", *strange]) == 0


CODE = """
import sys
from peftc.cli.main import main
main(["__complete", "words", *sys.argv[1:]])
sys.exit(str([name for name in ("torch", "transformers", "numpy", "rich") if name in sys.modules]))
"""


@pytest.mark.parametrize("line", [("plan", "--model", "gp"), ("new", "lo"), ("sites", "--model", "model", "")])
def test_completion_imports_no_torch(line: tuple[str, ...], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *line], capture_output=True, text=True)
    assert done.stderr == "[]\n"


# The scripts, in their shells


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`peftc` on the path: the one that is tested."""
    root = Path(__file__).resolve().parent.parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = folder / "bin" / "peftc"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m peftc "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path


BASH = """
source <(peftc completion bash)
complete -p peftc
try() {
    COMP_LINE=$1 COMP_POINT=${#1}; shift
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _peftc
    printf '%s\\n' "${COMPREPLY[@]}" end
}
try 'peftc pla' peftc pla
try 'peftc plan mi' peftc plan mi
try 'peftc plan w' peftc plan w
try "peftc plan 'w" peftc plan "'w"
try 'peftc plan --model=gpt2-x' peftc plan --model = gpt2-x
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash(program: Path) -> None:
    done = subprocess.run(["bash", "--norc", "-c", BASH], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "complete -F _peftc peftc",
        *("plan", "end"),
        *("mine.peft", "end"),
        *(r"with\ space.peft", "end"),
        *("with space.peft", "end"),
        *("gpt2-xl", "end"),
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish(program: Path) -> None:
    code = 'peftc completion fish | source; complete -C "peftc plan --model gpt2-x"; complete -C "peftc pla"'
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["gpt2-xl", f"plan\t{COMMANDS['plan'].help}"]


ZSH = """
compadd() { print -r -- compadd "$@"; print -rl -- $values $folders; }
compdef() { print -r -- compdef "$@"; }
source <(peftc completion zsh)
words=(peftc plan --model gpt2-x) CURRENT=4
_peftc
words=(peftc plan "'w") CURRENT=3
_peftc
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh(program: Path) -> None:
    done = subprocess.run(["zsh", "-f", "-c", ZSH], capture_output=True, text=True, check=True)
    assert "compdef _peftc peftc" in done.stdout
    assert "gpt2-xl\n" in done.stdout
    assert "with space.peft\n" in done.stdout


def test_scripts_are_printed(capsys: Out) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
        assert "__complete" in script
