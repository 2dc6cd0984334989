"""Whatever a client sends, the server goes on: random texts, malformed messages, places that are
none. It runs no code, and reads no file but those that are named.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types

from peftc.filesystem.open_texts import OpenTexts
from peftc.language_server.analysis import analyse
from peftc.language_server.answers.actions import actions
from peftc.language_server.answers.completion import Completer
from peftc.language_server.answers.formatting import format_edits
from peftc.language_server.answers.hover import Hover
from peftc.language_server.answers.inlay_hints import inlay_hints
from peftc.language_server.answers.navigation import Navigation
from peftc.language_server.answers.rename import Refusal
from peftc.language_server.documents import Documents, Settings
from peftc.language_server.library import Library
from peftc.language_server.positions import Positions
from tests.language_server.client import ROOT

SPECS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "specs").glob("*.peft"))[::6]]
FORMS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "forms").glob("*.peft"))[::6]]
WORDS = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    '"',
    ",",
    ".",
    "=",
    "@",
    "edit",
    "form",
    "use",
    "apply",
    "let",
    "𝔘",
    "\r",
    "\u2028",
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A spec with parts that are missing, twice there, or others; or any text."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.text(st.characters(exclude_categories=()), max_size=60))
    text = draw(st.sampled_from([*SPECS, *FORMS]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 40)))
        text = text[:start] + draw(st.sampled_from([*WORDS, text[start:end] * 2])) + text[end:]
    return text[: draw(st.integers(1, max(len(text), 1)))]


@settings(max_examples=60, deadline=None)
@given(text=texts(), place=st.floats(0, 1), name=st.sampled_from(["a", "edit", "x", "é", ""]))
def test_every_question_has_an_answer(text: str, place: float, name: str) -> None:
    """Nothing raises, and every edit is within the text."""
    documents = Documents()
    document = documents.open("untitled:a", text, 1, "utf-16")
    offset = round(place * len(text))
    library, opened = Library(OpenTexts()), OpenTexts()
    analysis = analyse(document, Settings(), {}, on_models=False)
    assert [one.message for one in analysis.report.diagnostics if one.code == "P900"] == []
    for action in actions(analysis, 0, len(text), ()):
        assert action.edit is not None
    Completer(document, offset, library).items()
    Hover(document, offset, library, {}, analysis).answer()
    list(inlay_hints(analysis, 0, len(text)))
    navigation = Navigation(document, offset, library, documents)
    navigation.definitions(), navigation.references(True), navigation.highlights()
    with contextlib.suppress(Refusal):
        navigation.rename(name, opened, None)
    for edit in format_edits(document) or ():
        start, end = (document.positions.offset(at) for at in (edit.range.start, edit.range.end))
        assert 0 <= start <= end <= len(text)


@given(
    text=st.text(st.sampled_from("a𝔘é\r\n\u2028\x0c"), max_size=12),
    encoding=st.sampled_from(["utf-8", "utf-16", "utf-32"]),
)
def test_positions_are_those_of_the_protocol(text: str, encoding: str) -> None:
    """A position has the line ends of the protocol, and counts the units of the encoding."""
    positions = Positions(text, encoding)
    size = {"utf-8": 1, "utf-16": 2, "utf-32": 4}[encoding]
    for offset in range(len(text) + 1):
        position = positions.position(offset)
        before = text[:offset].replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if text[offset - 1 : offset + 1] != "\r\n":
            assert position.line == len(before) - 1
            assert (
                position.character
                == len(before[-1].encode(encoding.replace("-16", "-16-le").replace("-32", "-32-le"))) // size
            )
            assert positions.offset(position) == offset
    assert positions.offset(types.Position(99, 0)) == len(text)


def test_formatting_keeps_the_ends_of_lines() -> None:
    text = "peft 1\r\nedit a  at embed { h = x }  # é\r\n"
    document = Documents().open("untitled:a", text, 1, "utf-16")
    (edit,) = format_edits(document) or ()
    start, end = (document.positions.offset(at) for at in (edit.range.start, edit.range.end))
    assert text[:start] + edit.new_text + text[end:] == "peft 1\r\n\r\nedit a at embed { h = x }  # é\r\n"


# A server that gets bytes


def frame(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def message(number: int | None, method: str, params: Any) -> bytes:
    data = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if number is None else {"id": number})
    return frame(json.dumps(data).encode())


METHODS = [
    types.TEXT_DOCUMENT_COMPLETION,
    types.TEXT_DOCUMENT_HOVER,
    types.TEXT_DOCUMENT_DEFINITION,
    types.TEXT_DOCUMENT_REFERENCES,
    types.TEXT_DOCUMENT_RENAME,
    types.TEXT_DOCUMENT_FORMATTING,
    types.TEXT_DOCUMENT_CODE_ACTION,
    types.TEXT_DOCUMENT_INLAY_HINT,
    types.WORKSPACE_EXECUTE_COMMAND,
    "no/such/method",
    "$/cancelRequest",
]
VALUES = [None, True, -1, 10**30, 1.5, "", "\ud800", "a" * 3000, [], {}, [[]], {"uri": "file:///etc/passwd"}]


def damaged(value: Any, draws: random.Random) -> Any:
    """Data with other values in some places."""
    if draws.random() < 0.15:
        return draws.choice(VALUES)
    if isinstance(value, dict):
        return {key: damaged(one, draws) for key, one in value.items() if draws.random() > 0.05}
    return [damaged(one, draws) for one in value] if isinstance(value, list) else value


def questions(uri: str, draws: random.Random) -> Any:
    at = {"line": draws.randrange(5), "character": draws.randrange(40)}
    options = {"tabSize": 4, "insertSpaces": True}
    return {
        "textDocument": {"uri": uri},
        "position": at,
        "range": {"start": at, "end": at},
        "context": {"diagnostics": [], "includeDeclaration": True},
        "newName": "n",
        "options": options,
        "command": "rm",
        "id": 3,
    }


# What an audit hook reports: files that are read and that nobody has named, and what code may do.
HOOK = """
import sys
folder, allowed = sys.argv[1], sys.argv[2:]
def hook(event, args):
    path = str(args[0]) if args else ""
    if event == "open" and path.startswith((folder, "/etc/passwd")) and path not in allowed:
        sys.stderr.write(f"READ {path}")
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.remove", "os.rename", "socket.connect"):
        sys.stderr.write(f"DONE {event} {args}")
