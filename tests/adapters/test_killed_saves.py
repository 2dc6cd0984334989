"""A save is atomic: if the process is killed, or another one saves or loads at the same time, the
folder holds the old adapter or the new one.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from peftc.adapters.files import read, write
from peftc.adapters.metadata import METADATA, TENSORS, Adapter
from peftc.filesystem import atomic
from tests import zoo
from tests.laws.harness import randomise
from tests.processes import KILLED, REFUSED, end_of, fork, killed_at

SPEC = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }"


@dataclass(frozen=True)
class Saved:
    """An adapter that can be written several times."""

    adapter: Adapter
    tensors: dict[str, torch.Tensor]

    def save(self, folder: Path) -> None:
        write(folder, self.tensors, lambda sha256: self.adapter)

    def is_in(self, folder: Path) -> bool:
        return self.equals(read(folder)[1])

    def equals(self, target: dict[str, torch.Tensor]) -> bool:
        return target.keys() == self.tensors.keys() and all(torch.equal(t, self.tensors[k]) for k, t in target.items())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Saved, Saved]:
    """Two adapters of one base: the old and the new one."""
    model = zoo.build("llama")
    peftc.compile(SPEC, model)
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for folder in folders:
        randomise(peftc.parameters(model))
        peftc.save(model, folder)
    old, new = (Saved(*read(folder)) for folder in folders)
    return old, new


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_clean(folder: Path, *others: str) -> None:
    """The folder holds one adapter and the user's own files, nothing else."""
    assert names(folder) == sorted([METADATA, json.loads((folder / METADATA).read_text())["file"], *others])


def old_layout(folder: Path) -> None:
    """Rewrites an adapter in format 1.0: every tensor file has the same name."""
    message = json.loads((folder / METADATA).read_text())
    (folder / message.pop("file")).rename(folder / TENSORS)
    (folder / METADATA).write_text(json.dumps(message | {"format_version": "1.0"}))


@pytest.mark.parametrize("layout", ["new", "1.0", "nothing"])
def test_killed_at_every_boundary(layout: str, adapters: tuple[Saved, Saved], tmp_path: Path) -> None:
    """The old adapter or the new one loads. The next save succeeds and leaves no other files."""
    old, new = adapters
    first = tmp_path / "first"
    if layout != "nothing":
        old.save(first)
        (first / "notes.txt").write_text("mine")
    if layout == "1.0":
        old_layout(first)
    versions = set[str]()
    for n in range(1, 200):
        folder = tmp_path / str(n)
        if first.exists():
            shutil.copytree(first, folder)
        ended = killed_at(n, folder, lambda folder=folder: new.save(folder))
        assert ended in (0, KILLED)
        if (folder / METADATA).exists():
            assert new.is_in(folder) or old.is_in(folder), names(folder)
            versions.add("new" if new.is_in(folder) else "old")
        else:
            assert layout == "nothing"
            versions.add("nothing")
        if ended == 0:
            break
        old.save(folder)
        assert old.is_in(folder)
        assert_clean(folder, *(["notes.txt"] if first.exists() else []))
    assert ended == 0
    assert n > 20, "too few operations were seen"
    assert versions == {"new", "nothing" if layout == "nothing" else "old"}
    assert_clean(folder, *(["notes.txt"] if first.exists() else []))


def test_the_old_layout_loads(adapters: tuple[Saved, Saved], tmp_path: Path) -> None:
    adapters[0].save(tmp_path)
    old_layout(tmp_path)
    assert names(tmp_path) == [METADATA, TENSORS]
    again = peftc.load(tmp_path, zoo.build("llama"))
    assert all(torch.equal(p, adapters[0].tensors[k]) for k, p in peftc.parameters(again).items())


@pytest.mark.parametrize("file", ["adapter.json", "both", "tensors are new"])
def test_a_mixture_of_format_1_0_is_replaced(file: str, adapters: tuple[Saved, Saved], tmp_path: Path) -> None:
    """Format 1.0 moved the old files away, then the new ones in: a killed writer left a mixture."""
    old, new = adapters
    folder, fresh = tmp_path / "a", tmp_path / "b"
    old.save(folder)
    new.save(fresh)
    old_layout(folder)
    old_layout(fresh)
    output = folder / ".peftc-ab12cd_4" / "adapter"
    output.mkdir(parents=True)
    for name in (METADATA, TENSORS):
        shutil.copyfile(fresh / name, output / name)
    (folder / METADATA).rename(output / f"old-{METADATA}")
    if file != "adapter.json":
        (folder / TENSORS).rename(output / f"old-{TENSORS}")
    if file == "tensors are new":
        (output / TENSORS).rename(folder / TENSORS)
    new.save(folder)
    assert new.is_in(folder)
    assert_clean(folder)


