"""A spec without methods, parameters and constants: what is left is `edit`, `train`, `expect` and shared `let`s."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.semantics.checks.spec import check
from peftc.semantics.load import Folders, Include, folders_of
from peftc.semantics.rename import prefix_names
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
from peftc.semantics.substitute import Environment, in_body, in_expectation, overlay, substitute
from peftc.semantics.walk import is_shared, names_in, names_of, walk
from peftc.syntax import ast
from peftc.syntax.error_context import excerpt
from peftc.syntax.print_expressions import print_expression
from peftc.syntax.printer import print_statement

MOST = 1_000  # statements of an expanded spec
_NODES = 20  # expressions that count as a statement
_OF_WHOLE = frozenset({"P114", "P117"})  # what could not be expanded may be what is missing
_OF_NAMES = frozenset({"P101", "P105", "P107"})
_OF_MODEL = frozenset({"P205", "P208", "P302"})  # a planner says them better: it knows which sites there are
_DEEPEST = 30  # methods within methods
_LONGEST = 200  # characters of a statement in a note
_QUOTED = re.compile("`([^`]*)`")


def expand(spec: ast.Spec, settings: Mapping[str, ast.Expr] | None = None, include: Include = ()) -> ast.Spec:
    """What `spec` says, with every method applied and every constant in its place.

    A spec that applies nothing and has one method is that method, with its defaults. `settings` (`--set name=value`)
    override the parameters of that method, else the constants that the file binds by `let`. The names of edits made by
    `apply … as enc` begin with `enc.`. Statements from other files have that file as their `origin`.

    Args: `include`: folders from which `use` may read beside that of the spec; None: from no folder at all, not even that.
    Raises:
        PeftcError: P1xx, everything that is wrong with names, arguments, forms and arithmetic; P0xx in files that are used.
    """
    done = partial(spec, settings or {}, folders_of(spec, include))
    errors = [error for error in done.found if error.severity == "error" and error.code not in _OF_MODEL]
    if errors:
        raise PeftcError(errors)
    return done.spec


@dataclass(frozen=True)
class Partial:
    """As much of a spec as can be expanded, and everything found wrong with it and with the rest."""

    spec: ast.Spec
    found: list[Diagnostic]


def partial(spec: ast.Spec, settings: Environment, folders: Folders) -> Partial:
    """As `expand`, without giving up where something is wrong; of what follows from another error, nothing is said."""
    only = _only_method(spec)
    scopes = Scopes(folders)
    expansion = Expansion(scopes, scopes.of(spec, {} if only else settings), settings)
    statements = expansion.file(only)
    return Partial(_expanded(spec, statements), [*scopes.errors, *expansion.found(statements)])


def _expanded(spec: ast.Spec, statements: Iterable[ast.Statement]) -> ast.Spec:
    top = tuple(s for s in statements if isinstance(s, ast.Let | ast.Edit | ast.Train | ast.Expect))
    return replace(spec, statements=top, header=(), header_trailing=None, closing=())


class Expansion:
    """Expands a file, or one of its methods. `errors`: what could not be expanded; `cost`: the statements that were looked at."""

    def __init__(self, scopes: Scopes, scope: Scope, settings: Environment) -> None:
        self._scopes = scopes
        self._scope = scope
        self._settings = settings
        self.errors: list[Diagnostic] = []
        self._broken: set[str] = set()
        self._stack: list[str] = []
        self._shared: dict[int, ast.Let] = {}
        self._left = MOST

    @property
    def cost(self) -> int:
        return MOST - self._left

    def file(self, only: ast.Method | None) -> list[ast.Statement]:
        """What a file is; `only` where it is nothing but that method."""
        spec, scope = self._scope.spec, self._scope
        if only:
            self._unknown_settings([param.name for param in only.params], f"method `{only.name}`")
            found = self._method(scope.methods[only.name], self._settings, self._set_notes(only))
            rest = [s for s in spec.statements if isinstance(s, ast.Expect)]
        else:
            self._unknown_settings(list(scope.constants), "the file")
            found, rest = [], list(spec.statements)
            if not any(applied(spec.statements)):
                self._nothing(spec, scope)
        found = [*self.shared(), *found, *self._body(rest, scope, scope.constants, ())]
        there = set(map(id, found))
        foreign = [let for let in self._shared.values() if id(let) not in there]
        return [*foreign, *found]

    def method(self, name: str) -> list[ast.Statement]:
        """What a method of the file is with its defaults, and what of the shared parameters it uses."""
        found: list[ast.Statement] = []
        with collected(self.errors, self._scope.spec):
            found = self._apply(ast.Apply(name), self._scope, self._scope.constants, ())
        used = {call for s in found if isinstance(s, ast.Edit) for line in s.body for call in names_in(line.value)}
        return [*(let for let in self._shared.values() if let.name in used), *found]

    def shared(self) -> list[ast.Let]:
        """The shared parameters of the file."""
        return self._shared_of(self._scope, self._scope.shared)

    def found(self, statements: Iterable[ast.Statement]) -> list[Diagnostic]:
        """Everything wrong with an expansion; of what follows from another error, nothing is said."""
        found = check(_expanded(self._scope.spec, statements))
        if self.errors or self._scopes.errors:
            found = [error for error in found if error.code not in _OF_WHOLE]
        broken = self._broken | self._scopes.broken
        told = [e for e in found if e.code not in _OF_NAMES or broken.isdisjoint(_QUOTED.findall(e.message))]
        return [*self.errors, *told]

    def _unknown_settings(self, known: Sequence[str], owner: str) -> None:
        for name in self._settings:
            if name not in known:
                what = f"it has {join_names(known)}" if known else "it has no parameters"
                help_ = did_you_mean(name, known) or what
                self.errors.append(Diagnostic("P110", f"--set {name}: {owner} has no parameter `{name}`", help=help_))

    def _set_notes(self, method: ast.Method) -> tuple[str, ...]:
        values = ((param.name, self._settings.get(param.name)) for param in method.params)
        given = [f"{name}={print_expression(value)}" for name, value in values if value is not None]
        return (f"with `--set {' --set '.join(given)}`",) if given else ()

    def _nothing(self, spec: ast.Spec, scope: Scope) -> None:
        names = list(scope.methods)
        help_ = (
            f"add `apply {names[0]}()`"
            if names
            else "add an `edit`, e.g. `edit ffn at layer[*].ffn { h += adapter(x, r=64) }`"
        )
        message = (
            f"{spec.source.path} applies none of {join_names(names)}"
            if names
            else f"{spec.source.path} changes nothing"
        )
        self.errors.append(Diagnostic("P119", message, source=spec.source, help=help_))

    def _shared_of(self, scope: Scope, names: Iterable[str]) -> list[ast.Let]:
        """Shared parameters of a file, each once, whichever of its methods are applied."""
        found: list[ast.Let] = []
        for let in (let for name in names for let in scope.shared.get(name, ())):
            if id(let) not in self._shared:
                with collected(self.errors, scope.spec):
                    value = self._substituted(let.value, scope.constants)
                    self._shared[id(let)] = replace(let, value=value, origin=scope.spec.source)
                    found.append(self._shared[id(let)])
        return found

    def _method(self, definition: Definition, given: Environment, via: tuple[str, ...]) -> list[ast.Statement]:
        method, scope = definition.method, definition.scope
        known = overlay(scope.constants)
        with collected(self.errors, scope.spec):
            self._charge(len(method.params) // _NODES, method.span)
            for param in method.params:
                value = given.get(param.name)
                known[param.name] = self._substituted(param.default, known) if value is None else value
        self._stack.append(method.name)
        found = self._body(method.body, scope, known, via)
        self._stack.pop()
        if self._left > 0:
            self._shared_of(scope, names_of([method]))
        return found

    def _body(
        self, body: Iterable[ast.Statement], scope: Scope, known: Environment, via: tuple[str, ...]
    ) -> list[ast.Statement]:
        found: list[ast.Statement] = []
        inner = overlay(known)
        bound: dict[str, ast.Expr] = {}
        for statement in body:
            if self._left <= 0:
                break
            errors = len(self.errors)
            with collected(self.errors, scope.spec):
                if not isinstance(statement, ast.Let):
                    found += self._statement(statement, scope, inner, via)
                elif id(statement) in scope.own:
                    continue  # known to the scope of the file
                elif is_shared(statement.value):
                    value = self._substituted(statement.value, inner)
                    found.append(self._said(replace(statement, value=value), scope, via))
                else:
                    self._bind(statement, inner, bound)
            self._left -= len(self.errors) > errors
        return found

    def _bind(self, let: ast.Let, inner: MutableMapping[str, ast.Expr | None], bound: dict[str, ast.Expr]) -> None:
        self._charge(1, let.span)
        refuse_second(let, bound)
        self._broken.add(let.name)
        value = self._substituted(let.value, inner)
        refuse_variable(let, value)
        inner[let.name] = bound[let.name] = value
        self._broken.discard(let.name)

    def _substituted(self, value: ast.Expr, known: Environment) -> ast.Expr:
        """As `substitute`; large values count as statements."""
        result = substitute(value, known)
        self._charge(sum(1 for _ in walk(result)) // _NODES, value.span)
        return result

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
        self._charge(1 + _size(statement) // _NODES, statement.span)

    def _charge(self, cost: int, at: Span) -> None:
        """Methods can double what they apply, again and again: an expansion is given up when it becomes too large."""
        if self._left <= 0:
            return
        self._left -= cost
        if self._left <= 0:
            raise PeftcError(Diagnostic("P120", f"the spec expands to more than {MOST} statements", at))

    def _apply(self, apply: ast.Apply, scope: Scope, known: Environment, via: tuple[str, ...]) -> list[ast.Statement]:
        self._spend(apply)
        definition = self._called(apply, scope)
        given = self._arguments(apply, definition.method, known)
        written = excerpt(print_statement(replace(apply, leading=(), trailing=None)), _LONGEST)
        note = f"from `{written}`, line {apply.span.line} of {scope.spec.source.path}"
        found = self._method(definition, given, (note, *via) if apply.span.end else via)
        if apply.at is not None:
            found = [self._within(statement, apply.at) for statement in found]
        return prefix_names(found, apply.alias) if apply.alias else found

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
                help_ = did_you_mean(arg.name, params) or (f"it has {join_names(params)}" if params else "it has none")
                errors.append(
                    Diagnostic("P102", f"`{method.name}` has no parameter `{arg.name}`", arg.span, help=help_)
                )
            elif arg.name in given:
                errors.append(Diagnostic("P104", f"`{arg.name}` is given twice", arg.span, help="remove one of them"))
            else:
                given[arg.name] = self._substituted(arg.value, known)
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
            return sum(1 for line in body for _ in walk(line.value))
        case ast.Apply(args=args):
            return sum(1 for arg in args for _ in walk(arg.value))
        case _:
            return 0


def _only_method(spec: ast.Spec) -> ast.Method | None:
    """The method of a file that has one and applies nothing."""
    methods = [statement for statement in spec.statements if isinstance(statement, ast.Method)]
    return methods[0] if len(methods) == 1 and not any(applied(spec.statements)) else None
