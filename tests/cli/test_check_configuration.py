"""`peftc check`: models, the configuration, and which diagnostics it reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import peftc
from peftc.checking.configuration import WARNINGS
from peftc.cli.main import main
from tests import zoo

PACKAGE = Path(peftc.__file__).parent
LORA = "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n"
CROSS = "peft 1\nedit q at decoder.layer[*].attn.cross.q { h += lora(x, r=2) }\n"
NORMS = "peft 1\ntrain n = [w, b] at layer[*].norm\n"  # P204 on LLaMA, whose norms have no bias
UNUSED = LORA + "let r = 3\n"

Out = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two models, one of which has attention to an encoder."""
    for name in ("llama", "bart"):
        zoo.config(name).save_pretrained(tmp_path / "models" / name)
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def codes(capsys: Out, *arguments: str) -> list[str]:
    """`CODE path:line` of each diagnostic."""
    capsys.readouterr()
    main(["check", "--output-format", "json", *arguments])
    return [f"{one['code']} {one['path']}:{one['line']}" for one in json.loads(capsys.readouterr().out)]


# Models


def test_a_spec_on_models(folder: Path, capsys: Out) -> None:
    """Sites, expectations and shapes are those of each model."""
    (folder / "specs" / "cross.peft").write_text(CROSS + "expect trained == 1\n")
    arguments = ["specs", "--model", "models/llama", "--model", "models/bart"]
    assert codes(capsys, "specs") == []
    assert codes(capsys, *arguments) == ["P201 specs/cross.peft:2", "P304 specs/cross.peft:3"]
    assert main(["check", *arguments]) == 1
    out = capsys.readouterr().out
    assert "= note: on `models/bart`" in out
    assert "matches nothing in models/llama" in out


def test_one_diagnostic_for_several_models(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "l.peft").write_text(LORA + "expect trained == 1\n")
    main(
        ["check", "specs", "--output-format", "json", "--model", "models/llama", "--model", "models/llama/config.json"]
    )
    (record,) = json.loads(capsys.readouterr().out)
    assert record["notes"][-1] == "on `models/llama` and `models/llama/config.json`"


def test_junit_has_a_test_for_each_model(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "cross.peft").write_text(CROSS)
    main(["check", "specs", "--output-format", "junit", "--model", "models/llama", "--model", "models/bart"])
    out = capsys.readouterr().out
    assert re.findall(r'<testcase classname="[^"]*" name="([^"]*)"', out) == [
        "spec",
        "on models/llama",
        "on models/bart",
    ]
    assert 'tests="3" failures="1"' in out


def test_files_of_definitions_are_for_no_model(folder: Path, capsys: Out) -> None:
    method = "method a(r = 2) { edit q at layer[*].attn.q { h += lora(x, r=r) } }\n"
    (folder / "specs" / "m.peft").write_text("peft 1\n" + method + method.replace("method a", "method b"))
    assert codes(capsys, "specs", "--model", "models/llama") == []


def test_tasks_are_for_specs_with_edits_per_task(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "t.peft").write_text("peft 1\nedit q at layer[*].attn.q per task { h += lora(x, r=2) }\n")
    (folder / "specs" / "u.peft").write_text(LORA)
    assert codes(capsys, "specs", "--model", "models/llama", "--tasks", "a,b") == []
    assert codes(capsys, "specs", "--model", "models/llama", "--tasks", "a,a") == ["P537 None:None"]


def test_an_unknown_model(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "l.peft").write_text(LORA)
    assert main(["check", "specs", "--model", "models/none"]) == 1
    (folder / "peftc.toml").write_text('models = [\n  "models/llama",\n  "models/none/config.json",\n]\n')
    (line,) = codes(capsys, "specs")
    assert line.endswith("peftc.toml:3")