def test_files_of_the_user_stay(adapters: tuple[Saved, Saved], tmp_path: Path) -> None:
    """A file with a name like ours is still the user's."""
    adapters[0].save(tmp_path)
    mine = {
        "adapter-0123456789abcdef.safetensors": b"not what the name says",
        TENSORS: b"mine",
        "adapter-mine.safetensors": b"mine",
        ".peftc-abcdefgh/thesis.tex": b"mine",
        ".peftc-notes": b"mine",
    }
    for name, content in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    outside = tmp_path.parent / "outside.safetensors"
    shutil.copyfile(next(p for p in tmp_path.glob("adapter-*") if p.stat().st_size > 100), outside)
    (tmp_path / "adapter-fedcba9876543210.safetensors").symlink_to(outside)
    adapters[1].save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine
    assert outside.exists()
    assert adapters[1].is_in(tmp_path)
    assert len(names(tmp_path)) == len(mine) + 3


def saver(folder: Path, adapter: Saved, times: int) -> Callable[[], None]:
    def act() -> None:
        for _ in range(times):
            adapter.save(folder)

    return act


@pytest.mark.parametrize("locks", [True, False], ids=["locked", "unlocked"])
def test_two_processes_save_into_one_folder(
    locks: bool, adapters: tuple[Saved, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees one of the two adapters, complete. Without file locks, files younger than an
    hour are not removed.
    """
    if not locks:
        monkeypatch.setattr(atomic, "_acquire", lambda *args: False)
    adapters[0].save(tmp_path)
    waiting = [fork(saver(tmp_path, adapter, 15)) for adapter in adapters]
    while waiting:
        target = read(tmp_path)[1]
        assert any(adapter.equals(target) for adapter in adapters)
        for process in list(waiting):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0
                waiting.remove(process)
    if locks:
        assert_clean(tmp_path)
    else:
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        adapters[0].save(tmp_path)
        assert_clean(tmp_path)


def test_waiting_for_a_stuck_writer_times_out(
    adapters: tuple[Saved, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters[0].save(tmp_path)
    monkeypatch.setattr(atomic, "PATIENCE", 0.1)
    with atomic.lock(tmp_path), pytest.raises(peftc.PeftcError, match=r"P526.*\n.*another process"):
        adapters[1].save(tmp_path)
    assert adapters[0].is_in(tmp_path)
    assert_clean(tmp_path)


# Errors of the file system
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_a_limit_on_the_size_of_files(exists: bool, adapters: tuple[Saved, Saved], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "a"
    if exists:
        adapters[0].save(folder)

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        adapters[1].save(folder)

    assert end_of(fork(act, "P526")) == REFUSED
    if exists:
        assert adapters[0].is_in(folder)
        assert_clean(folder)
    else:
        assert names(tmp_path) == []


def error_of(action: Callable[[], object]) -> peftc.PeftcError | None:
    try:
        action()
    except peftc.PeftcError as error:
        return error
    return None


OPERATIONS = ["os.replace", "os.fsync", "shutil.copyfile", "shutil.copymode", "tempfile.mkdtemp"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_full_disk_at_every_operation(
    operation: str, adapters: tuple[Saved, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error with a code. The old adapter remains; the new one if only its last flush failed."""
    module, _, name = operation.partition(".")
    real = getattr(sys.modules[module], name)
    adapters[0].save(tmp_path / "a")
    for n in range(1, 10):
        folder, count = tmp_path / str(n), 0
        shutil.copytree(tmp_path / "a", folder)

        def failing(*args: Any, n: int = n, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[module], name, failing)
            error = error_of(lambda folder=folder: adapters[1].save(folder))
        if error is None:
            assert adapters[1].is_in(folder)
            break
        assert error.diagnostics[0].code == "P526"
        assert "No space left" in error.diagnostics[0].notes[0]
        assert adapters[0].is_in(folder) or (operation == "os.fsync" and adapters[1].is_in(folder))
        adapters[0].save(folder)
        assert_clean(folder)
    assert n > 1
