"""Mutated locks, files of plans and configurations, read by the commands that take them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import BertConfig

from benchmarks.adversarial.outcome import Tally
from peftc import Diagnostic, PeftcError
from peftc.cli.main import main

SPEC = "peft 1\nedit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=4) }\nexpect foldable(qv)\n"
CONFIGURATION = """models = ["model"]
tasks = ["a"]
exclude = ["drafts/"]
include = ["shared"]
ignore = ["P217"]
strict = false

[severity]
P204 = "error"

[[specs]]
paths = ["*.peft"]
models = ["model"]
"""
DEEP = 100_000  # brackets
VALUES: tuple[object, ...] = (
    *(None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "\0", "\ud800", "x" * 100_000, "🜁\u202e"),
    *([], {}, [[]], {"": {}}, "../../../../etc/passwd", "/etc/passwd", "git:HEAD:x", "-", "P900", "peft 1"),
    *(["peft 1", "use x from '/etc/passwd'"], {"__class__": "os.system"}, "model", "{layer}", "*" * 500),
)
COMMANDS = {
    "qv.lock.json": (["check", "--locked", "qv.peft"], ["diff", "qv.lock.json", "qv.peft", "--format", "json"]),
    "qv.plan.json": (["compile", "--plan", "qv.plan.json", "-o", "out"], ["diff", "qv.plan.json", "qv.peft"]),
    "peftc.toml": (["check", "qv.peft"], ["lock", "qv.peft"]),
}


def run(count: int, seed: int, tally: Tally) -> None:
    """`count` mutations of each of the three files."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(Path(folder))
        before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        for name, commands in COMMANDS.items():
            text = before[Path(folder) / name].decode()
            for number in range(count):
                data = mutated(text, name, draw)
                (Path(folder) / name).write_bytes(data)
                command = commands[number % len(commands)]
                tally.run(f"{name}, {number}: {data[:200]!r}", lambda command=command: execute(command))
                tally.run(f"{name}, {number}: files", lambda name=name: restore(Path(folder), before, name))


def prepare(folder: Path) -> None:
    """A spec, a model, a configuration, a lock and a file of plans."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertConfig(**sizes, vocab_size=60, architectures=["BertModel"]).save_pretrained(folder / "model")
    (folder / "qv.peft").write_text(SPEC)
    (folder / "shared").mkdir()
    (folder / "peftc.toml").write_text(CONFIGURATION)
    execute(["lock", "qv.peft"])
    execute(["plan", "qv.peft", "--model", "model", "-o", "qv.plan.json"])


def execute(command: list[str]) -> None:
    """Raises: PeftcError for errors that a command prints; AssertionError for other exit codes."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(command)
        except SystemExit as end:
            code = end.code
    text = out.getvalue()
    assert code in (0, 1, 2), code
    assert "root:" not in text, "a message shows another file"
    if code:
        is_bug = "[P900]" in text or not text.strip()
        raise PeftcError(Diagnostic("P900" if is_bug else "P000", text[:500]))


def restore(folder: Path, before: dict[Path, bytes], name: str) -> None:
    """Raises: AssertionError if the command has changed a file that it does not write."""
    written = {folder / name, folder / "qv.lock.json"} if name == "peftc.toml" else {folder / name}
    now = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    others = {path: data for path, data in now.items() if path not in written and folder / "out" not in path.parents}
    assert others == {path: data for path, data in before.items() if path not in written}, "a file has changed"
    for path, data in before.items():
        path.write_bytes(data)
    for path in sorted((folder / "out").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if (folder / "out").exists():
        os.rmdir(folder / "out")


def mutated(text: str, name: str, draw: random.Random) -> bytes:
    """A text with one or several changes, of its values or of its bytes."""
    kind = draw.randrange(6)
    if kind < 3 and name.endswith(".json"):
        data = json.loads(text)
        for _ in range(draw.randint(1, 3)):
            change_value(data, draw)
        return json.dumps(data).encode("utf-8", "surrogatepass")
    if kind == 3:
        return whole(text, draw)
    data = bytearray(text.encode())
    for _ in range(draw.randint(1, 4)):
        data = spliced(data, draw)
    return bytes(data)


def change_value(data: Any, draw: random.Random) -> None:
    """Another value, a missing or a further key, or an entry twice, somewhere in JSON data."""
    owner, key = draw.choice([*places(data)])
    match draw.randrange(4):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[draw.choice(["", "extra", "__init__", "format_version"])] = copy.deepcopy(draw.choice(VALUES))
        case 2 if isinstance(owner, list):
            owner.insert(draw.randint(0, len(owner)), copy.deepcopy(owner[key]))
        case _:
            owner[key] = copy.deepcopy(draw.choice(VALUES))


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in JSON data with each of its keys."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield data, key
        yield from places(value)


def whole(text: str, draw: random.Random) -> bytes:
    """Something else in the place of a file, or around it."""
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: text.encode("utf-16"),
        lambda: b"[" * DEEP,
        lambda: b'{"a":' * DEEP,
        lambda: b"a = " + b"[" * DEEP,
        lambda: draw.randbytes(500),
        lambda: text.encode() * 2,
        lambda: text.encode()[: draw.randrange(len(text))],
        lambda: b"1e999999999",
        lambda: b"a." * DEEP + b"b = 1",
        lambda: text.replace("\n", "\r").encode(),
    )
    return draw.choice(makers)()


def spliced(data: bytearray, draw: random.Random) -> bytearray:
    """Bytes removed, repeated, replaced or inserted."""
    start = draw.randrange(len(data) + 1)
    stop = min(len(data), start + draw.choice([1, 2, 10, 100]))
    piece = data[start:stop]
    value = json.dumps(draw.choice(VALUES[:-3])).encode()
    replacement = draw.choice([b"", piece * 2, draw.randbytes(3), value, b'"', b"[", b"}", b"\0", b"\n", b"= 1\n"])
    return data[:start] + replacement + data[stop:]
