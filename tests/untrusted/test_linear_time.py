"""Work is linear in the size of a text, counted in Python instructions, not in time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from peftc.cli.main import main
from peftc.diagnostics import suggestions
from peftc.syntax.tables import tables

HEAD = "peft 1\n"
EDIT = "edit e at layer[*].ffn { h += adapter(x, r=4) }\n"


def times(n: int, line: str) -> str:
    """The line `n` times, numbered by numbers of one length."""
    return "".join(line.replace("#", f"{i:03}") for i in range(n))


# Texts of size n that an attacker could send.
TEXTS: dict[str, Callable[[int], str]] = {
    "methods": lambda n: HEAD + times(n, "method m#(r = 4) { edit e at layer[*].ffn { h += adapter(x, r=r) } }\n"),
    "methods and constants": lambda n: (
        HEAD + times(n, "let c# = 4\n") + times(n, "method m#() { edit e at layer[*].ffn { h += adapter(x, r=c#) } }\n")
    ),
    "methods and shared": lambda n: (
        HEAD
        + times(n, "let p# = shared(adapter(r=4))\n")
        + times(n, "method m#() { edit e at layer[*].ffn { h += p#(x) } }\n")
    ),
    "methods that are applied": lambda n: (
        HEAD + times(n, "method m#() { edit e at layer[*].ffn { h += adapter(x, r=4) } }\napply m#() as a#\n")
    ),
    "one method, applied often": lambda n: (
        HEAD + "method m() { edit e at layer[*].ffn { h += adapter(x, r=4) } }\n" + times(n, "apply m() as a#\n")
    ),
    "one method, much in it": lambda n: (
        HEAD + "method m() {\n" + times(n, "let a# = 4 edit e# at layer[*].ffn { h += adapter(x, r=a#) }\n") + "}\n"
    ),
    "parameters": lambda n: HEAD + "method m(" + times(n, "a# = 4, ") + ") {\n" + EDIT + "}\n",
    "lets": lambda n: HEAD + times(n, "let a# = #\n") + EDIT,
    "lets in an edit": lambda n: HEAD + "edit e at layer[*].ffn {\n" + times(n, "let a# = gate(h)\n") + "h += x }\n",
    "constants in an edit": lambda n: (
        HEAD + times(n, "let c# = 4\n") + "edit e at layer[*].ffn {\n" + times(n, "h += c# * x\n") + "}"
    ),
    "edits": lambda n: HEAD + times(n, "edit e# at layer[*].ffn { h += adapter(x, r=4) }\n"),
    "edits that assign": lambda n: HEAD + times(n, "edit e# at layer[#].attn { kv = concat(prefix(len=4), kv) }\n"),
    "expectations": lambda n: HEAD + times(n, "edit e# at layer[*].ffn { h += x }\nexpect sites(e#) == 4\n"),
    "expectations and constants": lambda n: (
        HEAD + times(n, "let c# = 4\n") + EDIT + times(n, "expect sites(e) == c#\n")
    ),
    "arms": lambda n: (
        HEAD + "edit e at " + " | ".join(f"layer[{i}].ffn" for i in range(n)) + " {\n" + times(n, "h += x\n") + "}"
    ),
    "indices": lambda n: HEAD + f"edit e at layer[{', '.join(map(str, range(n)))}].ffn {{ h += x }}",
    "arguments": lambda n: HEAD + "edit e at layer[*].ffn { h += adapter(x, " + times(n, "a#=1, ") + ") }",
    "equations": lambda n: HEAD + "edit e at layer[*].ffn {\n" + times(n, "h += adapter(x, r=4)\n") + "}",
    "parts": lambda n: HEAD + "edit e at layer[*].attn { kv = concat(" + times(n, "prefix(len=#), ") + "kv) }",
    "comments": lambda n: HEAD + times(n, "# number\n") + EDIT,
    "comments everywhere": lambda n: HEAD + times(n, "let # number\n a# # number\n = 4 # number\n"),
    "characters": lambda n: HEAD + "$" * n,
    "characters apart": lambda n: HEAD + "$ " * n + EDIT,
    "signs": lambda n: HEAD + "let a = " + "-" * n + "1",
    "sums": lambda n: HEAD + "let a = " + "1 + " * n + "1",
    "brackets": lambda n: HEAD + "let a = " + "(" * n,
    "numbers": lambda n: HEAD + times(n, "let a# = 1x\n"),
    "strings": lambda n: HEAD + times(n, 'use m from "\n'),
    "statements that are none": lambda n: HEAD + times(n, "edit\n"),
    "braces": lambda n: HEAD + times(n, "edit a at { } }\n"),
    "forms that are none": lambda n: HEAD + times(n, "edit e# at layer[*].ffn { h += adaptr#(x) }\n"),
    "sites that are none": lambda n: HEAD + times(n, "edit e# at layer[*].fnn# { h += x }\n"),
    "methods that are none": lambda n: HEAD + times(n, "apply m#()\n"),
    "facts that are none": lambda n: HEAD + EDIT + times(n, "expect sites(f#) == 1\n"),
    "names twice": lambda n: HEAD + times(n, "let a = 1\n"),
    "one line": lambda n: HEAD + times(n, "let a# = # "),
    "recipes": lambda n: HEAD + times(n, "use lora from std apply lora() as a#\n"),
    "nothing": lambda n: HEAD + " \n" * n,
}
ALL = [("check", name) for name in TEXTS] + [
    (c, name) for c in ("fmt --diff", "expand") for name in ("methods", "lets", "edits")
]
MANY = {"signs": 60, "brackets": 60, "sums": 200, "characters": 200, "nothing": 100}  # beyond the limits


@pytest.fixture(scope="module", autouse=True)
def loaded_tables() -> None:
    """The parser's tables are loaded once per process."""
    tables()


@contextmanager
def counted() -> Generator[list[int]]:
    """The number of instructions executed in the block."""
    count = [0]

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        count[0] += event == "opcode"
        return local

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield count
    finally:
        sys.settrace(before)


def work(command: str, text: str, tmp_path: Path) -> int:
    path = tmp_path / "spec.peft"
    path.write_text(text)
    suggestions._nearest.cache_clear()
    name, *options = command.split()
    with counted() as count:
        assert main([name, str(path), *options]) in (0, 1)
    return count[0]


@pytest.mark.parametrize(("command", "name"), ALL, ids=[f"{command}: {name}" for command, name in ALL])
def test_twice_the_text_is_twice_the_work(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = MANY.get(name, 6)
    work(command, TEXTS[name](2), tmp_path)  # caches
    one, two, four = (work(command, TEXTS[name](n * few), tmp_path) for n in (1, 2, 4))
    capsys.readouterr()
    assert four - two <= 2.2 * (two - one) + 2_000  # constant work cancels
