"""`Spec` to text, in the one layout that `peftc fmt` knows.

Laws (tests/syntax): parse(print(s)) == s, print(parse(print(s))) == print(s), and every comment of a text is in its
print exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression, print_selector

WIDTH = 100
_INDENT = "    "


def print_spec(spec: ast.Spec) -> str:
    """The canonical text of `spec`, comments included, ending in a newline."""
    lines = [*_comments(spec.header, ""), _beside(f"peft {spec.version}", spec.header_trailing)]
    previous: ast.Statement | None = None
    for statement in spec.statements:
        if previous is None or _apart(previous) or _apart(statement) or statement.leading[:1] == ("",):
            lines.append("")
        lines += _statement(statement, "")
        previous = statement
    if spec.closing:
        lines += ["", *_comments(_stripped(spec.closing), "")]
    return "\n".join(lines) + "\n"


def print_statement(statement: ast.Statement) -> str:
    """One statement as `print_spec` shows it."""
    return "\n".join(_statement(statement, ""))


def _apart(statement: ast.Statement) -> bool:
    """Methods stand apart from what is around them."""
    return isinstance(statement, ast.Method)


def _statement(statement: ast.Statement, indent: str) -> list[str]:
    above = _comments(_stripped(statement.leading), indent)
    return [*above, *(indent + line if line else "" for line in _lines(statement, WIDTH - len(indent)))]


def _comments(lines: Iterable[str], indent: str) -> list[str]:
    return [indent + line if line else "" for line in lines]


def _stripped(leading: Sequence[str]) -> list[str]:
    """Without blank lines at the start, and never two of them."""
    kept: list[str] = []
    for line in leading:
        if line or (kept and kept[-1]):
            kept.append(line)
    return kept


def _beside(line: str, comment: str | None) -> str:
    return f"{line}  {comment}" if comment else line


def _lines(statement: ast.Statement, width: int) -> list[str]:
    match statement:
        case ast.Method():
            return _method(statement, width)
        case ast.Edit():
            return _edit(statement, width)
        case _:
            return [_beside(_line(statement), statement.trailing)]


def _line(statement: ast.Statement) -> str:
    """A statement that is always one line."""
    match statement:
        case ast.Equation(target, op, value):
            return f"{target} {op} {print_expression(value)}"
        case ast.Let(name, value):
            return f"let {name} = {print_expression(value)}"
        case ast.Train(name, states, at):
            return f"train {name} = [{', '.join(states)}] at {print_selector(at)}"
        case ast.Expect(left, op, right):
            return f"expect {print_expression(left)}" + (
                f" {op} {print_expression(right)}" if right is not None else ""
            )
        case ast.Use(name, source):
            return f"use {name} from " + ("std" if source is None else f'"{source}"')
        case ast.Apply():
            return _apply(statement)
        case _:
            raise TypeError(f"no statement of one line: {type(statement).__name__}")


def _apply(statement: ast.Apply) -> str:
    args = ", ".join(f"{arg.name}={print_expression(arg.value)}" for arg in statement.args)
    at = "" if statement.at is None else f" at {print_selector(statement.at)}"
    return f"apply {statement.name}({args}){at}" + (f" as {statement.alias}" if statement.alias else "")


def _edit(edit: ast.Edit, width: int) -> list[str]:
    """On one line where it is one equation without comments of its own, and short enough."""
    tail = " per task" if edit.per_task else ""
    head = f"edit {edit.name} at {print_selector(edit.selector)}{tail}"
    if len(edit.body) <= 1 and not edit.closing and not any(_commented(line) for line in edit.body):
        body = " ".join(_line(line) for line in edit.body)
        whole = _beside(f"{head} {{ {body} }}" if body else f"{head} {{ }}", edit.trailing)
        if len(whole) <= width:
            return [whole]
    return [*_edit_head(edit, head, tail, width), *_block(edit.body, edit.closing)]


def _edit_head(edit: ast.Edit, head: str, tail: str, width: int) -> list[str]:
    """A long union has its arms below each other."""
    whole = _beside(f"{head} {{", edit.trailing)
    if len(whole) <= width or not isinstance(edit.selector, ast.Union):
        return [whole]
    first, *others = (print_selector(arm, nested=True) for arm in edit.selector.arms)
    arms = [f"edit {edit.name} at {first}", *(f"{_INDENT}| {arm}" for arm in others)]
    return [*arms[:-1], _beside(f"{arms[-1]}{tail} {{", edit.trailing)]


def _commented(statement: ast.Statement) -> bool:
    return bool(statement.leading or statement.trailing)


def _block(body: Sequence[ast.Statement], closing: Sequence[str]) -> Iterator[str]:
    """The statements of a block, and its closing brace."""
    previous: ast.Statement | None = None
    for statement in body:
        if previous is not None and statement.leading[:1] == ("",):
            yield ""
        yield from _statement(statement, _INDENT)
        previous = statement
    if previous is not None and closing[:1] == ("",):
        yield ""
    yield from _comments(_trimmed(_stripped(closing)), _INDENT)
    yield "}"


def _trimmed(lines: list[str]) -> list[str]:
    return lines[:-1] if lines and not lines[-1] else lines


def _method(method: ast.Method, width: int) -> list[str]:
    params = [f"{param.name} = {print_expression(param.default)}" for param in method.params]
    head = f"method {method.name}({', '.join(params)}) {{"
    lines = [_beside(head, method.trailing)]
    if len(lines[0]) > width or any(param.leading or param.trailing for param in method.params):
        lines = [f"method {method.name}("]
        for param, text in zip(method.params, params, strict=True):
            lines += _comments(_trimmed(_stripped(param.leading)), _INDENT)
            lines.append(_beside(f"{_INDENT}{text},", param.trailing))
        lines.append(_beside(") {", method.trailing))
    if not method.body and not method.closing and not method.trailing:
        return [*lines[:-1], f"{lines[-1]} }}"]
    return [*lines, *_block(method.body, method.closing)]
