"""Whether the edits of a model have the equations, and forms with the texts, of a row."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

from peftc.equations.table import FORMS
from peftc.forms.form import Form
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_statement

_OPTIONS = ("options", "dropout", "neumann", "penalty", "mini")  # in braces of equations


def is_form(text: str, form: Form) -> bool:
    """Whether a form is that of a text, whatever its comments say, or one of peftc's own."""
    return form.name in FORMS or (form.text is not None and _code_of(form.text) == _code_of(text))


@cache
def _code_of(text: str) -> str:
    (form,) = parse_text(f"peft 2\n{text}").statements
    lines = (line.partition("#")[0].strip() for line in print_statement(form).splitlines())
    return "\n".join(line for line in lines if line)


@cache
def equation_of(text: str) -> ast.Equation:
    numbers = defaultdict[str, Any](lambda: "1", dict.fromkeys(_OPTIONS, ""))
    (edit,) = parse_text(f"peft 2\nedit e at layer[*] {{ {text.format_map(numbers)} }}\n").statements
    assert isinstance(edit, ast.Edit)
    (equation,) = edit.body
    assert isinstance(equation, ast.Equation)
    return equation


def is_same(row: ast.Equation, own: ast.Equation) -> bool:
    return (row.target, row.op) == (own.target, own.op) and _is_same_value(row.value, own.value)


def _is_same_value(row: ast.Expr, own: ast.Expr) -> bool:
    """Whether two expressions are equal, but for the arguments of forms."""
    match row, own:
        case ast.Call(), ast.Call():
            pairs = zip(row.args, own.args, strict=False)
            same = row.function == own.function and len(row.args) == len(own.args)
            return same and all(_is_same_value(a, b) for a, b in pairs)
        case ast.Binary(), ast.Binary():
            return row.op == own.op and _is_same_value(row.left, own.left) and _is_same_value(row.right, own.right)
        case _:
            return row == own
