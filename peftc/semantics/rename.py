"""`apply … as enc`: the definitions of a method get the prefix `enc.`, wherever they are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from peftc.semantics.walk import map_children
from peftc.syntax import ast


def prefix_names(statements: Iterable[ast.Statement], alias: str) -> list[ast.Statement]:
    """The statements of one applied method, with prefixed edits, `train`s and shared parameters."""
    body = list(statements)
    edits = {s.name: f"{alias}.{s.name}" for s in body if isinstance(s, ast.Edit | ast.Train)}
    shared = {s.name: f"{alias}.{s.name}" for s in body if isinstance(s, ast.Let)}
    return [_statement(statement, edits, shared) for statement in body]


def _statement(statement: ast.Statement, edits: Mapping[str, str], shared: Mapping[str, str]) -> ast.Statement:
    match statement:
        case ast.Edit():
            body = tuple(replace(line, value=_rename_calls(line.value, shared)) for line in statement.body)
            return replace(statement, name=edits[statement.name], body=body)
        case ast.Train():
            return replace(statement, name=edits[statement.name])
        case ast.Let():
            return replace(statement, name=shared[statement.name])
        case ast.Expect(left, _, right):
            right = None if right is None else _rename_names(right, edits)
            return replace(statement, left=_rename_names(left, edits), right=right)
        case _:
            return statement


def _rename_calls(value: ast.Expr, names: Mapping[str, str]) -> ast.Expr:
    """Equations call shared parameters."""
    value = map_children(value, lambda child: _rename_calls(child, names))
    return replace(value, function=names.get(value.function, value.function)) if isinstance(value, ast.Call) else value


def _rename_names(value: ast.Expr, names: Mapping[str, str]) -> ast.Expr:
    """Expectations name edits."""
    value = map_children(value, lambda child: _rename_names(child, names))
    return replace(value, id=names.get(value.id, value.id)) if isinstance(value, ast.Name) else value