IMPORTS = """
import sys
from peftc.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    "spec",
    [
        LORA,
        "peft 1\nedit p at embed { h = concat(prompt(len=2), h) }\n",  # the graph decides
        "peft 1\nedit q at layer[*].attn.q per task { h += lora(x, r=2) }\n",
    ],
)
def test_an_unchanged_check_imports_no_torch(
    spec: str, folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEFTC_CACHE", str(folder / "cache"))
    (folder / "specs" / "s.peft").write_text(spec)
    arguments = ["check", "specs", "--model", "models/llama", *(["--tasks", "a,b"] if "task" in spec else [])]
    assert main(arguments) == 0, capsys.readouterr().out
    done = subprocess.run([sys.executable, "-c", IMPORTS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The configuration


@pytest.mark.parametrize("name", ["peftc.toml", "pyproject.toml"])
def test_a_configuration_says_what_specs_are_for(
    name: str, folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, table = ("", "") if name == "peftc.toml" else ("[tool.peftc]\n", "tool.peftc.")
    (folder / name).write_text(
        f'{head}models = ["models/llama"]\nexclude = ["drafts/"]\n'
        f"[{table}severity]\nP204 = 'error'\n"
        f'[[{table}specs]]\npaths = ["specs/cross*.peft"]\nmodels = ["models/bart"]\n'
    )
    for path, text in {"specs/cross.peft": CROSS, "specs/n.peft": NORMS, "specs/drafts/x.peft": "peft"}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    assert codes(capsys, "specs") == ["P204 specs/n.peft:2"]
    assert main(["check", "specs"]) == 1
    assert "error[P204]" in capsys.readouterr().out
    assert codes(capsys, "specs", "--isolated") == ["P002 specs/drafts/x.peft:1"]
    assert codes(capsys, "specs/drafts/x.peft") == ["P002 specs/drafts/x.peft:1"]  # named, so checked
    monkeypatch.chdir(folder / "specs")
    assert codes(capsys, ".") == ["P204 n.peft:2"]
    assert codes(capsys, ".", "--isolated", "--ignore", "P2") == ["P002 drafts/x.peft:1"]


@pytest.mark.parametrize(
    ("text", "line", "code", "message", "help_"),
    [
        ('exclud = ["a"]\n', 1, "P130", "there is no key `exclud`", "did you mean `exclude`?"),
        (
            '[[specs]]\npaths=["a"]\nmodel=["b"]\nmodels=[]\n',
            3,
            "P130",
            "no key `model` in a table",
            "did you mean `models`?",
        ),
        ('models = "gpt2"\n', 1, "P131", "`models`: input should be a valid list", None),
        ('models = [\n"gpt2",\n3]\n', 1, "P131", "`models[1]`: input should be a valid string", None),
        ('\n[[specs]]\nmodels = ["a"]\n', 2, "P131", "this table of `specs` lacks `paths`", None),
        ('[severity]\nP101 = "warning"\n', 2, "P131", "`P101` is an error", None),
        ('[severity]\nP999 = "error"\n', 2, "P131", "no code begins with `P999`", None),
        ('[severity]\nP114 = "off"\n', 2, "P131", "`severity.P114`: input should be 'error' or 'warning'", None),
        ('ignore = ["P114",\n  "Q"]\n', 2, "P131", "`ignore`: no code begins with `Q`", None),
        ('include = ["none"]\n', 1, "P131", "`include`: there is no folder `none`", None),
        ("models = [\n", 2, "P132", "this is not TOML", None),
        ("a = 1\na = 2\n", 2, "P132", "this is not TOML", None),
    ],
)
def test_errors_in_a_configuration(
    text: str, line: int, code: str, message: str, help_: str | None, folder: Path, capsys: Out
) -> None:
    """Each points into the file; the exit code is 2 and no spec is checked."""
    (folder / "peftc.toml").write_text(text)
    assert main(["check", "specs", "--output-format", "json"]) == 2
    record = json.loads(capsys.readouterr().out)[-1]
    assert (record["code"], record["path"], record["help"]) == (code, "peftc.toml", help_)
    assert message in record["message"]
    assert record["line"] in (line, line - 1)


def test_a_configuration_that_is_named(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "u.peft").write_text(UNUSED)
    (folder / "other.toml").write_text('ignore = ["P114"]\n')
    assert codes(capsys, "specs", "--config", "other.toml") == []
    assert main(["check", "specs", "--config", "none.toml"]) == 2
    (folder / "pyproject.toml").write_text("[tool.other]\n")
    assert codes(capsys, "specs") == ["P114 specs/u.peft:3"]
    assert main(["check", "specs", "--config", "pyproject.toml"]) == 2
    (folder / "pyproject.toml").write_text("peftc [")  # of another tool's making
    assert main(["check", "specs"]) == 2


def test_what_may_be_a_warning_is_known() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    calls = re.findall(
        r'Diagnostic\(\s*"(P\d{3})"(?:(?!Diagnostic\().){0,200}?severity="warning"', "".join(texts.values()), re.S
    )
    assert set(calls) == WARNINGS


# Select, ignore and comments


def test_select_and_ignore_are_about_warnings(folder: Path, capsys: Out) -> None:
    path = folder / "specs" / "u.peft"
    path.write_text(UNUSED)
    for arguments, left in (
        (["--select", "P2"], []),
        (["--select", "P1,P2"], ["P114 specs/u.peft:3"]),
        (["--ignore", "P114"], []),
        (["--ignore", "P2", "--ignore", "P1"], []),
    ):
        assert codes(capsys, "specs", *arguments) == left
    path.write_text(UNUSED.replace("lora", "lorra"))
    assert codes(capsys, "specs", "--select", "P2", "--ignore", "P101") == ["P101 specs/u.peft:2"]
    assert main(["check", "specs", "--ignore", "P101"]) == 1
    capsys.readouterr()
    assert main(["check", "specs", "--ignore", "PP101"]) == 2
    assert "--ignore: no code begins with `PP101`; did you mean `P101`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("let r = 3  # peftc: ignore[P114] later", []),
        ("let r = 3  #peftc:ignore[P114, P204]: later", ["P114"]),  # the second code suppresses nothing
        ("# peftc: ignore[P114] later\n# and more\nlet r = 3", []),
        ("# peftc: ignore[P114] later\n\nlet r = 3", ["P114", "P128"]),
        ("let r = 3  # peftc: ignore[P114]", ["P114", "P127"]),
        ("let r = 3  # peftc: ignore later", ["P114", "P127"]),
        ("let r = 3  # peftc: ignore[P999] later", ["P114", "P128"]),
        ("let r = 3\nlet s = 4  # peftc: ignore[P114] later", ["P114"]),
        ("edit e at layer[*].ffn { h += lorra(x, r=2) }  # peftc: ignore[P101] later", ["P101", "P129"]),
        ("expect trained > 1  # peftc: ignore[P204] only on models", []),
        ("expect trained > 1  # peftc: ignore[P106] later", ["P128"]),
        ("let r = 3  # peftc is good at ignoring", ["P114"]),
    ],
)
def test_comments_suppress_warnings(text: str, left: list[str], folder: Path, capsys: Out) -> None:
    (folder / "specs" / "u.peft").write_text(f"{LORA}{text}\n")
    expected = [] if "P204]:" in text else left  # P204 cannot arise without a model
    assert [line.split()[0] for line in codes(capsys, "specs")] == expected


def test_a_comment_about_a_model(folder: Path, capsys: Out) -> None:
    """It suppresses in `check`, `plan` and `compile`; on other models it suppresses nothing."""
    path = folder / "specs" / "n.peft"
    path.write_text(NORMS.rstrip() + "  # peftc: ignore[P204] norms of BART have biases\n")
    assert codes(capsys, "specs", "--model", "models/llama") == []
    assert codes(capsys, "specs", "--model", "models/bart") == ["P128 specs/n.peft:2"]
    assert codes(capsys, "specs", "--model", "models/bart", "--model", "models/llama") == []
    for command in ("plan", "compile"):
        assert main([command, str(path), "--model", "models/llama", "--strict"]) == 0
        assert "P204" not in capsys.readouterr().err
    assert main(["check", "specs", "--model", "models/llama"]) == 0
    assert "nothing wrong in 1 file; 1 warning suppressed" in capsys.readouterr().out


def test_sarif_has_what_is_suppressed(folder: Path, capsys: Out) -> None:
    (folder / "specs" / "u.peft").write_text(LORA + "let r = 3  # peftc: ignore[P114] later\n")
    assert main(["check", "specs", "--output-format", "sarif"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "inSource", "justification": "later"}]
