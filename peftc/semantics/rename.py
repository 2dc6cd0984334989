"""`apply … as enc`: the names that a method defines, with `enc.` before them wherever they are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from peftc.syntax import ast


def prefix_names(statements: Iterable[ast.Statement], alias: str) -> list[ast.Statement]:
    """The statements of one applied method; the edits, `train`s and shared parameters among them get the prefix."""
    found = list(statements)
    edits = {s.name: f"{alias}.{s.name}" for s in found if isinstance(s, ast.Edit | ast.Train)}
    shared = {s.name: f"{alias}.{s.name}" for s in found if isinstance(s, ast.Let)}
    return [_statement(statement, edits, shared) for statement in found]


def _statement(statement: ast.Statement, edits: Mapping[str, str], shared: Mapping[str, str]) -> ast.Statement:
    match statement:
        case ast.Edit():
            body = tuple(replace(line, value=_expression(line.value, shared, calls=True)) for line in statement.body)
            return replace(statement, name=edits[statement.name], body=body)
        case ast.Train():
            return replace(statement, name=edits[statement.name])
        case ast.Let():
            return replace(statement, name=shared[statement.name])
        case ast.Expect(left, _, right):
            compared = None if right is None else _expression(right, edits, calls=False)
            return replace(statement, left=_expression(left, edits, calls=False), right=compared)
        case _:
            return statement


def _expression(value: ast.Expr, names: Mapping[str, str], calls: bool) -> ast.Expr:
    """Equations call what is shared; expectations name edits."""
    match value:
        case ast.Name(name):
            return value if calls else replace(value, id=names.get(name, name))
        case ast.Call(function, args, kwargs):
            return replace(
                value,
                function=names.get(function, function) if calls else function,
                args=tuple(_expression(arg, names, calls) for arg in args),
                kwargs=tuple(replace(keyword, value=_expression(keyword.value, names, calls)) for keyword in kwargs),
            )
        case ast.Negative(operand):
            return replace(value, operand=_expression(operand, names, calls))
        case ast.Binary(_, left, right):
            return replace(value, left=_expression(left, names, calls), right=_expression(right, names, calls))
        case _:
            return value