sys.addaudithook(hook)
from peftc.cli.main import main
main(["lsp"])
"""


def answers_of(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The messages of a server, as they come."""
    assert process.stdout is not None
    while header := process.stdout.readline():
        if header.startswith(b"Content-Length"):
            process.stdout.readline()
            process.stdout.readline()
            yield json.loads(process.stdout.read(int(header.split(b":")[1])))


@pytest.mark.parametrize("seed", range(2))
def test_malformed_messages(tmp_path: Path, seed: int) -> None:
    """Each request is answered, and a well-formed one behind the others is answered well."""
    draws = random.Random(seed)
    folder = tmp_path / "work"
    folder.mkdir()
    target = tmp_path / "target.txt"
    target.write_text("a secret")
    (folder / "peftc.toml").write_text("[[[")
    uri = (folder / "own.peft").as_uri()
    uses = f'use m from "{target}"\nuse n from "../../../etc/passwd"\n'
    spec = f"peft 2\n{uses}edit a at layer[*].ffn {{ h += lora(x, r=2) }}\n"
    uris = [uri, uri, "file:///etc/passwd", "file://[", "untitled:a", "file:///%00"]
    parts = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"Content-Length: x\r\n\r\n",
        message(1, "initialize", {"capabilities": {}, "processId": None, "rootUri": None}),
        message(None, "initialized", {}),
    ]
    numbers = {1, 100}
    for number in range(2, 60):
        text = spec if draws.random() < 0.5 else spec[: draws.randrange(len(spec))]
        item = {"uri": draws.choice(uris), "languageId": "peft", "version": number, "text": text}
        parts.append(message(None, types.TEXT_DOCUMENT_DID_OPEN, damaged({"textDocument": item}, draws)))
        method = draws.choice(METHODS)
        numbers |= set() if method.startswith("$") else {number}
        parts.append(message(number, method, damaged(questions(uri, draws), draws)))
        setting = message(None, types.WORKSPACE_DID_CHANGE_CONFIGURATION, {"settings": draws.choice(VALUES)})
        parts.append(draws.choice([frame(b"{"), frame(b"null"), frame(b"[" * 5000), frame(b"\xff"), b"\r\n", setting]))
    item = {"uri": uri, "languageId": "peft", "version": 99, "text": spec}
    asked = {"textDocument": {"uri": uri}, "position": {"line": 3, "character": 33}}
    parts.append(message(None, types.TEXT_DOCUMENT_DID_OPEN, {"textDocument": item}))
    parts.append(message(100, types.TEXT_DOCUMENT_HOVER, asked))
    allowed = [str(folder / name) for name in ("own.peft", "peftc.toml")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PEFTC_CACHE": ""}
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", HOOK, str(tmp_path), *allowed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=env,
        ) as process,
    ):
        assert process.stdin is not None
        sender = threading.Thread(target=lambda: (process.stdin.write(b"".join(parts)), process.stdin.flush()))
        sender.start()
        answers: dict[Any, dict[str, Any]] = {}
        text = ""
        for one in answers_of(process):
            text += json.dumps(one)
            if "id" in one and "method" not in one:
                answers[one["id"]] = one
            if one.get("id") == 100:
                process.stdin.write(message(101, "shutdown", None) + message(None, "exit", None))
                process.stdin.flush()
        sender.join()
        assert process.wait(60) == 0
    assert "lora(x, r" in answers[100]["result"]["contents"]["value"]
    assert numbers - answers.keys() == set()
    text += errors.read_text(errors="replace")
    assert [word for word in ("a secret", "READ ", "DONE ", "root:") if word in text] == []
