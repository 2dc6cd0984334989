"""Reads spec files, and the scope of a file: its methods, the imported ones, its constants and its
shared parameters.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names, nearest
from peftc.equations.table import forms_of
from peftc.filesystem import resources
from peftc.filesystem.bounded_read import check_path, printable_path, read_regular
from peftc.filesystem.open_texts import exists, open_text
from peftc.forms.form import Form
from peftc.semantics.checks.definitions import bound_twice, check_definitions
from peftc.semantics.site_groups import bind_group
from peftc.semantics.substitute import Environment, is_constant, substitute
from peftc.syntax import ast
from peftc.syntax.lexer import begins_as_spec
from peftc.syntax.parser import parse_text
from peftc.syntax.walk import is_shared, names_in

MAX_BYTES = 1_000_000  # of a spec

Include = Iterable[str | PathLike[str]] | None
_MAX_DEPTH = 50  # of files that use files


def read_text(path: str | Path) -> str:
    """The text of a spec file. Raises: PeftcError P024, P026, P027, OSError."""
    return decode(read_regular(path, MAX_BYTES), str(path))


def decode(data: bytes, path: str) -> str:
    """The bytes of a spec as text. Raises: PeftcError P024, P027."""
    if len(data) > MAX_BYTES:
        raise PeftcError(Diagnostic("P027", f"{path} is larger than {MAX_BYTES:,} bytes"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        valid = data[: error.start].decode("utf-8")
        line, column = valid.count("\n") + 1, len(valid) - valid.rfind("\n")
        at = Span(len(valid), len(valid) + 1, line, column, line, column + 1)
        source = Source(path, data.decode("utf-8", errors="replace"))
        message = f"byte {error.start}, 0x{data[error.start]:02x}, is not UTF-8"
        raise PeftcError(Diagnostic("P024", message, at, source, help="save the file as UTF-8")) from None


def read_spec(path: str | PathLike[str]) -> ast.Spec:
    """Parses a spec file. Raises: PeftcError P024, P026, P027, P0xx, P112 (it cannot be read)."""
    try:
        text = read_text(Path(path))
    except OSError as error:
        raise _unreadable(Path(path), error) from None
    return parse_text(text, os.fspath(path))


def read_used_spec(path: Path) -> ast.Spec:
    """Parses a used file; no message shows the content of another. Raises: as `read_spec`; P125."""
    try:
        data = open_text(path)
        data = read_regular(path, MAX_BYTES) if data is None else data
    except OSError as error:
        raise _unreadable(path, error) from None
    if not begins_as_spec(data.decode("utf-8", errors="replace")):
        help_ = "a spec begins with `peft 2`; the content of other files is not shown"
        raise PeftcError(Diagnostic("P125", f"{printable_path(path)} is not a spec", help=help_))
    return parse_text(decode(data, str(path)), str(path))


def _unreadable(path: Path, error: OSError) -> PeftcError:
    names = [file.name for file in path.parent.glob("*.peft")] if os.path.isdir(path.parent) else []
    message = f"cannot read {printable_path(path)}: {error.strerror or error}"
    stem = nearest(path.stem, [name.removesuffix(".peft") for name in names])
    help_ = did_you_mean(path.name, [f"{stem}.peft"], "unsafe") if stem is not None else None
    help_ = help_ or "a path is relative to the folder of the spec"
    if path.suffix == ".py":
        help_ = "`use` reads specs, not Python"
    return PeftcError(Diagnostic("P112", message, help=help_))


@dataclass(frozen=True)
class Folders:
    """The folders in which `use` may read: that of the spec, if any, and those of the user."""

    own: Path | None
    include: tuple[Path, ...] = ()

    def find(self, file: str, folder: Path) -> Path:
        """The real path of `file`, named in a spec in `folder`. Raises: PeftcError P123, P026."""
        check_path(file)
        roots = (*([] if self.own is None else [self.own]), *self.include)
        candidates = [Path(os.path.realpath(base / file)) for base in (folder, *self.include)]
        allowed = [path for path in candidates if any(path.is_relative_to(root) for root in roots)]
        if allowed:
            return next((path for path in allowed if exists(path)), allowed[0])
        message = f"`{printable_path(file)}` is outside the allowed folders"
        note = f"files are read within {join_names(map(str, roots))}" if roots else "this spec may not use files"
        help_ = None if self.own is None else "add the folder: `--include DIR`, in Python `include=[…]`"
        raise PeftcError(Diagnostic("P123", message, notes=(note,), help=help_))


def folders_of(spec: ast.Spec, include: Include) -> Folders:
    """The folder of a spec, and `include`; none if that is None. Raises: PeftcError P124."""
    if include is None:
        return Folders(None)
    names = [include] if isinstance(include, str | PathLike) else list(include)
    for name in names:
        if not os.path.isdir(name):
            message = f"`{printable_path(name)}` is not a folder"
            raise PeftcError(Diagnostic("P124", message, help="`--include` names a folder"))
    return Folders(path_of(spec).parent, tuple(Path(os.path.realpath(name)) for name in names))


def path_of(spec: ast.Spec) -> Path:
    """The file of a spec, with symbolic links resolved."""
    return Path(os.path.realpath(spec.source.path.replace("\0", "")))


@dataclass
class Definition:
    """A method and the scope of its file."""

    method: ast.Method
    scope: Scope


@dataclass
class Scope:
    """`shared` has several statements for a name that is bound twice (an error)."""

    spec: ast.Spec
    methods: dict[str, Definition] = field(default_factory=dict[str, Definition])
    forms: dict[str, ast.Form] = field(default_factory=dict[str, ast.Form])
    constants: dict[str, ast.Expr] = field(default_factory=dict[str, ast.Expr])
    shared: dict[str, list[ast.Let]] = field(default_factory=dict[str, list[ast.Let]])
    groups: dict[str, ast.Selector] = field(default_factory=dict[str, ast.Selector])
    lets: dict[str, ast.Let] = field(default_factory=dict[str, ast.Let])  # of the constants of the file

    def callable_forms(self) -> Mapping[str, Form]:
        """The forms that a statement of the file can call, by name."""
        return forms_of(replace(self.spec, statements=tuple(self.forms.values())))


class ScopeReader:
    """Reads the scopes of files and of the files that they use, and collects their errors."""

    def __init__(self, folders: Folders) -> None:
        self.errors: list[Diagnostic] = []
        self.invalid: set[str] = set()  # names whose `let` or `use` has an error: their uses are not reported
        self.moves: dict[str, list[ast.Moved]] = {}  # of the files that are read, by path
        self._folders = folders
        self._scopes: dict[Path, Scope | None] = {}
        self._reading: list[Path] = []

    def read(self, spec: ast.Spec, settings: Environment) -> Scope:
        """The scope of `spec`; `settings` override its constants."""
        lets = {s.name: s for s in spec.statements if isinstance(s, ast.Let) and not is_shared(s.value)}
        scope = Scope(spec, lets=lets)
        self.errors += [error for error in check_definitions(spec) if error.severity == "error"]
        for statement in spec.statements:
            match statement:
                case ast.Use():
                    self._use(statement, scope)
                case ast.Form():
                    self._add_form(replace(statement, origin=spec.source), statement, scope)
                case ast.Moved():
                    moved = replace(statement, origin=spec.source)
                    self.moves.setdefault(spec.source.path, []).append(moved)
                case ast.Method():
                    self._define(statement.name, Definition(statement, scope), statement, scope)
                case ast.Let() if is_shared(statement.value):
                    scope.shared.setdefault(statement.name, []).append(statement)
                case ast.Let():
                    self._constant(statement, scope, settings)
                case ast.SiteGroup():
                    with collect_errors(self.errors, spec):
                        bind_group(statement, scope.groups, (*scope.lets, *scope.shared))
                case _:
                    pass
        return scope

    def _constant(self, let: ast.Let, scope: Scope, settings: Environment) -> None:
        self.invalid.add(let.name)
        with collect_errors(self.errors, scope.spec):
            check_order(let, scope)
            value = settings.get(let.name) or substitute(let.value, scope.constants)
            if let.name in scope.constants:
                raise PeftcError(bound_twice(let))
            check_constant(let, value)
            scope.constants[let.name] = value
            self.invalid.discard(let.name)

    def _define(self, name: str, definition: Definition, at: ast.Statement, scope: Scope) -> None:
        if name in scope.methods:
            self.errors.append(Diagnostic("P111", f"there are two methods named `{name}`", at.span, scope.spec.source))
        scope.methods[name] = definition

    def _add_form(self, form: ast.Form, at: ast.Statement, scope: Scope) -> None:
        """Makes a form known in a file; its errors are those of the file that defines it."""
        if form.name in scope.forms and scope.forms[form.name].origin is not form.origin:
            message = f"there are two forms named `{form.name}`"
            self.errors.append(Diagnostic("P111", message, at.span, scope.spec.source))
        scope.forms[form.name] = form

    def _use(self, use: ast.Use, scope: Scope) -> None:
        self.invalid.add(use.name)
        with collect_errors(self.errors, scope.spec):
            imported = self._file(use, scope.spec)
            if imported is None:
                return
            if use.name in imported.forms and use.source is not None:
                self._add_form(imported.forms[use.name], use, scope)
                self.invalid.discard(use.name)
                return
            if use.name not in imported.methods:
                known = [*imported.methods, *imported.forms]
                message = f"{path_of(imported.spec).name} has no method and no form `{use.name}`"
                help_ = did_you_mean(use.name, known) or f"it has {join_names(known)}"
                raise PeftcError(Diagnostic("P109", message, use.name_span, help=help_))
            self._define(use.name, imported.methods[use.name], use, scope)
            self.invalid.discard(use.name)

    def _file(self, use: ast.Use, spec: ast.Spec) -> Scope | None:
        """The scope of the used file; None if it has errors, which are reported once."""
        path = self._path(use, spec)
        if path in self._reading or path == path_of(spec):
            cycle = " → ".join(file.name for file in (*self._reading, path))
            raise PeftcError(
                Diagnostic("P113", f"{path.name} uses itself", use.source_span, notes=(f"by way of {cycle}",))
            )
        if len(self._reading) >= _MAX_DEPTH:
            raise PeftcError(Diagnostic("P126", f"more than {_MAX_DEPTH} files use each other", use.span))
        if path not in self._scopes:
            self._scopes[path] = None
            self._reading.append(path)
            try:
                self._scopes[path] = self.read(read_used_spec(path), {})
            except PeftcError as error:
                self.errors += _error_at_use(error, use, spec).diagnostics
            finally:
                self._reading.pop()
        return self._scopes[path]

    def _path(self, use: ast.Use, spec: ast.Spec) -> Path:
        if use.source is not None:
            try:
                return self._folders.find(use.source, path_of(spec).parent)
            except PeftcError as error:
                raise _error_at_use(error, use, spec) from None
        known = resources.recipes()
        if use.name in known:
            return known[use.name]
        help_ = did_you_mean(use.name, known) or f"there are {join_names(known)}"
        raise PeftcError(Diagnostic("P109", f"there is no standard recipe `{use.name}`", use.name_span, help=help_))


def _error_at_use(error: PeftcError, use: ast.Use, spec: ast.Spec) -> PeftcError:
    """Diagnostics without a source point to the file that the `use` names."""
    recipe = f"the recipe that comes with peftc is `use {use.name} from std`"
    if use.name in resources.recipes():
        error = PeftcError(
            replace(record, notes=(*record.notes, recipe)) if record.code == "P112" else record
            for record in error.diagnostics
        )
    return PeftcError(
        record if record.source else replace(record, span=use.source_span, source=spec.source)
        for record in error.diagnostics
    )


@contextmanager
def collect_errors(errors: list[Diagnostic], spec: ast.Spec) -> Generator[None]:
    """Suppresses a `PeftcError` and adds its diagnostics to `errors`, with `spec` as source."""
    try:
        yield
    except PeftcError as error:
        errors += [diagnostic.with_source(spec.source) for diagnostic in error.diagnostics]


def check_order(let: ast.Let, scope: Scope) -> None:
    """Raises: PeftcError P113: a constant needs itself; P107: it needs one that is bound below."""
    for name in names_in(let.value):
        other = scope.lets.get(name)
        if other is None or name in scope.constants:
            continue
        if other is let or let.name in names_in(other.value):
            names = let.name if other is let else f"{let.name}` and `{name}"
            verb = "is defined by itself" if other is let else "are defined by each other"
            raise PeftcError(
                Diagnostic("P113", f"`{names}` {verb}", let.value.span, help="bind one of them to a value")
            )
        message = f"`{name}` is bound below, in line {other.span.line}"
        raise PeftcError(Diagnostic("P107", message, let.value.span, help="move it above this line"))


def check_constant(let: ast.Let, value: ast.Expr) -> None:
    """Raises: PeftcError P115 if `value` is not constant."""
    if not is_constant(value):
        message = f"outside an edit, `let {let.name}` binds a constant or shared parameters"
        help_ = f"move it into the edit, or write `let {let.name} = shared(…)` for one set of parameters at all sites"
        raise PeftcError(Diagnostic("P115", message, let.value.span, help=help_))
