"""Substitution: parameters and constants are replaced by their values."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import cast

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.checks.definitions import bound_twice, reserved
from peftc.semantics.constants import constant, fold_operation, with_span
from peftc.semantics.vocabulary import EDIT_FACTS, STATES
from peftc.semantics.walk import fits, map_children, names_in, walk
from peftc.syntax import ast

Environment = Mapping[str, ast.Expr | None]  # None: a local name hides an outer one
_MAX_DEPTH, _MAX_SIZE = 150, 1_000
_MAX_UNFOLDED = 5 * _MAX_SIZE  # before constant folding


def substitute(value: ast.Expr, environment: Environment) -> ast.Expr:
    """`value` with names replaced and operations on numbers folded. Raises: PeftcError P120."""
    if fits(value, _MAX_UNFOLDED, _MAX_UNFOLDED, environment):
        result = _substitute(value, environment)
        if fits(result, _MAX_DEPTH, _MAX_SIZE):
            return result
    message = "this expression becomes too large when its names are replaced"
    raise PeftcError(Diagnostic("P120", message, value.span))


def child_environment(environment: Environment) -> MutableMapping[str, ast.Expr | None]:
    """An environment for an inner scope. New names do not change the outer one."""
    maps = environment.maps if isinstance(environment, ChainMap) else [environment]
    return ChainMap({}, *cast(list[MutableMapping[str, ast.Expr | None]], maps))


def _substitute(value: ast.Expr, environment: Environment) -> ast.Expr:
    if isinstance(value, ast.Name):
        replacement = environment.get(value.id)
        return value if replacement is None else with_span(replacement, value.span)
    result = fold_operation(map_children(value, lambda child: _substitute(child, environment)))
    if isinstance(value, ast.Call) and isinstance(result, ast.Call):
        function = environment.get(value.function)
        return replace(result, function=function.id) if isinstance(function, ast.Name) else result
    return result


def substitute_body(
    body: tuple[ast.Equation | ast.Let, ...], environment: Environment
) -> tuple[ast.Equation | ast.Let, ...]:
    """The equations of an edit; a `let` hides outer names. Raises: PeftcError P111, P120, P121."""
    scope, variables, bound = child_environment(environment), set[str](), set[str]()
    lines: list[ast.Equation | ast.Let] = []
    errors: list[Diagnostic] = []
    for line in body:
        try:
            value = substitute(line.value, scope)
        except PeftcError as error:
            errors += error.diagnostics
            continue
        if isinstance(line, ast.Let):
            if line.name in STATES:
                errors.append(reserved(line.name, line.span))
            elif line.name in bound:
                errors.append(bound_twice(line))
            bound.add(line.name)
            scope[line.name] = None
            if is_constant(value) and not (isinstance(value, ast.Name) and value.id in variables):
                scope[line.name] = value
                variables.discard(line.name)
                continue
            variables.add(line.name)
        lines.append(replace(line, value=value))
    if errors:
        raise PeftcError(errors)
    return tuple(lines)


def substitute_expectation(value: ast.Expr, environment: Environment) -> ast.Expr:
    """One side of an `expect`. In `sites(qv)`, `qv` names an edit and is never replaced."""
    facts = (node for node in walk(value) if isinstance(node, ast.Call) and node.function in EDIT_FACTS)
    scope = child_environment(environment)
    scope.update(dict.fromkeys(name for fact in facts for name in names_in(fact)))
    return substitute(value, scope)


def is_constant(value: ast.Expr) -> bool:
    """Whether `value` is a literal or a word such as `relu`, the same at every site."""
    if isinstance(value, ast.Name):
        return value.id not in STATES
    return isinstance(value, ast.Boolean | ast.String) or constant(value) is not None
