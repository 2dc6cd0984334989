"""Ways of tampering with a saved adapter."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[Path], None]


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter.json").read_text(encoding="utf-8"))


def describe(folder: Path, **entries: object) -> None:
    (folder / "adapter.json").write_text(json.dumps(description(folder) | entries), encoding="utf-8")


def tensors_file(folder: Path) -> Path:
    return folder / description(folder)["file"]


def replace_tensors(folder: Path, data: bytes, **entries: object) -> None:
    """Replaces the tensors, with a description that matches them."""
    digest = hashlib.sha256(data).hexdigest()
    old = tensors_file(folder)
    name = f"adapter-{digest[:16]}.safetensors"
    old.unlink()
    (folder / name).write_bytes(data)
    describe(folder, sha256=digest, file=name, **entries)


def with_tensors(change: Callable[[Tensor], Tensor]) -> Change:
    def act(folder: Path) -> None:
        tensors = {name: change(tensor).contiguous() for name, tensor in load_file(tensors_file(folder)).items()}
        save_file(tensors, folder / "new")
        shapes = {n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in tensors.items()}
        data = (folder / "new").read_bytes()
        (folder / "new").unlink()
        replace_tensors(folder, data, tensors=shapes)

    return act


def with_header(change: Callable[[dict[str, Any]], object]) -> Change:
    def act(folder: Path) -> None:
        data = tensors_file(folder).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        content = change(header)
        text = content if isinstance(content, bytes) else json.dumps(header).encode()
        replace_tensors(folder, struct.pack("<Q", len(text)) + text + data[8 + length :])

    return act


def with_bytes(change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: replace_tensors(folder, change(tensors_file(folder).read_bytes()))


def with_entry(*path: str, value: object) -> Change:
    def act(folder: Path) -> None:
        data = description(folder)
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (folder / "adapter.json").write_text(json.dumps(data), encoding="utf-8")

    return act


def with_text(text: str | bytes) -> Change:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return lambda folder: (folder / "adapter.json").write_bytes(data) and None


def in_place_of(name: str, make: Callable[[Path], object]) -> Change:
    def act(folder: Path) -> None:
        path = tensors_file(folder) if name == "tensors" else folder / name
        path.unlink()
        make(path)

    return act


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle": lambda path: path.symlink_to(path.name),
    "a link to a secret": lambda path: path.symlink_to(path.parent.parent / "secret"),
    "a terabyte": sparse,
    "empty": lambda path: path.touch(),
}
THINGS: tuple[object, ...] = (None, -1, 10**400, 1e308, "", "../secret", "a\0b", [], {}, [[]], {"a": {}}, True)
SPECS = (
    'use m from "../secret"\napply m()',
    'use m from "/etc/passwd"\napply m()',
    'use m from "adapter.json"\napply m()',
    'use m from "/dev/zero"\napply m()',
    "use mam from std\napply mam()",
    "edit a at layer[*].attn.q { h += lora(x, r=1000000000) }",
    "edit a at layer[*].ffn { h += adapter(x, r=1000000000) }",
    "edit a at embed { h = concat(prompt(len=1000000000), h) }",
    "method a() { apply a() }\napply a()",
    "let a = " + "(" * 10_000,
    "edit a at layer[*].attn.q { h += " + "-" * 10_000 + "x }",
    *(f"edit a at layer[*].attn.q {{ h += lora(x, r={n}) }}" for n in ("0", "-1", "1e400", "9" * 400, "nan")),
)


def changes(draw: random.Random) -> Iterator[tuple[str, Change]]:
    """Every way of tampering, by name; the first is none."""
    yield "untouched", lambda folder: None
    yield "tensors written again", with_tensors(torch.clone)
    yield from file_changes()
    yield from tensor_changes()
    yield from entry_changes()
    yield from spec_changes()
    yield from shape_changes()
    yield from text_changes()
    yield from header_changes()
    for number in range(100):
        yield f"bytes of the description, {number}", _noise("adapter.json", draw.randrange(2**32))
        yield f"bytes of the tensors, {number}", _noise("tensors", draw.randrange(2**32))


def file_changes() -> Iterator[tuple[str, Change]]:
    """Special files in place of the description or the tensors."""
    for name in ("adapter.json", "tensors"):
        yield from ((f"{name} is {what}", in_place_of(name, make)) for what, make in SPECIAL.items())


def tensor_changes() -> Iterator[tuple[str, Change]]:
    """Other dtypes, values and shapes, with a description that matches them."""
    for kind in ("int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "uint16", "float8_e4m3fn"):
        dtype = getattr(torch, kind)
        yield f"tensors of {kind}", with_tensors(lambda t, dtype=dtype: torch.ones(t.shape).to(dtype))
    for value in (float("nan"), float("inf"), -float("inf"), 1e38):
        yield f"values {value}", with_tensors(lambda t, value=value: torch.full_like(t, value))
    yield "other shapes", with_tensors(lambda t: t[:1])
    yield "more dimensions", with_tensors(lambda t: t[None])
    yield "empty tensors", with_tensors(lambda t: t[:0])


def entry_changes() -> Iterator[tuple[str, Change]]:
    """Wrong values of the entries of the description."""
    keys = (
        "format_version",
        "peftc",
        "spec",
        "source",
        "plan",
        "base",
        "seed",
        "tasks",
        "tensors",
        "file",
        "sha256",
        "weights_digest",
    )
    for key in keys:
        yield from ((f"{key} is {str(thing)[:20]!r}", with_entry(key, value=thing)) for thing in THINGS)
    yield "tasks by the hundred thousand", with_entry("tasks", value=[f"t{i}" for i in range(300_000)])
    yield "a task with a long name", with_entry("tasks", value=["t" * 1_000_000])
    yield "a task twice", with_entry("tasks", value=["a", "a"])
    for name in (
        "../secret",
        "/etc/passwd",
        "adapter.json",
        "adapter-../../secret.safetensors",
        "adapter-\0.safetensors",
        ".",
    ):
        yield f"file is {name!r}", with_entry("file", value=name)


def spec_changes() -> Iterator[tuple[str, Change]]:
    """Other specs."""
    for spec in SPECS:
        yield f"spec is {spec[:40]!r}", with_entry("spec", value=f"peft 1\n{spec}\n")
    yield "a spec of ten megabytes", with_entry("spec", value="peft 1\n" + "# \n" * 3_300_000)


def shape_changes() -> Iterator[tuple[str, Change]]:
    """Descriptions of tensors that the file does not have."""
    yield "a shape beyond all bounds", with_entry("tensors", value={"a": {"shape": [2**62, 2**62], "dtype": "float32"}})
    yield "a negative shape", with_entry("tensors", value={"a": {"shape": [-1], "dtype": "float32"}})
    yield "a dtype that is a function", with_entry("tensors", value={"a": {"shape": [1], "dtype": "load"}})
    yield (
        "a hundred thousand tensors",
        with_entry("tensors", value={f"t{i}": {"shape": [1], "dtype": "int8"} for i in range(100_000)}),
    )


def text_changes() -> Iterator[tuple[str, Change]]:
    """Descriptions that are malformed JSON."""
    for name, text in {
        "deep": "[" * 200_000,
        "deep objects": '{"a":' * 100_000,
        "a long number": "1" * 1_000_000,
        "1e400": '{"format_version": 1e400}',
        "NaN": '{"format_version": NaN}',
        "a surrogate": '{"format_version": "\\ud800"}',
        "two keys": '{"format_version": "1.0", "format_version": 7}',
        "a text": '"adapter"',
        "NUL": "\0" * 100,
    }.items():
        yield f"description: {name}", with_text(text)
    yield "description: no UTF-8", with_text(b"\xff\xfe\xfa")
    yield "description: UTF-16", with_text('{"format_version": "1.0"}'.encode("utf-16"))


def header_changes() -> Iterator[tuple[str, Change]]:
    """Malformed headers of the tensors file, and pickles."""
    headers: dict[str, Callable[[dict[str, Any]], object]] = {
        "overlapping": lambda h: [t.update(data_offsets=[0, 64]) for n, t in h.items() if n != "__metadata__"],
        "beyond the end": lambda h: [t.update(data_offsets=[0, 2**60]) for n, t in h.items() if n != "__metadata__"],
        "backwards": lambda h: [t.update(data_offsets=[64, 0]) for n, t in h.items() if n != "__metadata__"],
        "negative": lambda h: [t.update(data_offsets=[-64, 0]) for n, t in h.items() if n != "__metadata__"],
        "a huge shape": lambda h: [t.update(shape=[2**40, 2**40]) for n, t in h.items() if n != "__metadata__"],
        "another dtype": lambda h: [t.update(dtype="OBJECT") for n, t in h.items() if n != "__metadata__"],
        "no JSON": lambda h: b"{{{{",
        "deep": lambda h: b"[" * 100_000,
        "nothing": lambda h: b"{}",
        "names twice": lambda h: json.dumps(h)[:-1].encode() + b", " + json.dumps(h)[1:].encode(),
        "metadata that is code": lambda h: h.update(__metadata__={"__reduce__": "os.system"}),
    }
    yield from ((f"header: {name}", with_header(change)) for name, change in headers.items())
    yield "a header of 2^63 bytes", with_bytes(lambda data: struct.pack("<Q", 2**63) + data[8:])
    yield "a header of no bytes", with_bytes(lambda data: struct.pack("<Q", 0) + data[8:])
    yield "tensors cut", with_bytes(lambda data: data[:-1])
    yield "tensors longer", with_bytes(lambda data: data + b"\0" * 100)
    yield "a pickle", with_bytes(lambda data: b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    yield (
        "a pickle beside it",
        lambda folder: (folder / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.") and None,
    )


def _noise(name: str, seed: int) -> Change:
    def act(folder: Path) -> None:
        draw = random.Random(seed)
        path = tensors_file(folder) if name == "tensors" else folder / name
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice((1, 2, 10))):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 1, 5))] = bytes(
                draw.choice(b'\0\xff"{}[]0129e-') for _ in range(draw.choice((0, 1, 1, 3)))
            )
        if name == "tensors":
            replace_tensors(folder, bytes(data))
        else:
            path.write_bytes(bytes(data))

    return act
