"""A spec without methods, parameters and constants: what is left is `edit`, `train`, `expect` and shared `let`s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, listed
from peftc.semantics.check import check
from peftc.semantics.rename import renamed
from peftc.semantics.restrict import within
from peftc.semantics.scope import (
    Definition,
    Scope,
    Scopes,
    applied,
    collected,
    refuse_second,
    refuse_variable,
)
from peftc.semantics.substitute import Environment, in_body, in_expectation, substitute
from peftc.semantics.walk import expressions, is_shared
from peftc.syntax import ast
from peftc.syntax.print_expressions import expression
from peftc.syntax.printer import print_statement

MOST = 1_000  # statements of an expanded spec
_NODES = 20  # expressions that count as a statement
_OF_WHOLE = frozenset({"P114", "P117"})  # what could not be expanded may be what is missing
_OF_NAMES = frozenset({"P101", "P105", "P107"})
_OF_MODEL = frozenset({"P205", "P208", "P302"})  # a planner says them better: it knows which sites there are
_DEEPEST = 30  # methods within methods


def expand(spec: ast.Spec, settings: Mapping[str, ast.Expr] | None = None) -> ast.Spec:
    """What `spec` says, with every method applied and every constant in its place.

    A spec that applies nothing and has one method is that method, with its defaults. `settings` (`--set name=value`)
    override the parameters of that method, else the constants that the file binds by `let`. The names of edits made by
    `apply … as enc` begin with `enc.`. Statements from other files have that file as their `origin`.

    Raises:
        PeftcError: P1xx, everything that is wrong with names, arguments, forms and arithmetic; P0xx in files that are used.
    """
    done = partial(spec, settings or {})
    errors = [error for error in done.found if error.severity == "error" and error.code not in _OF_MODEL]
    if errors:
        raise PeftcError(errors)
    return done.spec


@dataclass(frozen=True)
class Partial:
    """As much of a spec as can be expanded, and everything found wrong with it and with the rest."""

    spec: ast.Spec
    found: list[Diagnostic]


def partial(spec: ast.Spec, settings: Environment) -> Partial:
    """As `expand`, without giving up where something is wrong; of what follows from another error, nothing is said."""
    expansion = _Expansion(settings)
    statements = expansion.spec(spec)
    expanded = replace(spec, statements=statements, header=(), header_trailing=None, closing=())
    found = check(expanded)
    if expansion.errors:
        found = [error for error in found if error.code not in _OF_WHOLE]
    broken = [f"`{name}`" for name in expansion.broken]
    found = [e for e in found if not (e.code in _OF_NAMES and any(name in e.message for name in broken))]
    return Partial(expanded, [*expansion.errors, *found])


def only_method(spec: ast.Spec, name: str) -> ast.Spec:
    """A file as if it applied its method `name`, with its defaults, and did nothing else."""
    kept = tuple(s for s in spec.statements if isinstance(s, ast.Use | ast.Method | ast.Let))
    return replace(spec, statements=(*kept, ast.Apply(name)))


class _Expansion:
    def __init__(self, settings: Environment) -> None:
        self._settings = settings
        self._scopes = Scopes()
        self.errors = self._scopes.errors
        self.broken = self._scopes.broken
        self._stack: list[str] = []
        self._shared: dict[int, ast.Let] = {}
        self._left = MOST

    def spec(self, spec: ast.Spec) -> tuple[ast.TopLevel, ...]:
        only = _only_method(spec)
        scope = self._scopes.of(spec, {} if only else self._settings)
        if only:
            self._unknown_settings([param.name for param in only.params], f"method `{only.name}`")
            found = self._method(scope.methods[only.name], self._settings, self._set_notes(only))
            rest = [s for s in spec.statements if isinstance(s, ast.Expect)]
        else:
            self._unknown_settings(list(scope.constants), "the file")
            found, rest = [], list(spec.statements)
            if not any(applied(spec.statements)):
                self._nothing(spec, scope)
        found = [*self._shared_of(scope), *found, *self._body(rest, scope, scope.constants, ())]
        foreign = [let for let in self._shared.values() if not any(let is known for known in found)]
        return tuple(_as_top_level([*foreign, *found]))

    def _unknown_settings(self, known: Sequence[str], owner: str) -> None:
        for name in self._settings:
            if name not in known:
                what = f"it has {listed(known)}" if known else "it has no parameters"
                help_ = did_you_mean(name, known) or what
                self.errors.append(Diagnostic("P110", f"--set {name}: {owner} has no parameter `{name}`", help=help_))

    def _set_notes(self, method: ast.Method) -> tuple[str, ...]:
        given = [
            f"{param.name}={expression(self._settings[param.name])}"
            for param in method.params
            if param.name in self._settings
        ]
        return (f"with `--set {' --set '.join(given)}`",) if given else ()

    def _nothing(self, spec: ast.Spec, scope: Scope) -> None:
        names = list(scope.methods)
        help_ = (
            f"add `apply {names[0]}()`"
            if names
            else "add an `edit`, e.g. `edit ffn at layer[*].ffn { h += adapter(x, r=64) }`"
        )
        message = (
            f"{spec.source.path} applies none of {listed(names)}" if names else f"{spec.source.path} changes nothing"
        )
        self.errors.append(Diagnostic("P119", message, source=spec.source, help=help_))

    def _shared_of(self, scope: Scope) -> list[ast.Let]:
        """The shared parameters of a file, each once, whichever of its methods are applied."""
        found: list[ast.Let] = []
        for let in scope.shared:
            if id(let) not in self._shared:
                with collected(self.errors, scope.spec):
                    value = substitute(let.value, scope.constants)
                    self._shared[id(let)] = replace(let, value=value, origin=scope.spec.source)
                    found.append(self._shared[id(let)])
        return found

    def _method(self, definition: Definition, given: Environment, via: tuple[str, ...]) -> list[ast.Statement]:
        method, scope = definition.method, definition.scope
        self._shared_of(scope)
        known = dict(scope.constants)
        with collected(self.errors, scope.spec):
            for param in method.params:
                known[param.name] = given[param.name] if param.name in given else substitute(param.default, known)
        self._stack.append(method.name)
        found = self._body(method.body, scope, known, via)
        self._stack.pop()
        return found

    def _body(
        self, body: Iterable[ast.Statement], scope: Scope, known: Environment, via: tuple[str, ...]
    ) -> list[ast.Statement]:
        found: list[ast.Statement] = []
        inner = dict(known)
        bound: dict[str, ast.Expr] = {}
        for statement in body:
            if self._left <= 0:
                break
            with collected(self.errors, scope.spec):
                if not isinstance(statement, ast.Let):
                    found += self._statement(statement, scope, inner, via)
                elif _is_top(statement, scope):
                    continue  # known to the scope of the file
                elif is_shared(statement.value):
                    found.append(self._said(replace(statement, value=substitute(statement.value, inner)), scope, via))
                else:
                    refuse_second(statement, bound)
                    self.broken.add(statement.name)
                    value = substitute(statement.value, inner)
                    refuse_variable(statement, value)
                    inner[statement.name] = bound[statement.name] = value
                    self.broken.discard(statement.name)
        return found

    def _statement(
        self, statement: ast.Statement, scope: Scope, known: Environment, via: tuple[str, ...]
    ) -> list[ast.Statement]:
        match statement:
            case ast.Edit():
                done: ast.Statement = replace(statement, body=in_body(statement.body, known))
            case ast.Train():
                done = statement
            case ast.Expect(left, _, right):
                compared = None if right is None else in_expectation(right, known)
                done = replace(statement, left=in_expectation(left, known), right=compared)
            case ast.Apply():
                return self._apply(statement, scope, known, via)
            case _:
                return []
        return [self._said(done, scope, via)]

    def _said(self, statement: ast.Statement, scope: Scope, via: tuple[str, ...]) -> ast.Statement:
        self._spend(statement)
        return replace(statement, origin=scope.spec.source, via=via)

    def _spend(self, statement: ast.Statement) -> None:
        """Methods can double what they apply, again and again: an expansion is given up when it becomes too large."""
        if self._left <= 0:
            return
        self._left -= 1 + _size(statement) // _NODES
        if self._left <= 0:
            raise PeftcError(Diagnostic("P120", f"the spec expands to more than {MOST} statements", statement.span))

    def _apply(self, apply: ast.Apply, scope: Scope, known: Environment, via: tuple[str, ...]) -> list[ast.Statement]:
        self._spend(apply)
        definition = self._called(apply, scope)
        given = self._arguments(apply, definition.method, known)
        note = f"from `{print_statement(replace(apply, leading=(), trailing=None))}`, line {apply.span.line} of {scope.spec.source.path}"
        found = self._method(definition, given, (note, *via) if apply.span.end else via)
        if apply.at is not None:
            found = [self._within(statement, apply.at) for statement in found]
        return renamed(found, apply.alias) if apply.alias else found

    def _called(self, apply: ast.Apply, scope: Scope) -> Definition:
        name = apply.name
        if name not in scope.methods:
            help_ = did_you_mean(name, scope.methods)
            if help_ is None:
                help_ = f"write `method {name}(…) {{ … }}`, or `use {name} from std`"
            raise PeftcError(Diagnostic("P109", f"there is no method `{name}` here", apply.span, help=help_))
        if len(self._stack) > _DEEPEST:
            raise PeftcError(Diagnostic("P120", f"more than {_DEEPEST} methods apply each other", apply.span))
        if name in self._stack:
            chain = " → ".join([*self._stack, name])
            raise PeftcError(Diagnostic("P113", f"the method `{name}` applies itself", apply.span, notes=(chain,)))
        return scope.methods[name]

    def _arguments(self, apply: ast.Apply, method: ast.Method, known: Environment) -> dict[str, ast.Expr]:
        params = [param.name for param in method.params]
        given: dict[str, ast.Expr] = {}
        errors: list[Diagnostic] = []
        for arg in apply.args:
            if arg.name not in params:
                help_ = did_you_mean(arg.name, params) or (f"it has {listed(params)}" if params else "it has none")
                errors.append(
                    Diagnostic("P102", f"`{method.name}` has no parameter `{arg.name}`", arg.span, help=help_)
                )
            elif arg.name in given:
                errors.append(Diagnostic("P104", f"`{arg.name}` is given twice", arg.span, help="remove one of them"))
            else:
                given[arg.name] = substitute(arg.value, known)
        if errors:
            raise PeftcError(errors)
        return given

    def _within(self, statement: ast.Statement, at: ast.Selector) -> ast.Statement:
        if not isinstance(statement, ast.Edit | ast.Train):
            return statement
        try:
            return replace(statement, selector=within(statement.selector, at))
        except PeftcError as error:
            self.errors += [
                replace(found, source=statement.origin, notes=(*found.notes, *statement.via))
                for found in error.diagnostics
            ]
            return statement


def _size(statement: ast.Statement) -> int:
    match statement:
        case ast.Edit(body=body):
            return sum(1 for line in body for _ in expressions(line.value))
        case ast.Apply(args=args):
            return sum(1 for arg in args for _ in expressions(arg.value))
        case _:
            return 0


def _only_method(spec: ast.Spec) -> ast.Method | None:
    """The method of a file that has one and applies nothing."""
    methods = [statement for statement in spec.statements if isinstance(statement, ast.Method)]
    return methods[0] if len(methods) == 1 and not any(applied(spec.statements)) else None


def _is_top(let: ast.Let, scope: Scope) -> bool:
    return any(let is statement for statement in scope.spec.statements)


def _as_top_level(statements: Iterable[ast.Statement]) -> Iterable[ast.TopLevel]:
    return (s for s in statements if isinstance(s, ast.Let | ast.Edit | ast.Train | ast.Expect))
