"""Expansion: methods, parameters and constants are replaced by what they stand for.

An expanded spec consists of `edit`, `train`, `expect` and shared `let` statements.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names, nearest
from peftc.filesystem import resources
from peftc.semantics.applied_method import prefix_names, restrict
from peftc.semantics.checks.definitions import bound_twice, check_definitions
from peftc.semantics.checks.spec import check, with_origin
from peftc.semantics.files import (
    Definition,
    Folders,
    Include,
    Scope,
    ScopeReader,
    check_constant,
    collect_errors,
    folders_of,
)
from peftc.semantics.layer_values import check_version, is_of_version_2, with_words
from peftc.semantics.moves import moves_to
from peftc.semantics.site_groups import bind_group, expand_selectors
from peftc.semantics.substitute import (
    Environment,
    child_environment,
    substitute,
    substitute_body,
    substitute_expectation,
)
from peftc.syntax import ast
from peftc.syntax.lexer import excerpt
from peftc.syntax.printer import print_expression, print_statement
from peftc.syntax.upgrade import check_keywords
from peftc.syntax.walk import changes_model, is_shared, map_condition, names_in, names_in_statements, values, walk

BUDGET = 1_000  # statements of an expanded spec
_NODES_PER_STATEMENT = 20  # a large expression counts as several statements
_MAX_DEPTH = 30  # of methods that apply methods
_MAX_NOTE = 200  # characters of a statement in a note

_ABOUT_ALL_STATEMENTS = frozenset({"P114", "P117"})  # may follow from a statement that failed to expand
_ABOUT_NAMES = frozenset({"P101", "P105", "P107", "P109"})  # may follow from an invalid `let` or `use`
# The planner reports these with the sites of the model.
_ABOUT_MODEL = frozenset(
    {"P205", "P208", "P301", "P302", "P303", "P310", "P317"}
)  # the planner reports these with the sites of the model
_QUOTED = re.compile("`([^`]*)`")
_BUDGET_OF_METHODS = 20 * BUDGET  # statements of all methods of a file


def expand(spec: ast.Spec, settings: Mapping[str, ast.Expr] | None = None, include: Include = ()) -> ast.Spec:
    """Expands a spec.

    A spec that consists of one method is expanded to that method with its defaults. Edits of
    `apply … as enc` are named `enc.…`. Statements from other files have these as their `origin`.

    Args:
        settings: `--set name=value`: the parameters of that one method, else constants of the file.
        include: folders in which `use` may read besides that of the spec; None: no folder at all.

    Raises:
        PeftcError: P1xx, all errors in names, arguments, forms and arithmetic; P0xx in used files.
    """
    expanded, diagnostics = expand_valid(spec, settings or {}, folders_of(spec, include))
    errors = [error for error in diagnostics if error.severity == "error" and error.code not in _ABOUT_MODEL]
    if errors:
        raise PeftcError(errors)
    if expanded.version != spec.version:
        check_keywords((one for one in expanded.statements if not is_of_version_2(one)), spec.source)
    return expanded


def expand_valid(spec: ast.Spec, settings: Environment, folders: Folders) -> tuple[ast.Spec, list[Diagnostic]]:
    """The part of a spec that can be expanded, and the diagnostics that follow from no other."""
    methods = [statement for statement in spec.statements if isinstance(statement, ast.Method)]
    method = methods[0] if len(methods) == 1 and not changes_model(spec.statements) else None
    reader = ScopeReader(folders)
    expander = Expander(reader, reader.read(spec, {} if method else settings), settings)
    statements = expander.file(method)
    return _with_statements(spec, statements), [*reader.errors, *expander.diagnostics(statements)]


def _with_statements(spec: ast.Spec, statements: Iterable[ast.Statement]) -> ast.Spec:
    top = tuple(s for s in statements if isinstance(s, ast.Expanded))
    version = 2 if any(map(is_of_version_2, top)) else spec.version
    return replace(spec, version=version, statements=top, header=(), header_trailing=None, closing=())


class Expander:
    """Expands a file or one of its methods within a budget, and collects the errors."""

    def __init__(self, reader: ScopeReader, scope: Scope, settings: Environment) -> None:
        self._reader = reader
        self._scope = scope
        self._settings = settings
        self.errors: list[Diagnostic] = []
        self._invalid: set[str] = set()  # names whose `let` has an error
        self._applying: list[str] = []
        self._shared: dict[int, ast.Let] = {}  # by the id of the statement
        self._forms: dict[str, ast.Form] = {}  # those that expanded statements call
        self._budget = BUDGET

    @property
    def cost(self) -> int:
        return BUDGET - self._budget

    def file(self, method: ast.Method | None) -> list[ast.Statement]:
        """The statements of the file; `method`: the file consists of this method."""
        spec, scope = self._scope.spec, self._scope
        applied: list[ast.Statement] = []
        if method:
            self._check_settings([param.name for param in method.params], f"method `{method.name}`")
            options = [
                f"--set {param.name}={print_expression(value)}"
                for param in method.params
                if (value := self._settings.get(param.name)) is not None
            ]
            note = (f"with `{' '.join(options)}`",) if options else ()
            applied = self._method(scope.methods[method.name], self._settings, note)
            statements = [s for s in spec.statements if isinstance(s, ast.Expect | ast.Moved)]
        else:
            self._check_settings(list(scope.constants), "the file")
            statements = [s for s in spec.statements if not isinstance(s, ast.Let | ast.SiteGroup)]  # in the scope
            if not changes_model(spec.statements):
                message = f"{spec.source.path} changes nothing"
                help_ = "add an `edit`, e.g. `edit ffn at layer[*].ffn { h += adapter(x, r=64) }`"
                if scope.methods:
                    message = f"{spec.source.path} applies none of {join_names(scope.methods)}"
                    help_ = f"add `apply {next(iter(scope.methods))}()`"
                self.errors.append(Diagnostic("P119", message, source=spec.source, help=help_))
        expanded = [*self.shared(), *applied, *self._body(statements, scope, scope.constants, ())]
        own = set(map(id, expanded))
        expanded += self._moves_of_forms([s for s in expanded if isinstance(s, ast.Moved)])
        return [*self._forms.values(), *(let for let in self._shared.values() if id(let) not in own), *expanded]

    def method(self, name: str) -> list[ast.Statement]:
        """The statements of a method with its defaults, and the shared parameters that they use."""
        statements: list[ast.Statement] = []
        with collect_errors(self.errors, self._scope.spec):
            statements = self._apply(ast.Apply(name), self._scope, self._scope.constants, ())
        edits = (s for s in statements if isinstance(s, ast.Edit))
        used = {name for edit in edits for line in edit.body for name in names_in(line.value)}
        return [*self._forms.values(), *(let for let in self._shared.values() if let.name in used), *statements]

    def shared(self) -> list[ast.Let]:
        """The shared parameters of the file."""
        return self._expand_shared(self._scope, self._scope.shared)

    def diagnostics(self, statements: Iterable[ast.Statement]) -> list[Diagnostic]:
        """All errors of an expansion, without those that follow from others."""
        invalid = self._invalid | self._reader.invalid
        incomplete = self.errors or self._reader.errors
        errors = check(_with_statements(self._scope.spec, statements))
        if incomplete:
            errors = [error for error in errors if error.code not in _ABOUT_ALL_STATEMENTS]
        quoted = ((error, _QUOTED.findall(error.message)) for error in [*self.errors, *errors])
        return [e for e, names in quoted if e.code not in _ABOUT_NAMES or invalid.isdisjoint(names)]

    def _check_settings(self, known: Sequence[str], owner: str) -> None:
        for name in self._settings:
            if name not in known:
                help_ = did_you_mean(name, known) or _parameters(known)
                self.errors.append(Diagnostic("P110", f"{owner} has no parameter `{name}` to set", help=help_))

    def _expand_shared(self, scope: Scope, names: Iterable[str]) -> list[ast.Let]:
        """Shared parameters that are not expanded yet. Each is expanded once, for all methods."""
        expanded: list[ast.Let] = []
        for let in (let for name in names for let in scope.shared.get(name, ())):
            if id(let) not in self._shared:
                with collect_errors(self.errors, scope.spec):
                    bound = replace(let, value=self._substitute(let.value, scope.constants), origin=scope.spec.source)
                    self._shared[id(let)] = with_words(bound, scope.callable_forms)
                    self._call_forms(self._shared[id(let)], scope)
                    expanded.append(self._shared[id(let)])
        return expanded

    def _method(self, definition: Definition, arguments: Environment, via: tuple[str, ...]) -> list[ast.Statement]:
        method, scope = definition.method, definition.scope
        environment = child_environment(scope.constants)
        with collect_errors(self.errors, scope.spec):
            check_version(replace(method, body=()), scope.spec, environment)
            self._spend(len(method.params) // _NODES_PER_STATEMENT, method.span)
            for param in method.params:
                value = arguments.get(param.name)
                environment[param.name] = self._substitute(param.default, environment) if value is None else value
        self._applying.append(method.name)
        statements = self._body(method.body, scope, environment, via)
        self._applying.pop()
        if self._budget > 0:
            self._expand_shared(scope, names_in_statements([method]))
        return statements

    def _body(
        self, body: Iterable[ast.Statement], scope: Scope, environment: Environment, via: tuple[str, ...]
    ) -> list[ast.Statement]:
        expanded: list[ast.Statement] = []
        inner = child_environment(environment)
        bound: set[str] = set()
        groups = dict(scope.groups)
        own: dict[str, ast.Selector] = {}
        for statement in body:
            if self._budget <= 0:
                break
            errors = len(self.errors)
            with collect_errors(self.errors, scope.spec):
                statement = with_words(expand_selectors(statement, groups), scope.callable_forms)
                check_version(statement, scope.spec, inner)
                match statement:
                    case ast.SiteGroup():
                        bind_group(statement, own, bound)
                        groups |= own
                    case ast.Let(_, value) if not is_shared(value):
                        self._bind(statement, inner, bound)
                    case ast.Apply():
                        expanded += self._apply(statement, scope, inner, via)
                    case ast.Let() | ast.Edit() | ast.Train() | ast.Expect() | ast.Moved():
                        statement = with_words(self._with_values(statement, inner), scope.callable_forms)
                        self._spend(_cost(statement), statement.span)
                        self._call_forms(statement, scope)
                        expanded.append(replace(statement, origin=scope.spec.source, via=via))
                    case _:
                        pass
            self._budget -= len(self.errors) > errors
        return expanded

    def _call_forms(self, statement: ast.Statement, scope: Scope) -> None:
        """Adds the forms of a file that a statement of it calls. Raises: P111 for two of a name."""
        for name in dict.fromkeys(names_in_statements([statement])) if scope.forms else ():
            if (form := scope.forms.get(name)) is None:
                continue
            if self._forms.setdefault(name, form) != form:
                message = f"two files define different forms named `{name}`"
                raise PeftcError(Diagnostic("P111", message, statement.span, help="rename one of them"))

    def _moves_of_forms(self, own: Collection[ast.Statement]) -> Iterator[ast.Moved]:
        """What the files of used forms say about the names of these forms."""
        for name, form in self._forms.items():
            moves = self._reader.moves.get(form.origin.path if form.origin else "", ())
            yield from (moved for moved in moves_to(moves, {name}) if moved not in own)

    def _bind(self, let: ast.Let, inner: MutableMapping[str, ast.Expr | None], bound: set[str]) -> None:
        self._spend(1, let.span)
        if let.name in bound:
            raise PeftcError(bound_twice(let))
        self._invalid.add(let.name)
        value = self._substitute(let.value, inner)
        check_constant(let, value)
        inner[let.name] = value
        bound.add(let.name)
        self._invalid.discard(let.name)

    def _substitute(self, value: ast.Expr, environment: Environment) -> ast.Expr:
        result = substitute(value, environment)
        self._spend(sum(1 for _ in walk(result)) // _NODES_PER_STATEMENT, value.span)
        return result

    def _with_values(self, statement: ast.Statement, environment: Environment) -> ast.Statement:
        match statement:
            case ast.Let(_, value):
                return replace(statement, value=self._substitute(value, environment))
            case ast.Edit():
                body, where = substitute_body(statement.body, environment), self._where(statement, environment)
                return replace(statement, body=body, where=where)
            case ast.Train():
                return replace(statement, where=self._where(statement, environment))
            case ast.Expect(left, _, right):
                left = substitute_expectation(left, environment)
                right = None if right is None else substitute_expectation(right, environment)
                return replace(statement, left=left, right=right)
            case _:
                return statement

    def _where(self, statement: ast.Edit | ast.Train, environment: Environment) -> tuple[ast.Condition, ...]:
        return tuple(map_condition(one, lambda side: substitute(side, environment)) for one in statement.where)

    def _spend(self, cost: int, at: Span) -> None:
        """Raises: P120 when the budget is spent. Nested methods can grow exponentially."""
        if self._budget <= 0:
            return
        self._budget -= cost
        if self._budget <= 0:
            raise PeftcError(Diagnostic("P120", f"the spec expands to more than {BUDGET} statements", at))

    def _apply(
        self, apply: ast.Apply, scope: Scope, environment: Environment, via: tuple[str, ...]
    ) -> list[ast.Statement]:
        self._spend(_cost(apply), apply.span)
        definition = self._definition(apply, scope)
        arguments = self._arguments(apply, definition.method, environment)
        text = excerpt(print_statement(replace(apply, leading=(), trailing=None)), _MAX_NOTE)
        note = f"from `{text}`, line {apply.span.line} of {scope.spec.source.path}"
        statements = self._method(definition, arguments, (note, *via) if apply.span.end else via)
        if apply.at is not None:
            statements = [self._restrict(statement, apply.at) for statement in statements]
        return prefix_names(statements, apply.alias) if apply.alias else statements

    def _definition(self, apply: ast.Apply, scope: Scope) -> Definition:
        name = apply.name
        if name not in scope.methods:
            help_ = did_you_mean(name, scope.methods) or _method_of_library(name)
            raise PeftcError(Diagnostic("P109", f"there is no method `{name}` here", apply.name_span, help=help_))
        if len(self._applying) > _MAX_DEPTH:
            raise PeftcError(Diagnostic("P120", f"more than {_MAX_DEPTH} methods apply each other", apply.span))
        if name in self._applying:
            cycle = " → ".join([*self._applying, name])
            raise PeftcError(Diagnostic("P113", f"the method `{name}` applies itself", apply.name_span, notes=(cycle,)))
        return scope.methods[name]

    def _arguments(self, apply: ast.Apply, method: ast.Method, environment: Environment) -> dict[str, ast.Expr]:
        params = [param.name for param in method.params]
        arguments: dict[str, ast.Expr] = {}
        errors: list[Diagnostic] = []
        for arg in apply.args:
            if arg.name not in params:
                help_ = did_you_mean(arg.name, params) or _parameters(params)
                message = f"`{method.name}` has no parameter `{arg.name}`"
                errors.append(Diagnostic("P102", message, arg.span, help=help_))
            elif arg.name in arguments:
                message = f"the argument `{arg.name}` appears twice"
                errors.append(Diagnostic("P104", message, arg.span, help="remove one of them"))
            else:
                arguments[arg.name] = self._substitute(arg.value, environment)
        if errors:
            raise PeftcError(errors)
        return arguments

    def _restrict(self, statement: ast.Statement, at: ast.Selector) -> ast.Statement:
        if not isinstance(statement, ast.Edit | ast.Train):
            return statement
        try:
            return replace(statement, selector=restrict(statement.selector, at))
        except PeftcError as error:
            self.errors += [with_origin(diagnostic, statement, self._scope.spec) for diagnostic in error.diagnostics]
            return statement


def _cost(statement: ast.Statement) -> int:
    if not isinstance(statement, ast.Edit | ast.Apply):
        return 1
    return 1 + sum(1 for value in values(statement) for _ in walk(value)) // _NODES_PER_STATEMENT


def _method_of_library(name: str) -> str:
    """What to do about a method that is not there."""
    recipe = name if name in resources.recipes() else nearest(name, resources.recipes())
    if recipe is None:
        return f"write `method {name}(…) {{ … }}`, or `use` one; `peftc recipes` lists those of `std`"
    return f"{'' if recipe == name else f'did you mean `{recipe}`? '}write `use {recipe} from std` above"


def _parameters(names: Sequence[str]) -> str:
    return f"it has {join_names(names)}" if names else "it has no parameters"


def check_file(spec: ast.Spec, include: Include = ()) -> list[Diagnostic]:
    """All errors of a file: its definitions, what it applies, and its methods. See `expand`."""
    folders = folders_of(spec, include)
    errors = list(check_definitions(spec))
    methods = [statement for statement in spec.statements if isinstance(statement, ast.Method)]
    if changes_model(spec.statements) or len(methods) > 1:
        errors += _each_method(spec, methods, folders)
    defines_forms = any(isinstance(statement, ast.Form) for statement in spec.statements)
    if changes_model(spec.statements) or len(methods) == 1 or not (methods or defines_forms):
        errors += expand_valid(spec, {}, folders)[1]
    if any(error.code in ("P109", "P119") for error in errors):  # of which an unused name is a consequence
        errors = [error for error in errors if error.code != "P114" or "never applied" not in error.message]
    misspelled = {name for e in errors if e.code == "P208" for name in _QUOTED.findall(e.help or "")}
    errors = [e for e in errors if e.code != "P114" or misspelled.isdisjoint(_QUOTED.findall(e.message))]
    unique: dict[object, Diagnostic] = {}  # an applied method is checked with its defaults and with its arguments
    for error in errors:
        unique.setdefault((error.code, error.span, error.source and error.source.path, error.message), error)
    return sorted(unique.values(), key=lambda e: (e.source.path if e.source else "", e.span.start if e.span else -1))


def _each_method(spec: ast.Spec, methods: Iterable[ast.Method], folders: Folders) -> list[Diagnostic]:
    """The errors of each method with its defaults, and of the shared parameters."""
    reader = ScopeReader(folders)
    scope = reader.read(spec, {})
    expander = Expander(reader, scope, {})
    errors = [error for error in expander.diagnostics(expander.shared()) if error.code != "P114"]
    budget = _BUDGET_OF_METHODS
    for method in methods:
        if budget <= 0:
            message = f"checking the methods of this file takes more than {_BUDGET_OF_METHODS} statements"
            errors.append(Diagnostic("P120", message, method.span, spec.source, help="split the file"))
            break
        expander = Expander(reader, scope, {})
        errors += expander.diagnostics(expander.method(method.name))
        budget -= expander.cost
        if expander.cost >= BUDGET:
            break  # each method that applies this one is too large as well
    return [*reader.errors, *errors]
