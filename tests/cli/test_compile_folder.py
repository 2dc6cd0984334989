"""The output folder of `peftc compile`: which folders and files it writes to, and killed runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import peftc
from peftc.filesystem.atomic import MARKER, write_folder
from tests.cli.compile_folder import NEW, OLD, code_of, contents, texts
from tests.processes import KILLED, killed_at


@pytest.mark.parametrize("there", ["nothing", "empty", "a leftover"])
def test_a_folder_that_is_new_or_empty(there: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    if there != "nothing":
        folder.mkdir(parents=True)
    if there == "a leftover":
        (folder / ".peftc-abcd_123").mkdir()
        (folder / ".peftc-abcd_123" / "forward_x.py").write_text("half")
    write_folder(folder, OLD)
    assert texts(folder) == OLD


def user_folder(folder: Path) -> None:
    """A folder without our marker; its files have names like ours."""
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "spec.peft").write_text("mine")
    (folder / "forward_x.py").mkdir()
    (folder / "forward_x.py" / "thesis.tex").write_text("mine")


def one_file(folder: Path) -> None:
    folder.write_text("mine")


def foreign_marker(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        user_folder(folder)
        (folder / MARKER).write_text(text)

    return make


def linked_marker(folder: Path) -> None:
    user_folder(folder)
    write_folder(folder.parent / "other", OLD)
    (folder / MARKER).symlink_to(folder.parent / "other" / MARKER)


def marker_that_reaches_out(folder: Path) -> None:
    outside = folder.parent / "outside.txt"
    outside.write_text("mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    foreign_marker(json.dumps({"format_version": "1.0", "peftc": "0", "files": {"../outside.txt": digest}}))(folder)


def hidden_file(folder: Path) -> None:
    folder.mkdir()
    (folder / ".peftc-notes").write_text("mine")


REFUSED_FOLDERS = {
    "a user's": user_folder,
    "a file": one_file,
    "a marker that is no JSON": foreign_marker("mine"),
    "a marker of something else": foreign_marker('{"files": 3}'),
    "a marker with another key": foreign_marker('{"peftc": "0", "files": {}, "owner": "me"}'),
    "a marker of a newer format": foreign_marker('{"format_version": "2.0", "peftc": "9", "files": {}}'),
    "a marker that is a link": linked_marker,
    "a marker that reaches out": marker_that_reaches_out,
    "a hidden file": hidden_file,
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", REFUSED_FOLDERS)
def test_any_other_folder_is_refused(case: str, force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    REFUSED_FOLDERS[case](folder)
    before = contents(tmp_path)
    assert code_of(lambda: write_folder(folder, NEW, force)) == "P420"
    assert contents(tmp_path) == before


def test_a_folder_of_ours_is_written_again(tmp_path: Path) -> None:
    write_folder(tmp_path, OLD)
    (tmp_path / "notes.txt").write_text("mine")
    done = write_folder(tmp_path, NEW)
    assert (done.removed, done.modified) == (("forward_old.py",), ())
    assert texts(tmp_path) == NEW | {"notes.txt": "mine"}
    write_folder(tmp_path, NEW)
    assert texts(tmp_path) == NEW | {"notes.txt": "mine"}


def edited(path: Path) -> None:
    path.write_text("mine")


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("change", [edited, linked])
def test_a_changed_file_is_overwritten_only_with_force(change: Callable[[Path], None], tmp_path: Path) -> None:
    """A symbolic link is replaced; its target is not written to."""
    folder = tmp_path / "out"
    write_folder(folder, OLD)
    change(folder / "spec.peft")
    before = contents(tmp_path)
    assert code_of(lambda: write_folder(folder, NEW)) == "P550"
    assert contents(tmp_path) == before
    write_folder(folder, NEW, force=True)
    assert texts(folder) == NEW
    if change is linked:
        assert (tmp_path / "elsewhere").read_text() == OLD["spec.peft"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("change", [edited, linked])
def test_a_changed_file_of_an_earlier_run_stays(change: Callable[[Path], None], force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_folder(folder, OLD)
    change(folder / "forward_old.py")
    done = write_folder(folder, NEW, force)
    assert (done.removed, done.modified) == ((), ("forward_old.py",))
    assert (folder / "forward_old.py").exists()
    write_folder(folder, NEW)  # from now on the file belongs to the user
    assert (folder / "forward_old.py").exists()
    assert code_of(lambda: write_folder(folder, OLD, force=True)) in ("P551",)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_in_the_way_is_never_touched(kind: str, force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_folder(folder, OLD)
    (tmp_path / "elsewhere").write_text("mine")
    if kind == "file":
        (folder / "forward_new.py").write_text("mine")
    elif kind == "folder":
        (folder / "forward_new.py").mkdir()
    else:
        (folder / "forward_new.py").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    assert code_of(lambda: write_folder(folder, NEW, force)) == "P551"
    assert contents(tmp_path) == before


def test_a_deleted_file_comes_back(tmp_path: Path) -> None:
    write_folder(tmp_path, OLD)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "forward_old.py").unlink()
    write_folder(tmp_path, NEW)
    assert texts(tmp_path) == NEW


@pytest.mark.parametrize("there", [True, False])
def test_killed_at_every_boundary(there: bool, tmp_path: Path) -> None:
    """Each file is old, new or missing. The next run completes the folder, and the user's file
    stays.
    """
    first = tmp_path / "first"
    if there:
        write_folder(first, OLD)
        (first / "notes.txt").write_text("mine")
    mine = {"notes.txt": "mine"} if there else {}
    for n in range(1, 200):
        folder = tmp_path / str(n)
        if there:
            shutil.copytree(first, folder)
        ended = killed_at(n, folder, lambda folder=folder: write_folder(folder, NEW))
        assert ended in (0, KILLED)
        for name, text in (texts(folder) if folder.exists() else {}).items():
            if not name.startswith(".peftc-"):
                assert text in (NEW.get(name), OLD.get(name) if there else None, mine.get(name))
        if ended == 0:
            break
        write_folder(folder, OLD if n % 2 else NEW)
        assert texts(folder) == (OLD if n % 2 else NEW) | mine
        assert "pending" not in json.loads((folder / MARKER).read_text())
    assert ended == 0
    assert n > 20
    assert texts(folder) == NEW | mine


@pytest.mark.parametrize("operation", ["replace", "fsync", "unlink"])
def test_an_error_leaves_a_folder_that_the_next_run_accepts(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, operation)
    for n in range(1, 20):
        folder, count = tmp_path / str(n), 0
        write_folder(folder, OLD)

        def failing(*args: object, n: int = n, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == n:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, failing)
            try:
                write_folder(folder, NEW)
            except peftc.PeftcError as error:
                codes = [d.code for d in error.diagnostics]
            else:
                break
        assert codes == ["P420"]
        assert not list(folder.glob(".peftc-*"))
        write_folder(folder, NEW)
        assert texts(folder) == NEW
    assert n > 1
