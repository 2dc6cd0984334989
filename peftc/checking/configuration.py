"""The configuration of `peftc check`: `peftc.toml`, or `[tool.peftc]` in pyproject.toml.

It names no code to run: no option that trusts the code of a model, and no Python forms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peftc.checking.targets import Target
from peftc.checking.toml_places import place, span_of
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.filesystem.bounded_read import read_regular
from peftc.filesystem.open_texts import open_text
from peftc.models.names import split_task, with_task

FILE, PYPROJECT, TABLE = "peftc.toml", "pyproject.toml", ("tool", "peftc")
_MAX_BYTES = 1_000_000


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SpecTable(_Table):
    """What some specs are for.

    Attributes:
        paths: patterns as in .gitignore, relative to the folder of the configuration.
        models: their names; paths are relative to that folder.
        tasks: for which `per task` edits get parameters.
    """

    paths: list[str] = Field(min_length=1)
    models: list[str]
    tasks: list[str] | None = None


class Options(_Table):
    """All that a configuration may say.

    Attributes:
        models: for specs that no table of `specs` is about.
        tasks: as `models`.
        specs: what some specs are for. A spec is for all that the tables about it say.
        exclude: patterns of files that are left out of folders.
        include: further folders from which `use` may read.
        select: codes of warnings, or their beginnings; all without it.
        ignore: codes of warnings, or their beginnings.
        severity: whether warnings of a code are errors.
        strict: whether the exit code is 1 for warnings.
    """

    models: list[str] = []
    tasks: list[str] | None = None
    specs: list[SpecTable] = []
    exclude: list[str] = []
    include: list[str] = []
    select: list[str] | None = None
    ignore: list[str] = []
    severity: dict[str, Literal["error", "warning"]] = {}
    strict: bool = False


@dataclass(frozen=True)
class Configuration:
    """A configuration and its file."""

    options: Options
    source: Source
    table: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return Path(self.source.path).resolve().parent

    @property
    def include(self) -> list[str]:
        return [str(self.folder / name) for name in self.options.include]

    def excludes(self, path: str) -> bool:
        """Whether a file of a folder is left out."""
        return bool(self.options.exclude) and self._matches(self.options.exclude, path)

    def targets(self, path: str) -> list[Target]:
        """The models that a spec is for."""
        tables = [(n, table) for n, table in enumerate(self.options.specs) if self._matches(table.paths, path)]
        if not tables:
            return self._targets(self.options.models, self.options.tasks, ("models",))
        groups = (self._targets(table.models, table.tasks, ("specs", n, "models")) for n, table in tables)
        return list(dict.fromkeys(target for targets in groups for target in targets))

    def _targets(self, models: list[str], tasks: list[str] | None, key: tuple[str | int, ...]) -> list[Target]:
        names = None if tasks is None else tuple(tasks)
        spans = [place(self.source.text, (*self.table, *key), name) for name in models]
        return [Target(self._model(n), names, self.source, span) for n, span in zip(models, spans, strict=True)]

    def _model(self, name: str) -> str:
        """A path relative to the folder of the configuration, or a name as it is."""
        model, task = split_task(name)
        path = self.folder / os.path.expanduser(model)
        return with_task(os.path.relpath(path), task) if path.exists() else name

    def _matches(self, patterns: list[str], path: str) -> bool:
        from pathspec import GitIgnoreSpec  # 40 ms

        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self.folder):
            return False
        return GitIgnoreSpec.from_lines(patterns).match_file(real.relative_to(self.folder).as_posix())


def find_configuration(folder: Path) -> Configuration | None:
    """The one in `folder` or the nearest folder above. Raises: as `read_configuration`."""
    for candidate in (folder, *folder.parents):
        for name in (FILE, PYPROJECT):
            path = candidate / name
            if path.is_file() and (configuration := read_configuration(path, optional=name == PYPROJECT)):
                return configuration
    return None


def read_configuration(path: Path, optional: bool = False) -> Configuration | None:
    """Reads a file. Raises: PeftcError P130, P131, P132; None if `optional` and it has no table."""
    text = _text(path, optional)
    if text is None or (optional and "peftc" not in text):
        return None
    source = Source(_display(path), text)
    table = TABLE if path.name == PYPROJECT else ()
    values = _parse(source)
    for key in table:
        values = values.get(key)
        if not isinstance(values, dict):
            if optional:
                return None
            message = f"{source.path} has no table [{'.'.join(table)}]"
            raise PeftcError(Diagnostic("P132", message, source=source))
    errors = [*_validation_errors(cast(Mapping[str, Any], values), source, table)]
    if errors:
        raise PeftcError(errors)
    configuration = Configuration(Options.model_validate(values), source, table)
    if errors := [*_value_errors(configuration)]:
        raise PeftcError(errors)
    return configuration


def _text(path: Path, optional: bool) -> str | None:
    try:
        data = open_text(path)
        return (read_regular(path, _MAX_BYTES) if data is None else data).decode("utf-8")
    except (OSError, UnicodeDecodeError, PeftcError) as error:
        if optional:
            return None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PeftcError(Diagnostic("P132", f"cannot read {path}: {reason}", source=Source(str(path), ""))) from None


def _display(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


_DEEP_KEY = re.compile(r"(?:[\w\"'-]{1,100}[ \t]*\.[ \t]*){100}")


def _parse(source: Source) -> dict[str, Any]:
    import tomllib

    if deep := _DEEP_KEY.search(source.text):  # the parser's memory grows with the square of its parts
        raise _too_deep(source, deep.start())
    try:
        return tomllib.loads(source.text)
    except RecursionError:
        raise _too_deep(source, 0) from None
    except tomllib.TOMLDecodeError as error:
        message, _, where = str(error).partition(" (at ")
        start = len(source.text.rstrip())  # "at end of document"
        if numbers := re.match(r"line (\d+), column (\d+)", where):
            lines = source.text.split("\n")
            start = sum(len(line) + 1 for line in lines[: int(numbers[1]) - 1]) + int(numbers[2]) - 1
        span = span_of(source.text, start, start + 1)
        raise PeftcError(Diagnostic("P132", f"this is not TOML: {message}", span, source)) from None


def _too_deep(source: Source, start: int) -> PeftcError:
    span = span_of(source.text, start, start + 1)
    return PeftcError(Diagnostic("P132", "this is nested too deeply for a configuration", span, source))


def _validation_errors(values: Mapping[str, Any], source: Source, table: tuple[str, ...]) -> list[Diagnostic]:
    try:
        Options.model_validate(values)
    except ValidationError as error:
        return [_error(dict(one), source, table) for one in error.errors(include_url=False)]
    return []


def _error(one: Mapping[str, Any], source: Source, table: tuple[str, ...]) -> Diagnostic:
    keys: tuple[str | int, ...] = one["loc"]
    name, owner = str(keys[-1]), ".".join(map(str, keys[:-1]))
    if one["type"] == "extra_forbidden":
        known = list(SpecTable.model_fields if keys[0] == "specs" else Options.model_fields)
        help_ = did_you_mean(name, known) or f"the keys are {join_names(known)}"
        message = f"there is no key `{name}`" + (" in a table of `specs`" if owner else "")
        return Diagnostic("P130", message, place(source.text, (*table, *keys)), source, help=help_)
    span = place(source.text, (*table, *keys), one.get("input"))
    if one["type"] == "missing":
        return Diagnostic("P131", f"this table of `specs` lacks `{name}`", span, source)
    path = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, keys)))
    return Diagnostic("P131", f"`{path}`: {one['msg'][0].lower()}{one['msg'][1:]}", span, source)


def _value_errors(configuration: Configuration) -> list[Diagnostic]:
    """Errors in codes and patterns, which the types of the values do not show."""
    options, source = configuration.options, configuration.source
    errors: list[Diagnostic] = []
    for key, names in (("select", options.select or []), ("ignore", options.ignore)):
        for number, name in enumerate(names):
            if error := unknown_code(name):
                span = place(source.text, (*configuration.table, key, number), name)
                errors.append(Diagnostic("P131", f"`{key}`: {error}", span, source))
    for name, value in options.severity.items():
        error = unknown_code(name) or severity_error(name, value)
        if error:
            span = place(source.text, (*configuration.table, "severity", name))
            errors.append(Diagnostic("P131", f"`severity`: {error}", span, source))
    folders = (name for name in options.include if not (configuration.folder / name).is_dir())
    for name in folders:
        span = place(source.text, (*configuration.table, "include"), name)
        errors.append(Diagnostic("P131", f"`include`: there is no folder `{name}`", span, source))
    return errors


# Codes that are warnings, or may be.
WARNINGS = frozenset({"P114", "P127", "P128", "P129", "P204", "P215", "P217", "P220", "P320", "P325", "P326"})


def unknown_code(name: str) -> str | None:
    """What is wrong with a code or the beginning of one."""
    if name and any(code.startswith(name) for code in CODES):
        return None
    help_ = did_you_mean(name, CODES)
    return f"no code begins with `{name}`" + (f"; {help_}" if help_ else "")


def severity_error(code: str, value: str) -> str | None:
    """What is wrong with the severity of a code: an error stays one."""
    if value == "error" or any(one.startswith(code) for one in WARNINGS):
        return None
    return f"`{code}` is an error: a spec that has it compiles onto no model"
