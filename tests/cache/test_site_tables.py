"""Cached site tables: those of a trace, field by field; and nothing where anything differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.bart import modeling_bart

import peftc
from peftc.addressing.sites import SiteTable
from peftc.cache import entries, environment
from peftc.cache.lookup import cached_table
from peftc.cache.table_json import decode_table, encode_table
from peftc.cli.main import main
from peftc.tracing import tracer
from tests import zoo

SPEC = "peft 1 edit q at layer[*].attn.q { h += lora(x, r=2) } expect foldable(q)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sites"


@pytest.fixture
def named(tmp_path: Path) -> str:
    """The path of a config.json of which there is a cached table."""
    return write_config(tmp_path, "bart")


def write_config(folder: Path, species: str) -> str:
    path = folder / f"{species}.json"
    zoo.config(species).to_json_file(path, use_diff=False)
    return str(path)


def entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("species", zoo.SPECIES)
def test_a_cached_table_is_that_of_the_trace(species: str, tmp_path: Path) -> None:
    name = write_config(tmp_path, species)
    traced = peftc.sites(name, cache=False)
    assert cached_table(name) is None
    assert peftc.sites(name) == traced
    cached = cached_table(name)
    assert isinstance(cached, SiteTable)
    for field in fields(SiteTable):
        assert getattr(cached, field.name) == getattr(traced, field.name), field.name


@pytest.mark.parametrize("species", ["bart", "mixtral"])
def test_layers_of_one_kind_are_stored_once(species: str, tmp_path: Path) -> None:
    key = "encoder_layers" if species == "bart" else "num_hidden_layers"
    sizes = []
    for layers in (3, 9):
        path = tmp_path / f"{layers}.json"
        zoo.config(species, **{key: layers}).to_json_file(path, use_diff=False)
        table = peftc.sites(str(path), cache=False)
        sizes.append(len(json.dumps(encode_table(table))))
    assert sizes[1] < 1.35 * sizes[0]


def test_plans_are_equal_with_and_without_a_cache(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.peft"
    spec.write_text(SPEC)
    outputs = []
    for options in (["--no-cache"], [], []):
        for command in (["plan", str(spec), "--json"], ["plan", str(spec)], ["sites"]):
            assert main([*command, "--model", named, *options]) == 0
            outputs.append(capsys.readouterr())
    assert outputs[:3] == outputs[3:6] == outputs[6:]
    monkeypatch.setattr("peftc.compiler.analyse_base", None)  # the table alone has to do
    assert peftc.plan(SPEC, named).edits


def test_what_needs_graphs_is_traced(named: str) -> None:
    spec = "peft 1 edit p at encoder.embed { h = concat(prompt(len=2), h) }"
    plans = [peftc.plan(spec, named, cache=cache) for cache in (False, True, True)]
    assert plans[0] == plans[1] == plans[2]
    wrong = f"{spec} edit e at layer[*] {{ h += reft(h, r=2, first=1) }}"
    peftc.sites(named)
    messages = []
    for cache in (False, True):
        with pytest.raises(peftc.PeftcError) as info:
            peftc.plan(wrong, named, cache=cache)
        messages.append(str(info.value))
    assert messages[0] == messages[1]


def test_a_cold_plan_imports_neither_torch_nor_transformers(named: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.peft"
    spec.write_text(SPEC)
    code = (
        "import sys; from peftc.cli.main import main\n"
        f"assert main(['plan', {str(spec)!r}, '--model', {named!r}]) == 0\n"
        f"assert main(['sites', '--model', {named!r}]) == 0\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'huggingface_hub') if name in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout.splitlines()[-1] == "[]" for run in runs] == [False, True]
    assert runs[0].stdout.splitlines()[:-1] == runs[1].stdout.splitlines()[:-1]


def damages(folder: Path) -> Iterator[bytes]:
    content = entry(folder).read_bytes()
    checksum, _, body = content.partition(b"\n")
    yield b""
    yield content[: len(content) // 2]
    yield content.replace(b"encoder", b"decoder", 1)
    yield checksum + b"\n[]"
    for change in (b"[]", b"{}", b"null", b"[" * 100_000, body.replace(b'"sites"', b'"sights"'), b"\xff"):
        yield entries.hashlib.sha256(change).hexdigest().encode() + b"\n" + change
    data = json.loads(body)
    for name, value in (
        ("model_id", 3),
        ("sites", [3]),
        ("sites", [[99, "", "", 0]]),
        ("modules", {"a": 1}),
    ):
        changed = json.dumps({**data, "table": {**data["table"], name: value}}).encode()
        yield entries.hashlib.sha256(changed).hexdigest().encode() + b"\n" + changed


def test_damaged_and_foreign_files_are_as_if_there_were_none(named: str, folder: Path) -> None:
    traced = peftc.sites(named)
    for content in list(damages(folder)):
        entry(folder).write_bytes(content)
        assert cached_table(named) is None, content[:80]
        assert peftc.sites(named) == traced
        assert cached_table(named) == traced  # it has been replaced


def test_a_file_that_others_may_write_is_not_read(named: str, folder: Path) -> None:
    peftc.sites(named)
    entry(folder).chmod(0o666)
    assert cached_table(named) is None


def test_a_folder_that_cannot_be_written_is_no_error(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/peftc", str(tmp_path / "file"), ""):
        monkeypatch.setenv("PEFTC_CACHE", place)
        assert peftc.sites(named).sites
        assert cached_table(named) is None


def test_a_change_of_anything_that_the_table_depends_on_is_a_miss(
    named: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peftc.sites(named)
    assert cached_table(named) is not None
    present = environment.environment()
    for name, value in present.items():
        with monkeypatch.context() as patch:
            patch.setattr(entries, "environment", lambda changed={**present, name: [value, 1]}: changed)
            assert cached_table(named) is None, name
    with monkeypatch.context() as patch:
        patch.setenv("TRANSFORMERS_ATTENTION", "other")
        assert cached_table(named) is None
    with monkeypatch.context() as patch:
        (tmp_path / "new-1.0.dist-info").mkdir()
        patch.syspath_prepend(str(tmp_path))
        assert cached_table(named) is None
    path = Path(named)
    path.write_text(path.read_text().replace('"encoder_layers": 2', '"encoder_layers": 3'))
    assert cached_table(named) is None


def test_the_source_of_the_model_is_compared(named: str, folder: Path, tmp_path: Path) -> None:
    peftc.sites(named)
    body = json.loads(entry(folder).read_bytes().partition(b"\n")[2])
    (record,) = (record for record in body["files"] if record[0] == modeling_bart.__file__)
    assert record[3], "the content of the model's own file is hashed"
    assert environment.is_unchanged(body["files"])
    (own,) = (record for record in body["files"] if record[0] == tracer.__file__)
    assert not environment.is_unchanged([*body["files"], [*own[:2], own[2] + 1, *own[3:]]]), "peftc in development"
    copy = tmp_path / "modeling.py"
    copy.write_bytes(Path(record[0]).read_bytes())
    os.utime(copy, ns=(record[2], record[2]))
    assert environment.is_unchanged([[str(copy), *record[1:]]])
    copy.write_bytes(copy.read_bytes().replace(b"def forward", b"def  orward", 1))
    os.utime(copy, ns=(record[2], record[2]))
    assert not environment.is_unchanged([[str(copy), *record[1:]]])
    copy.unlink()
    assert not environment.is_unchanged([[str(copy), *record[1:]]])


@pytest.mark.skipif(sys.platform == "win32", reason="files have no time of their last change that is not set")
def test_a_source_is_read_again_only_if_the_system_noted_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    file = tmp_path / "torch" / "own.py"
    file.write_text("class Own: ...\n")
    monkeypatch.setitem(sys.modules, "torch.own", SimpleNamespace(__file__=str(file)))
    own = type("Own", (), {"__module__": "torch.own"})
    (recent,) = (record for record in environment.source_records([own]) if record[0] == str(file))
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(environment.time, "time_ns", lambda: later)
    (record,) = (record for record in environment.source_records([own]) if record[0] == str(file))
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    assert environment.is_unchanged([record])
    assert not read
    assert environment.is_unchanged([recent])
    assert read, "another change may have had the same time"
    restore(file, record)
    read.clear()
    assert environment.is_unchanged([record])
    assert read
    file.write_text("class Not: ...\n")
    restore(file, record)
    assert not environment.is_unchanged([record])


def restore(file: Path, record: list[Any]) -> None:
    """Gives a file the time of its last change that is in a record, as a copy of it has it."""
    while True:
        os.utime(file, ns=(record[2], record[2]))
        if os.stat(file).st_ctime_ns != record[4]:
            return


def test_a_process_with_patches_neither_reads_nor_writes(
    named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_bart.BartEncoderLayer.forward
    with monkeypatch.context() as patch:
        patch.setattr(modeling_bart.BartEncoderLayer, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
        peftc.sites(named)
        assert not folder.exists()
    peftc.sites(named)
    assert cached_table(named) is not None
    monkeypatch.setattr(modeling_bart.BartEncoderLayer, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    assert cached_table(named) is None


def test_models_in_memory_and_code_of_their_own_have_no_cached_table(named: str, folder: Path) -> None:
    peftc.sites(zoo.build("bart"))
    peftc.sites(zoo.config("bart"))
    assert not folder.exists()
    path = Path(named)
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {}}))
    peftc.sites(named)
    assert cached_table(named) is not None
    assert cached_table(named, trust_remote_code=True) is None


def test_two_may_write_at_once(named: str, folder: Path) -> None:
    table = peftc.sites(named, cache=False)
    source = peftc.models.sources.resolve(named)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: entries.write_table(source.request, table, []), range(16)))
    assert cached_table(named) == table
    assert len(list(folder.iterdir())) == 1  # and no temporary file


def test_the_oldest_files_go(named: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_MAX_FILES", 2)
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.json").write_text("")
        os.utime(folder / f"{number}.json", (number, number))
    table = peftc.sites(named)
    assert {path.name for path in folder.iterdir()} >= {"3.json"}
    assert len(list(folder.iterdir())) == 2
    assert cached_table(named) == table


def test_json_of_a_table_is_strict() -> None:
    table = peftc.sites(zoo.build("bart"))
    data = encode_table(table)
    assert decode_table(json.loads(json.dumps(data))) == table
    for other in ({**data, "more": 1}, {**data, "d_model": "16"}, {**data, "sites": data["modules"]}):
        with pytest.raises((ValueError, TypeError, LookupError)):
            decode_table(other)
