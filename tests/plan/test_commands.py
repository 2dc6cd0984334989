"""`peftc plan` and `peftc sites`: output and exit codes."""

import json
from pathlib import Path

import pytest

from peftc.cli.main import main

MODEL = ["--model", "bert-base-uncased"]


@pytest.fixture
def spec(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "test.peft"
        path.write_text(f"peft 1\n{text}\n", encoding="utf-8")
        return str(path)

    return write


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_plan(capsys, spec):
    path = spec("edit ffn at layer[*].ffn { h += adapter(x, r=64, init=lora) }\nexpect stored <= 2%")
    code, out, err = run(capsys, "plan", path, *MODEL)
    assert (code, err) == (0, "")
    assert "encoder.layer[0..11].ffn × 12" in out
    assert "holds  stored <= 2%" in out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_plan_as_json(capsys, spec):
    path = spec("edit ffn at layer[*].ffn { h += adapter(x, r=64, init=lora) }")
    code, out, _ = run(capsys, "plan", path, *MODEL, "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["spec"]["path"] == path
    assert len(plan["spec"]["sha256"]) == 64
    assert (plan["model"]["id"], plan["model"]["type"]) == ("bert-base-uncased", "bert")
    assert plan["totals"]["trained"] == 12 * (2 * 768 * 64 + 64 + 768)


def test_settings(capsys, spec):
    path = spec("method m(r = 64) { edit ffn at layer[*].ffn { h += adapter(x, r=r, bias=false) } }")
    _, out, _ = run(capsys, "plan", path, *MODEL, "--json", "--set", "r=2")
    assert json.loads(out)["totals"]["trained"] == 12 * 2 * 768 * 2
    code, _, err = run(capsys, "plan", path, *MODEL, "--set", "s=2")
    assert code == 1
    assert "P110" in err


def test_sites_without_known_positions_are_underlined(capsys, spec):
    path = spec("edit e at layer[*] { h += reft(h, r=2, first=1) }\nedit p at embed { h = concat(prompt(len=2), h) }")
    code, _, err = run(capsys, "plan", path, *MODEL)
    assert code == 1
    assert "P422" in err
    assert f"--> {path}:2:27" in err


def test_tasks(capsys, spec):
    path = spec("edit own at layer[*].ffn per task { h += adapter(x, r=2, bias=false) }")
    _, out, _ = run(capsys, "plan", path, *MODEL, "--json", "--tasks", "sst,sts,para")
    assert json.loads(out)["totals"]["trained"] == 3 * 12 * 2 * 768 * 2
    code, _, err = run(capsys, "plan", path, *MODEL, "--tasks", "sst,sst")
    assert (code, "P537" in err) == (1, True)
    code, _, err = run(capsys, "plan", spec("edit e at layer[*].ffn { h *= vector(init=1) }"), *MODEL, "--tasks", "sst")
    assert (code, "P537" in err) == (1, True)


def test_a_failed_expectation_is_a_finding(capsys, spec):
    path = spec("edit ffn at layer[*].ffn { h += adapter(x, r=64) }\nexpect stored <= 1%")
    code, out, err = run(capsys, "plan", path, *MODEL)
    assert code == 1
    assert "fails  stored <= 1%" in out
    assert "error[P304]" in err
    code, out, _ = run(capsys, "plan", path, *MODEL, "--json")
    assert code == 1
    assert json.loads(out)["expectations"] == [{"text": "stored <= 1%", "holds": False}]
    code, out, _ = run(capsys, "plan", path, *MODEL, "--output-format", "json")
    (record,) = json.loads(out)
    assert code == 1
    assert set(record) == {"code", "severity", "message", "path", "line", "column", "end_line", "end_column", "help"}
    assert (record["code"], record["path"], record["line"]) == ("P304", path, 3)


def test_a_mistake(capsys, spec):
    path = spec("edit ffn at layer[*].fnn { h += adapter(x, r=64) }")
    code, out, err = run(capsys, "plan", path, *MODEL)
    assert (code, out) == (1, "")
    assert "did you mean `ffn`?" in err
    code, out, _ = run(capsys, "plan", path, *MODEL, "--output-format", "json")
    (record,) = json.loads(out)
    assert code == 1
    assert (record["line"], record["column"], record["end_column"]) == (2, 22, 25)


def test_usage(capsys, tmp_path):
    code, _, err = run(capsys, "plan", str(tmp_path / "none.peft"), *MODEL)
    assert code == 2
    assert "none.peft" in err
    with pytest.raises(SystemExit) as ended:
        main(["plan", "x.peft"])
    assert ended.value.code == 2


def test_an_unknown_model(capsys, spec):
    path = spec("edit ffn at layer[*].ffn { h += adapter(x, r=64) }")
    code, _, err = run(capsys, "plan", path, "--model", "bert-base-uncasd")
    assert code != 0
    assert "P501" in err
    assert "bert-base-uncased" in err


def test_sites(capsys):
    code, out, _ = run(capsys, "sites", *MODEL)
    assert code == 0
    assert "layer[0..11] × 12" in out
    assert "self.query" in out
    assert "590,592" in out
    assert "\x1b" not in out
