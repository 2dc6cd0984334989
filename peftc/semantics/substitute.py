"""Puts the values of parameters and constants in the place of their names."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import cast

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.constants import constant, fold, placed
from peftc.semantics.vocabulary import OF_EDIT, STATES, TRUTHS
from peftc.semantics.walk import names_in, size, walk
from peftc.syntax import ast

Environment = Mapping[str, ast.Expr | None]  # None: a name that something nearer has taken
_DEEPEST, _LARGEST = 150, 1_000
_UNFOLDED = 5 * _LARGEST  # arithmetic makes an expression smaller


def substitute(value: ast.Expr, known: Environment) -> ast.Expr:
    """`value` with the names of `known` replaced and arithmetic on constants done.

    Raises: PeftcError P120 where arithmetic fails or the result is too large; it is not made, then.
    """
    if size(value, _UNFOLDED, _UNFOLDED, known):
        result = _substituted(value, known)
        if size(result, _DEEPEST, _LARGEST):
            return result
    message = "this expression becomes too large when its names are replaced"
    raise PeftcError(Diagnostic("P120", message, value.span))


def overlay(known: Environment) -> MutableMapping[str, ast.Expr | None]:
    """What is known, with room for nearer names, whose number is all that it costs."""
    maps = known.maps if isinstance(known, ChainMap) else [known]
    return ChainMap({}, *cast(list[MutableMapping[str, ast.Expr | None]], maps))


def _substituted(value: ast.Expr, known: Environment) -> ast.Expr:
    match value:
        case ast.Name(name):
            meant = known.get(name)
            return value if meant is None else placed(meant, value)
        case ast.Call(function, args, kwargs):
            named = tuple(replace(keyword, value=_substituted(keyword.value, known)) for keyword in kwargs)
            meant = known.get(function)
            called = meant.id if isinstance(meant, ast.Name) else function
            return replace(value, function=called, args=tuple(_substituted(arg, known) for arg in args), kwargs=named)
        case ast.Negative(operand):
            return fold(replace(value, operand=_substituted(operand, known)))
        case ast.Binary(_, left, right):
            return fold(replace(value, left=_substituted(left, known), right=_substituted(right, known)))
        case _:
            return value


def in_body(body: tuple[ast.Equation | ast.Let, ...], known: Environment) -> tuple[ast.Equation | ast.Let, ...]:
    """The equations of an edit, in which a `let` hides a name from there on; constants bound by `let` are replaced too.

    Raises: PeftcError P120; P111 and P121 for a `let` that binds a name twice, or a state. Every failure.
    """
    scope, local, bound = overlay(known), set[str](), set[str]()
    kept: list[ast.Equation | ast.Let] = []
    errors: list[Diagnostic] = []
    for line in body:
        try:
            value = substitute(line.value, scope)
        except PeftcError as error:
            errors += error.diagnostics
            continue
        if isinstance(line, ast.Let):
            errors += _misnamed(line, bound)
            bound.add(line.name)
            scope[line.name] = None
            if is_constant(value) and not (isinstance(value, ast.Name) and value.id in local):
                scope[line.name] = value
                local.discard(line.name)
                continue
            local.add(line.name)
        kept.append(replace(line, value=value))
    if errors:
        raise PeftcError(errors)
    return tuple(kept)


def _misnamed(let: ast.Let, bound: set[str]) -> list[Diagnostic]:
    if let.name in STATES:
        message = f"`{let.name}` is {STATES[let.name]}; nothing else can be called so"
        return [Diagnostic("P121", message, let.span, help="use another name")]
    if let.name in bound:
        return [Diagnostic("P111", f"`{let.name}` is bound twice", let.span, help="give one of them another name")]
    return []


def in_expectation(value: ast.Expr, known: Environment) -> ast.Expr:
    """One side of an `expect`: in `sites(qv)`, `qv` is the name of an edit whatever else is called so."""
    edits = {name for call in walk(value) if _is_of_edit(call) for name in names_in(call)}
    scope = overlay(known)
    scope.update(dict.fromkeys(edits))
    return substitute(value, scope)


def _is_of_edit(value: ast.Expr) -> bool:
    return isinstance(value, ast.Call) and value.function in (*OF_EDIT, *TRUTHS)


def is_constant(value: ast.Expr) -> bool:
    """A number, a word such as `relu`, true or false: something that does not depend on a site."""
    if isinstance(value, ast.Name):
        return value.id not in STATES
    return isinstance(value, ast.Boolean | ast.String) or constant(value) is not None
