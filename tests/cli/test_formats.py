"""Formats of reports, as schemas and consumers read them, of `check`, `plan` and `compile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from junitparser import Failure, JUnitXml

from peftc.cli.main import main
from peftc.diagnostics import Diagnostic, Source, Span
from peftc.diagnostics.formats.report import report_on
from peftc.diagnostics.render import FORMATS, render
from tests import zoo

SCHEMA = json.loads((Path(__file__).parent.parent / "data" / "sarif-2.1.0.schema.json").read_text(encoding="utf-8"))
# docs.gitlab.com/ci/testing/code_quality, "Code Quality report format".
GITLAB = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "location", "severity"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "minLength": 1},
            "fingerprint": {"type": "string", "minLength": 1},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "not": {"pattern": r"^(\./|/)"}},
                    "lines": {"type": "object", "required": ["begin"], "properties": {"begin": {"type": "integer"}}},
                },
            },
        },
    },
}

GOOD = "peft 1\n\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }\n"
BAD = "peft 1\nedit b at layer[*].ffn { h += adaptr(x) }\n"
UNUSED = GOOD + "let r = 3\n"

Out = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    for name, text in {"good": GOOD, "bad": BAD, "unused": UNUSED}.items():
        (tmp_path / "specs" / f"{name}.peft").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(format_: str, capsys: Out, *arguments: str) -> str:
    main(["check", "--output-format", format_, *(arguments or ("specs",))])
    return capsys.readouterr().out


def test_concise(folder: Path, capsys: Out) -> None:
    assert check("concise", capsys) == (
        "specs/bad.peft:2:31: error[P101]: there is no form `adaptr`; did you mean `adapter`?\n"
        "specs/unused.peft:4:1: warning[P114]: `r` is never used; remove it\n"
        "1 error and 1 warning in 3 files; `--fix` corrects 1\n"
    )


def test_jsonl_has_the_records_of_json(folder: Path, capsys: Out) -> None:
    lines = check("jsonl", capsys).splitlines()
    assert [json.loads(line) for line in lines] == json.loads(check("json", capsys))
    assert len(lines) == 2


# SARIF


def sarif(capsys: Out, *arguments: str) -> dict[str, Any]:
    log = json.loads(check("sarif", capsys, *arguments))
    jsonschema.Draft7Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(log)
    return log["runs"][0]


def test_sarif(folder: Path, capsys: Out) -> None:
    run = sarif(capsys)
    error, warning = run["results"]
    assert (error["ruleId"], error["level"], warning["ruleId"], warning["level"]) == (
        "P101",
        "error",
        "P114",
        "warning",
    )
    place = error["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "specs/bad.peft"
    assert place["region"] == {"startLine": 2, "startColumn": 31, "endLine": 2, "endColumn": 37}
    (change,) = error["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [{"deletedRegion": place["region"], "insertedContent": {"text": "adapter"}}]
    rules = run["tool"]["driver"]["rules"]
    assert [rules[one["ruleIndex"]]["id"] for one in run["results"]] == ["P101", "P114"]
    assert rules[0]["shortDescription"]["text"] == "unknown form"


def test_sarif_of_nothing(folder: Path, capsys: Out) -> None:
    assert sarif(capsys, "specs/good.peft")["results"] == []


def test_fingerprints_are_stable_and_unique(folder: Path, capsys: Out) -> None:
    def prints() -> list[str]:
        return [one["partialFingerprints"]["peftc/v1"] for one in sarif(capsys)["results"]]

    path = folder / "specs" / "bad.peft"
    path.write_text(BAD + "edit c at layer[*].attn { h += adaptr(x) }\n" * 2)
    before = prints()
    assert len(set(before)) == len(before) == 5  # P101 three times, P111, P114
    path.write_text(path.read_text().replace("peft 1\n", "peft 1\n# a line above\n\n"))
    assert prints() == before
    assert main(["check", "--output-format", "sarif", str(folder / "specs")]) == 1
    absolute = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert [one["partialFingerprints"]["peftc/v1"] for one in absolute] == before


# GitLab and GitHub


def test_gitlab(folder: Path, capsys: Out) -> None:
    issues = json.loads(check("gitlab", capsys, "specs", str(folder / "specs" / "bad.peft"), "specs/none.peft"))
    jsonschema.validate(issues, GITLAB)
    assert [(one["check_name"], one["severity"], one["location"]["path"]) for one in issues] == [
        ("P112", "major", "specs/none.peft"),
        ("P101", "major", "specs/bad.peft"),
        ("P114", "minor", "specs/unused.peft"),
        ("P101", "major", "specs/bad.peft"),
    ]
    assert issues[1]["location"]["lines"]["begin"] == 2
    assert len({one["fingerprint"] for one in issues}) == 4
    assert json.loads(check("gitlab", capsys, "specs/good.peft")) == []


def test_github(folder: Path, capsys: Out) -> None:
    """Workflow commands, by the grammar of the runner: `::name key=value,…::data`."""
    for line in check("github", capsys).splitlines():
        command, _, data = line.removeprefix("::").partition("::")
        name, _, properties = command.partition(" ")
        pairs = dict(pair.split("=") for pair in properties.split(","))
        assert name in ("error", "warning")
        assert Path(pairs["file"]).is_file()
        assert int(pairs["line"]) > 0
        assert data


# JUnit


def junit(text: str) -> dict[str, dict[str, list[Failure]]]:
    """The failures of each test of each suite, as another library reads them."""
    xml = JUnitXml.fromstring(text)
    assert xml.tests == sum(suite.tests for suite in xml)
    assert xml.failures == sum(suite.failures for suite in xml)
    assert all(suite.tests == len(list(suite)) for suite in xml)
    return {suite.name: {case.name: case.result for case in suite} for suite in xml}


def test_junit_of_check(folder: Path, capsys: Out) -> None:
    text = check("junit", capsys)
    suites = junit(text)
    assert list(suites) == ["specs/bad.peft", "specs/good.peft", "specs/unused.peft"]
    (failure,) = suites["specs/bad.peft"]["spec"]
    assert (failure.type, failure.message) == ("P101", "there is no form `adaptr`")
    assert "specs/bad.peft:2:31" in failure.text
    assert not suites["specs/good.peft"]["spec"]
    assert not any(isinstance(one, Failure) for one in suites["specs/unused.peft"]["spec"])
    assert "warning[P114]" in text
    assert junit(check("junit", capsys, "specs", "--strict"))["specs/unused.peft"]["spec"][0].type == "P114"


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_junit_of_plan_and_compile(command: str, folder: Path, capsys: Out) -> None:
    """One test, on the model. Stdout is the report alone, and what is written is the same."""
    zoo.config("llama").save_pretrained(folder)
    spec = folder / "s.peft"
    arguments = [command, "s.peft", "--model", "config.json", "--output-format", "junit"]
    arguments += ["-o", "out"] if command == "compile" else []
    for text, code, codes in (
        ("peft 1\ntrain n = [w] at layer[*].norm\n", 0, []),
        ("peft 1\ntrain n = [w, b] at layer[*].norm\n", 0, []),  # a warning
        ("peft 1\ntrain n = [w] at layer[*].norm\nexpect trained == 1\n", 1, ["P304"]),
        ("peft 1\ntrain n = [w] at layer[*].nrm\n", 1, ["P201"]),
        ("peft 1\ntrain n = [w at\n", 1, ["P006"]),
    ):
        spec.write_text(text)
        assert main(arguments) == code
        suites = junit(capsys.readouterr().out)
        assert list(suites) == ["s.peft"]
        assert [one.type for one in suites["s.peft"]["on config.json"] if isinstance(one, Failure)] == codes
    assert main([*arguments[:2], "--model", "none.json", "--output-format", "junit"]) == 1
    assert junit(capsys.readouterr().out)["s.peft"]["on none.json"]
    assert main([command, "none.peft", *arguments[2:]]) == 2
    assert junit(capsys.readouterr().out)["none.peft"]["on config.json"][0].type == "P112"
    if command == "compile":
        assert (folder / "out" / "plan.json").is_file()
        (folder / "out" / "plan.json").write_text("mine")
        spec.write_text("peft 1\ntrain n = [w, b] at layer[*].norm\n")
        assert main(arguments) == 1
        assert junit(capsys.readouterr().out)["s.peft"]["on config.json"][0].type == "P550"


def test_the_plan_as_json_beside_a_report(folder: Path, capsys: Out) -> None:
    zoo.config("llama").save_pretrained(folder)
    (folder / "s.peft").write_text("peft 1\ntrain n = [w, b] at layer[*].norm\n")
    assert main(["plan", "s.peft", "--model", "config.json", "--json", "--output-format", "junit"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["edits"] is not None
    assert junit(captured.err)["s.peft"]


# All formats


@pytest.mark.parametrize("format_", FORMATS)
def test_untrusted_text_is_data(format_: str) -> None:
    nasty = "a\x1b[2J\r\n::error::no\u202e\x00]]>\ud800<x>&\"'"
    at = Span(0, 1, 1, 1, 1, 2)
    diagnostic = Diagnostic("P900", nasty, at, Source(nasty, f"{nasty}\n"), nasty, (nasty,), nasty)
    text = render(report_on(nasty, nasty, (diagnostic,)), format_, sys.stderr, "0")
    assert not {"\x1b", "\x00"} & {*text}
    if format_ in ("json", "gitlab", "sarif", "jsonl"):
        json.loads(text)
    if format_ == "junit":
        assert junit(text)


@pytest.mark.parametrize("format_", FORMATS)
def test_results_of_what_can_be_read(format_: str, folder: Path, capsys: Out) -> None:
    """A path that is not there does not hide the others; exit code 2."""
    (folder / "empty").mkdir()
    (folder / "specs" / "binary.peft").write_bytes(b"\xff\xfe")
    assert main(["check", "none.peft", "empty", "specs", "--output-format", format_]) == 2
    out = capsys.readouterr().out
    assert "there is no file none.peft" in out
    assert "there are no .peft files below empty" in out
    assert all(code in out for code in ("P112", "P024", "P101", "P114"))


def test_exit_codes(folder: Path, capsys: Out) -> None:
    assert main(["check", "specs/good.peft", "specs/unused.peft"]) == 0
    assert main(["check", "specs/good.peft", "specs/unused.peft", "--strict"]) == 1
    assert main(["check", "specs/good.peft", "specs/bad.peft"]) == 1
    assert main(["check", "specs/good.peft", "none.peft"]) == 2
    assert main(["check", "none.peft"]) == 2
    assert "there is no file none.peft" in capsys.readouterr().out
