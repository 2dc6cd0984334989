"""`check --fix`, `--diff`, `--statistics` and `--watch`."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from peftc.cli.check import watch as watching
from peftc.cli.main import main
from peftc.diagnostics import Diagnostic, Source, Span, Suggestion

Out = pytest.CaptureFixture[str]

EDIT = "peft 1\nedit a at layer[*].{} {{ h += {} }}\n"
FIXES = [
    (EDIT.format("fnn", "adapter(x, r=4)"), EDIT.format("ffn", "adapter(x, r=4)")),
    (EDIT.format("ffn", "adaptr(x, r=4, act=rleu)"), EDIT.format("ffn", "adapter(x, r=4, act=relu)")),
    (EDIT.format("ffn", "2 × lora(x, rank=4)"), EDIT.format("ffn", "2 * lora(x, r=4)")),
    (EDIT.format("ffn", "adapter(x, r=4, act='relu')"), EDIT.format("ffn", "adapter(x, r=4, act=relu)")),
    (EDIT.format("ffn", "adapter(x, r=4, act=“relu”)"), EDIT.format("ffn", "adapter(x, r=4, act=relu)")),
    (EDIT.format("ffn", "adapter(hh, r=4)"), EDIT.format("ffn", "adapter(h, r=4)")),
    (
        "peft 1\nedti a at layer[*].ffn { h += lora(x, r=4) }\n",
        "peft 1\nedit a at layer[*].ffn { h += lora(x, r=4) }\n",
    ),
    (
        "peft 1\nedit a at m.*.x { h += lora(x, r=4) }\n",
        'peft 1\nedit a at "m.*.x" { h += lora(x, r=4) }\n',
    ),
    ('peft 1\nedit a at "m.*.mlp { h += lora(x, r=4) }\n', 'peft 1\nedit a at "m.*.mlp" { h += lora(x, r=4) }\n'),
    (
        EDIT.format("ffn", "lora(x, r=4)") + "expect trained = 1\nexpect idntity(aa)\n",
        EDIT.format("ffn", "lora(x, r=4)") + "expect trained == 1\nexpect identity(a)\n",
    ),
    ("peft 1\nuse mamm from std\napply maam(rr = 4)\n", None),
    ("peft 1\nuse mam from std\napply maam(rr = 4)\n", "peft 1\nuse mam from std\napply mam(r = 4)\n"),
    (
        "# ✂ é\r\npeft 1\r\nedit a at layer[*].fnn { h += lora(x, r=4) }  # fnn\r\n",
        "# ✂ é\r\npeft 1\r\nedit a at layer[*].ffn { h += lora(x, r=4) }  # fnn\r\n",
    ),
    (
        "peft 1\nform twice(x) { f = 2 * x }\nedit a at layer[*].ffn { h += twice(x) }\n",
        "peft 2\nform twice(x) { f = 2 * x }\nedit a at layer[*].ffn { h += twice(x) }\n",
    ),
]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "s.peft"


@pytest.mark.parametrize(("before", "after"), FIXES)
def test_fixes(before: str, after: str | None, spec: Path, capsys: Out) -> None:
    """A fixed spec has no errors; `--diff` writes nothing."""
    spec.write_bytes(before.encode())
    assert main(["check", "--diff", "s.peft"]) == 1
    assert spec.read_bytes() == before.encode()
    assert "+++ s.peft (fixed)" in capsys.readouterr().out
    assert main(["check", "--fix", "s.peft"]) == 0, capsys.readouterr().out
    assert after is None or spec.read_bytes().decode() == after
    text = spec.read_bytes()
    assert "fixed" in capsys.readouterr().out
    assert main(["check", "--fix", "s.peft"]) == 0
    assert spec.read_bytes() == text
    assert "nothing to fix" in capsys.readouterr().out
    assert main(["check", "--diff", "s.peft"]) == 0
    assert capsys.readouterr().out == ""


def test_a_text_that_does_not_parse_is_not_written(spec: Path, capsys: Out) -> None:
    text = "peft 1\nedti a at layer[*].ffn { h += lora(x, r=) }\n"
    spec.write_text(text)
    assert main(["check", "--fix", "s.peft"]) == 1
    assert spec.read_text() == text
    out = capsys.readouterr().out
    assert "left out 1: a text that still does not parse is not written" in out
    assert "P015" in out or "P013" in out


def test_what_is_unsafe_stays(spec: Path, capsys: Out) -> None:
    """Files with similar names, arguments without names."""
    (spec.parent / "lora2.peft").write_text(
        "peft 1\nmethod m(r = 2) { edit a at layer[*].ffn { h += lora(x, r=r) } }\n"
    )
    text = 'peft 1\nuse m from "lora1.peft"\napply m()\nedit b at layer[*].ffn { h += lora(x, 4) }\n'
    spec.write_text(text)
    assert main(["check", "--fix", "s.peft", "--output-format", "json"]) == 1
    assert spec.read_text() == text
    records = json.loads(capsys.readouterr().out)
    assert {one["fix"]["applicability"] for one in records if "fix" in one} == {"unsafe"}


def test_used_files_stay(spec: Path, capsys: Out) -> None:
    used = spec.parent / "used.peft"
    used.write_text("peft 1\nmethod m(r = 2) { edit a at layer[*].fnn { h += lora(x, r=r) } }\n")
    before = used.read_text()
    spec.write_text('peft 1\nuse m from "used.peft"\napply m()\n')
    assert main(["check", "--fix", "s.peft"]) == 1
    assert used.read_text() == before
    assert "--fix` corrects" not in capsys.readouterr().out
    assert main(["check", "--fix", "s.peft", "used.peft"]) == 1  # s.peft was checked before
    assert used.read_text() == before.replace("fnn", "ffn")
    assert main(["check", "s.peft"]) == 0


def test_standard_input(spec: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FIXES[0][0].encode())))
    assert main(["check", "--fix", "-"]) == 0
    assert capsys.readouterr().out == FIXES[0][1]


def test_suggestions_are_texts(spec: Path) -> None:
    one = Suggestion("did you mean `b`?", "a", "b", "unsafe")
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (other, other.old, other.new, other.applicability) == (one, "a", "b", "unsafe")


def test_a_fix_needs_its_words_at_the_place() -> None:
    """A message about a value from another file has no fix."""
    span = Span(0, 5, 1, 1, 1, 6)
    for text, word, start in (("ab cd", "cd", 3), ("ab cd", "c", None), ("ab cd ef", "ef", None)):
        one = Diagnostic("P101", "", span, Source("s", text), help=Suggestion("", word, "x"))
        assert (one.fix.replacements[0].span.start if one.fix else None) == start


def test_statistics(spec: Path, capsys: Out) -> None:
    spec.write_text(EDIT.format("fnn", "adaptr(x) + adaptr(h)") + "let r = 3\n")
    assert main(["check", "--statistics", "s.peft"]) == 1
    assert capsys.readouterr().out == (
        "2  P101  unknown form (2 with --fix)\n1  P208  unknown site name (1 with --fix)\n1  P114  unused name\n\n"
        "3 errors and 1 warning in 1 file; `--fix` corrects 3\n"
    )
    assert main(["check", "--statistics", "s.peft", "--output-format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)[0] == {"code": "P101", "title": "unknown form", "count": 2, "fixable": 2}
    assert main(["check", "--statistics", "s.peft", "--output-format", "sarif"]) == 2


def test_watch(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs again when a file changes, is new or is gone, and an interrupt ends it."""
    monkeypatch.setattr(watching, "INTERVAL", 0.01)
    spec.write_text(FIXES[0][0])
    changes = [
        lambda: spec.write_text(FIXES[0][1] + "\n"),
        lambda: (spec.parent / "new.peft").write_text("peft 1\n"),
        lambda: (spec.parent / "new.peft").unlink(),
        lambda: (spec.parent / "peftc.toml").write_text(""),
    ]
    runs: list[int] = []

    def run(args: Namespace) -> int:
        runs.append(len(runs))
        if len(runs) > len(changes):
            raise KeyboardInterrupt
        threading.Timer(0.1, changes[len(runs) - 1]).start()
        return 0

    args = Namespace(paths=["."], include=[], config=None, model=[])
    assert watching.watch(args, run) == 0
    assert runs == list(range(len(changes) + 1))
    assert main(["check", "--watch", "-"]) == 2
    assert os.listdir(spec.parent)
