"""What the names of a file mean: its methods, those it uses, its constants and what it shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.filesystem import resources
from peftc.semantics.checks.definitions import check_definitions
from peftc.semantics.load import Folders, folder_of, path_of, read_used
from peftc.semantics.substitute import Environment, is_constant, substitute
from peftc.semantics.walk import is_shared
from peftc.syntax import ast

_DEEPEST = 50  # files within files


@dataclass
class Definition:
    """A method and the file it is written in."""

    method: ast.Method
    scope: Scope


@dataclass
class Scope:
    spec: ast.Spec
    methods: dict[str, Definition] = field(default_factory=dict[str, Definition])
    constants: dict[str, ast.Expr] = field(default_factory=dict[str, ast.Expr])
    shared: dict[str, list[ast.Let]] = field(default_factory=dict[str, list[ast.Let]])  # several where one is too many
    own: set[int] = field(default_factory=set[int])  # ids of its statements


class Scopes:
    """Reads files and what they use; everything that is wrong is collected in `errors`."""

    def __init__(self, folders: Folders) -> None:
        self.errors: list[Diagnostic] = []
        self._folders = folders
        self.broken: set[str] = set()  # names whose `let` is wrong: nothing can be said about their uses
        self._read: dict[Path, Scope | None] = {}
        self._open: list[Path] = []

    def of(self, spec: ast.Spec, settings: Environment) -> Scope:
        """The scope of `spec`; constants that `settings` names have the value given there."""
        scope = Scope(spec)
        self.errors += [found for found in check_definitions(spec) if found.severity == "error"]
        with collected(self.errors, spec):
            self._fill(scope, settings)
        return scope

    def _fill(self, scope: Scope, settings: Environment) -> None:
        for statement in scope.spec.statements:
            scope.own.add(id(statement))
            match statement:
                case ast.Use():
                    self._use(statement, scope)
                case ast.Method():
                    self._define(statement.name, Definition(statement, scope), statement, scope)
                case ast.Let() if is_shared(statement.value):
                    scope.shared.setdefault(statement.name, []).append(statement)
                case ast.Let():
                    self._constant(statement, scope, settings)
                case _:
                    pass

    def _constant(self, let: ast.Let, scope: Scope, settings: Environment) -> None:
        self.broken.add(let.name)
        with collected(self.errors, scope.spec):
            value = settings.get(let.name) or substitute(let.value, scope.constants)
            refuse_second(let, scope.constants)
            refuse_variable(let, value)
            scope.constants[let.name] = value
            self.broken.discard(let.name)

    def _define(self, name: str, definition: Definition, at: ast.Statement, scope: Scope) -> None:
        if name in scope.methods:
            self.errors.append(Diagnostic("P111", f"there are two methods called `{name}`", at.span, scope.spec.source))
        scope.methods[name] = definition

    def _use(self, use: ast.Use, scope: Scope) -> None:
        with collected(self.errors, scope.spec):
            used = self._file(use, scope.spec)
            if used is None:
                return
            if use.name not in used.methods:
                known = list(used.methods)
                message = f"{path_of(used.spec).name} has no method `{use.name}`"
                help_ = did_you_mean(use.name, known) or f"it has {join_names(known)}"
                raise PeftcError(Diagnostic("P109", message, use.span, help=help_))
            self._define(use.name, used.methods[use.name], use, scope)

    def _file(self, use: ast.Use, spec: ast.Spec) -> Scope | None:
        """The scope of the file that is used; None where it has errors (which are reported once)."""
        path = standard(use) if use.source is None else self._found(use.source, use, spec)
        if path in self._open or path == path_of(spec):
            chain = " → ".join(found.name for found in (*self._open, path))
            raise PeftcError(Diagnostic("P113", f"{path.name} uses itself", use.span, notes=(f"by way of {chain}",)))
        if len(self._open) >= _DEEPEST:
            raise PeftcError(Diagnostic("P126", f"more than {_DEEPEST} files use each other", use.span))
        if path not in self._read:
            self._read[path] = None
            self._open.append(path)
            try:
                self._read[path] = self.of(read_used(path), {})
            except PeftcError as error:
                self.errors += at_use(error, use, spec).diagnostics
            finally:
                self._open.pop()
        return self._read[path]

    def _found(self, source: str, use: ast.Use, spec: ast.Spec) -> Path:
        try:
            return self._folders.find(source, folder_of(spec))
        except PeftcError as error:
            raise at_use(error, use, spec) from None


def at_use(error: PeftcError, use: ast.Use, spec: ast.Spec) -> PeftcError:
    """What is about no text yet is said of the `use` that names it."""
    return PeftcError(
        found if found.source else replace(found, span=use.span, source=spec.source) for found in error.diagnostics
    )


class collected:
    """`with collected(errors, spec):` an error inside ends the block and is kept, said of `spec`."""

    def __init__(self, errors: list[Diagnostic], spec: ast.Spec) -> None:
        self._errors, self._spec = errors, spec

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, PeftcError):
            return False
        self._errors += [found.with_source(self._spec.source) for found in error.diagnostics]
        return True


def refuse_second(let: ast.Let, known: Environment) -> None:
    """Raises: PeftcError P111 where the name is bound already."""
    if let.name in known:
        raise PeftcError(
            Diagnostic("P111", f"`{let.name}` is bound twice", let.span, help="give one of them another name")
        )


def refuse_variable(let: ast.Let, value: ast.Expr) -> None:
    """Raises: PeftcError P115 where a `let` outside an edit binds no constant."""
    if not is_constant(value):
        message = f"outside of an edit, `let {let.name}` binds a constant or something shared"
        help_ = f"move it into the edit, or write `let {let.name} = shared(…)` for one set of parameters at all sites"
        raise PeftcError(Diagnostic("P115", message, let.value.span, help=help_))


def standard(use: ast.Use) -> Path:
    """The file of a standard recipe. Raises: PeftcError P109."""
    known = resources.recipes()
    if use.name in known:
        return known[use.name]
    help_ = did_you_mean(use.name, known) or f"there are {join_names(known)}"
    raise PeftcError(Diagnostic("P109", f"there is no standard recipe `{use.name}`", use.span, help=help_))


def applied(statements: tuple[ast.Statement, ...]) -> Iterator[ast.Statement]:
    """The statements of a file that change a model."""
    return (s for s in statements if isinstance(s, ast.Edit | ast.Train | ast.Apply))
