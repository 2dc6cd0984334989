"""The sides of a comparison: spec files, git revisions, saved adapters and files of plans."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from peftc.comparison.plan_file import PlanFile, read_plan_file
from peftc.comparison.record import PlanRecord
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.filesystem.bounded_read import check_path
from peftc.semantics.expand import expand
from peftc.semantics.files import read_text
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

GIT = "git:"
Parse = Callable[[str], ast.Spec]


class Side(NamedTuple):
    """One side.

    Attributes:
        label: what it was named.
        spec: expanded.
        plans: what it does to some models, if that is known.
        tasks: of edits `per task`.
    """

    label: str
    spec: ast.Spec
    plans: tuple[PlanRecord, ...] = ()
    tasks: tuple[str, ...] = ()


def open_side(name: str, include: Sequence[str] = (), parse: Parse | None = None) -> Side:
    """A spec file, a `git:REV:PATH`, the folder of an adapter or a JSON file of plans.

    Args: `include`: folders from which `use` may read. `parse`: reads a spec file.
    Raises: P0xx–P1xx (a spec), P52x (an adapter), P851 (no file of plans), P852 (no revision).
    """
    if name.startswith(GIT):
        return Side(name, _of_revision(name, include))
    path = Path(name)
    if name.endswith(".json"):
        return of_plan_file(name, read_plan_file(path))
    if path.is_dir():
        adapter = import_module("peftc.adapters.files").read_description(path)
        return Side(name, parse_text(adapter.source, f"{name}/adapter.json"), tasks=adapter.tasks)
    return Side(name, expand((parse or _read)(name), include=include))


def is_adapter(name: str) -> bool:
    """Whether a name is of the folder of an adapter."""
    return not name.startswith(GIT) and (Path(name) / "adapter.json").is_file()


def is_folder_of_specs(name: str) -> bool:
    """Whether a name is of a folder, and not of an adapter."""
    return not name.startswith(GIT) and Path(name).is_dir() and not is_adapter(name)


def revision_of(name: str) -> str | None:
    """The revision of `git:REVISION`; None for other names, such as `git:REVISION:PATH`."""
    return name.removeprefix(GIT) if name.startswith(GIT) and name.count(":") == 1 else None


def of_plan_file(name: str, file: PlanFile) -> Side:
    return Side(name, file.parsed(), file.plans, file.tasks)


def _read(name: str) -> ast.Spec:
    return parse_text(read_text(name), name)


def _of_revision(name: str, include: Sequence[str]) -> ast.Spec:
    """The expanded spec of `git:REV:PATH`, with the files that it uses in that revision."""
    revision, separator, path = name.removeprefix(GIT).partition(":")
    check_path(path)
    if not (revision and separator and path) or Path(path).is_absolute() or ".." in Path(path).parts:
        message = f"`{name}` is no file of a revision"
        raise PeftcError(Diagnostic("P852", message, help="write `git:REVISION:PATH`, with the path from the root"))
    with specs_of(revision) as folder:
        file = folder / path
        if not file.is_file():
            message = f"there is no spec `{path}` in revision `{revision}`"
            raise PeftcError(Diagnostic("P852", message, help="a path begins at the root of the repository"))
        return expand_below(folder, f"{GIT}{revision}:", path, include)


def expand_below(folder: Path, label: str, path: str, include: Sequence[str] = ()) -> ast.Spec:
    """The expanded spec of a file below a folder, which messages call `label`."""
    file = folder / path
    try:
        return expand(parse_text(read_text(str(file)), str(file)), include=include)
    except PeftcError as error:  # say the names that the user knows
        raise PeftcError(_renamed(one, f"{folder}/", label) for one in error.diagnostics) from error.__cause__


def _renamed(diagnostic: Diagnostic, prefix: str, label: str) -> Diagnostic:
    def renamed(source: Source) -> Source:
        return replace(source, path=source.path.replace(prefix, label))

    return replace(
        diagnostic,
        message=diagnostic.message.replace(prefix, label),
        notes=tuple(note.replace(prefix, label) for note in diagnostic.notes),
        source=diagnostic.source and renamed(diagnostic.source),
        related=tuple(replace(place, source=renamed(place.source)) for place in diagnostic.related),
    )


@contextmanager
def specs_of(revision: str) -> Generator[Path]:
    """A folder with all specs of a revision. Raises: P852."""
    root = str(repository())
    commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    archive = _git("-C", root, "archive", "--format=tar", commit, "--", ":(top,glob)**/*.peft")
    with TemporaryDirectory() as folder:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
                opened.extractall(folder, filter="data")
        except tarfile.TarError as error:
            message = f"the specs of revision `{revision}` cannot be read"
            raise PeftcError(Diagnostic("P852", message, notes=(str(error),))) from error
        yield Path(folder)


def repository() -> Path:
    """The root of the repository that the command runs in. Raises: P852."""
    return Path(_git("rev-parse", "--show-toplevel").decode().strip())


def _git(*arguments: str) -> bytes:
    """The output of git. Raises: P852."""
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        raise PeftcError(Diagnostic("P852", "git is not installed", help="install it, or name two files")) from None
    if result.returncode:
        note = result.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise PeftcError(Diagnostic("P852", "git cannot read the revision", notes=(note,)))
    return result.stdout
