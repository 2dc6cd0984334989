"""Substitution: names are replaced by their values, and arithmetic on numbers is folded, exact for
decimal fractions.
"""

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from decimal import Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext
from typing import cast

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.semantics.checks.definitions import bound_twice, reserved
from peftc.syntax import ast
from peftc.syntax.numbers import UNITS, to_python
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import EDIT_FACTS, STATES
from peftc.syntax.walk import children, differs_by_layer, fits, map_children, names_in, walk

_MAX_VALUE = Decimal(10) ** 300
Environment = Mapping[str, ast.Expr | None]  # None: a local name hides an outer one
_MAX_DEPTH, _MAX_SIZE = 150, 1_000
_MAX_UNFOLDED = 5 * _MAX_SIZE  # before constant folding


def constant(value: ast.Expr) -> int | float | None:
    """The value of a number with its sign; None for other expressions."""
    number = _signed(value)
    return None if number is None else to_python(number[0] * UNITS[number[1]])


def fold_constants(value: ast.Expr) -> ast.Expr:
    """`value` with its operations on numbers evaluated. Raises: PeftcError P120."""
    if isinstance(value, ast.Binary | ast.Negative):
        return fold_operation(map_children(value, fold_constants))
    return value


def fold_operation(value: ast.Expr) -> ast.Expr:
    """`value`, evaluated if it is an operation on numbers. Raises: PeftcError P120."""
    match value:
        case ast.Negative(ast.Negative(ast.Number() as number)):
            return number
        case ast.Binary(_, left, right):
            first, second = _signed(left), _signed(right)
        case _:
            return value
    if first is None or second is None:
        return value
    (a, unit_a), (b, unit_b) = first, second
    # Percentages are added, or scaled by a plain number.
    percentages = [("%", "%")] if value.op in "+-" else [("%", ""), ("", "%")] if value.op == "*" else [("%", "")]
    is_percentage = (unit_a, unit_b) in percentages
    if not is_percentage:
        a, b = a * UNITS[unit_a], b * UNITS[unit_b]
    with localcontext() as context:
        context.prec = 60
        try:
            result = {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[value.op](b)
        except (DivisionByZero, InvalidOperation, Overflow):
            raise _error(value, "divides by zero" if value.op == "/" else "cannot be computed") from None
    if abs(result) > _MAX_VALUE:
        raise _error(value, "is too large a number")
    number = ast.Number(to_python(abs(result)), "%" if is_percentage else "", span=value.span)
    return ast.Negative(number, span=value.span) if result < 0 else number


def _signed(value: ast.Expr) -> tuple[Decimal, str] | None:
    """A number with its sign, and its unit; None for other expressions."""
    number = value.operand if isinstance(value, ast.Negative) else value
    if not isinstance(number, ast.Number):
        return None
    size = Decimal(repr(number.value))
    return (size if number is value else -size), number.unit


def _error(value: ast.Expr, problem: str) -> PeftcError:
    help_ = "a constant is a number that can be computed"
    return PeftcError(Diagnostic("P120", f"`{print_expression(value)}` {problem}", value.span, help=help_))


def with_span(value: ast.Expr, span: Span) -> ast.Expr:
    """`value` with all of its spans replaced, as if it were written at `span`."""
    value = map_children(value, lambda child: with_span(child, span))
    if isinstance(value, ast.Call):
        kwargs = tuple(replace(keyword, span=span) for keyword in value.kwargs)
        return replace(value, kwargs=kwargs, function_span=span, span=span)
    return replace(value, span=span)


def substitute(value: ast.Expr, environment: Environment) -> ast.Expr:
    """`value` with names replaced and operations on numbers folded. Raises: PeftcError P120."""
    if fits(value, _MAX_UNFOLDED, _MAX_UNFOLDED, environment):
        result = _substitute(value, environment)
        if fits(result, _MAX_DEPTH, _MAX_SIZE):
            return result
    raise PeftcError(Diagnostic("P120", "this expression becomes too large when its names are replaced", value.span))


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
            if is_constant(value) and variables.isdisjoint(names_in(value)):
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
    """Whether `value` is a literal, a word such as `relu`, or such a value for each layer."""
    if isinstance(value, ast.Name):
        return value.id not in STATES
    if isinstance(value, ast.List) or (isinstance(value, ast.Binary | ast.Negative) and differs_by_layer(value)):
        return all(map(is_constant, children(value)))
    return isinstance(value, ast.Boolean | ast.String) or constant(value) is not None
