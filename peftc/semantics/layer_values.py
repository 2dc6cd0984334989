"""Values by layer: `r = [4, 4, 8]` has one for each layer of a stack, and `layer` is the number of
a site's layer, from 0. Each becomes one value before an edit is lowered at a site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import plural
from peftc.forms.form import Form
from peftc.semantics.substitute import fold_operation
from peftc.syntax import ast
from peftc.syntax.lexer import NEED_VERSION_2
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import LAYER
from peftc.syntax.walk import children, differs_by_layer, map_children, values, walk

Body = tuple[ast.Equation | ast.Let, ...]
Statement = TypeVar("Statement", bound=ast.Statement)
_NUMBERS = ("int", "float")  # types of arguments that take `layer` as the number


class LayerNumber(NamedTuple):
    """A layer of a stack.

    Attributes:
        stack: the path of its stack, such as `decoder.layer`.
        number: of the layer, from 0.
        depth: how many layers the stack has.
        runs: how often a forward runs the layer.
    """

    stack: str
    number: int
    depth: int
    runs: int = 1


def differs(body: Body) -> bool:
    """Whether equations have values that differ by layer."""
    return any(differs_by_layer(line.value) for line in _without_hidden(body))


def values_by_layer(body: Body) -> Iterator[tuple[str, ast.Expr]]:
    """The largest expressions that differ by layer, behind `r of lora` if they are arguments."""
    for line in _without_hidden(body):
        yield from _largest(line.value, "")


def _without_hidden(body: Body) -> Iterable[ast.Equation | ast.Let]:
    """The lines in which `layer` is the number: those up to a `let layer = …`."""
    for line in body:
        yield line
        if isinstance(line, ast.Let) and line.name == LAYER:
            return


def _largest(value: ast.Expr, name: str) -> Iterator[tuple[str, ast.Expr]]:
    match value:
        case _ if not differs_by_layer(value):
            pass
        case _ if name or _is_number(value):
            yield name, value
        case ast.Call(function, args, kwargs):
            yield from (one for part in args for one in _largest(part, ""))
            yield from (one for k in kwargs for one in _largest(k.value, f"{k.name} of {function}"))
        case _:
            yield from (one for part in children(value) for one in _largest(part, ""))


def _is_number(value: ast.Expr) -> bool:
    """Whether an expression is of lists, `layer` and numbers alone."""
    match value:
        case ast.Binary(op, left, right):
            return op != "@" and _is_number(left) and _is_number(right)
        case ast.Negative(operand):
            return _is_number(operand)
        case _:
            return isinstance(value, ast.List | ast.Number) or value == ast.Name(LAYER)


def body_at_layer(body: Body, layer: LayerNumber | None, path: str) -> Body:
    """The lines of an edit at a site, with the values of its layer.

    Args: `layer`: None for a site in no layer. `path`: of the site, for messages.
    Raises: PeftcError P321 for a list of another length, P322 for a site in no layer.
    """
    if not differs(body):
        return body
    hidden = len(list(_without_hidden(body)))
    lines = (replace(line, value=at_layer(line.value, layer, path)) for line in body[:hidden])
    return (*lines, *body[hidden:])


def at_layer(value: ast.Expr, layer: LayerNumber | None, path: str) -> ast.Expr:
    """An expression with the values of a layer. Raises: as `body_at_layer`, and P120."""
    if not differs_by_layer(value):
        return value
    match value:
        case ast.List(items):
            return at_layer(items[_in_stack(value, layer, path, len(items)).number], layer, path)
        case ast.Name():
            return ast.Number(_in_stack(value, layer, path).number, span=value.span)
        case _:
            return fold_operation(map_children(value, lambda part: at_layer(part, layer, path)))


def _in_stack(value: ast.Expr, layer: LayerNumber | None, path: str, length: int | None = None) -> LayerNumber:
    if layer is None:
        message = f"`{path}` is in no layer, and `{print_expression(value)}` has a value for each"
        help_ = "write an edit of its own for it, with one value"
        raise PeftcError(Diagnostic("P322", message, value.span, label="differs by layer", help=help_))
    if length is not None and length != layer.depth:
        count, layers = plural(length, "value"), plural(layer.depth, "layer")
        message = f"`{print_expression(value)}` has {count}, and `{layer.stack}` has {layers}"
        notes = (f"a forward runs the layer {layer.runs} times, with one set of weights",) if layer.runs > 1 else ()
        help_ = "write one value for each layer of the stack, from 0 on, those without a site included"
        raise PeftcError(Diagnostic("P321", message, value.span, label=count, notes=notes, help=help_))
    return layer


def with_words(statement: Statement, forms: Callable[[], Mapping[str, Form]]) -> Statement:
    """A statement in which `layer` is a word, where the argument of a form takes words.

    Args: `forms`: those that the statement can call, by name; asked for where it has that name.
    """
    match statement:
        case ast.Edit(body=body) if any(map(_has_layer, (line.value for line in body))):
            known = forms()
            return replace(statement, body=tuple(replace(line, value=_with_words(line.value, known)) for line in body))
        case ast.Let(value=value) if _has_layer(value):
            return replace(statement, value=_with_words(value, forms()))
        case _:
            return statement


def _has_layer(value: ast.Expr) -> bool:
    return any(node == ast.Name(LAYER) for node in walk(value))


def _with_words(value: ast.Expr, forms: Mapping[str, Form]) -> ast.Expr:
    value = map_children(value, lambda part: _with_words(part, forms))
    if not isinstance(value, ast.Call) or value.function not in forms:
        return value
    form = forms[value.function]
    types = {keyword.name: argument.type for keyword in value.kwargs if (argument := form.argument(keyword.name))}
    words = {name for name, kind in types.items() if kind not in _NUMBERS}
    kwargs = (replace(k, value=_as_word(k.value)) if k.name in words else k for k in value.kwargs)
    return replace(value, kwargs=tuple(kwargs))


def _as_word(value: ast.Expr) -> ast.Expr:
    match value:
        case ast.Name(name) if name == LAYER:
            return ast.Word(name, span=value.span)
        case ast.List(items):
            return replace(value, items=tuple(map(_as_word, items)))
        case _:
            return value


def check_version(statement: ast.Statement, spec: ast.Spec, environment: Mapping[str, ast.Expr | None]) -> None:
    """Raises: PeftcError P028 for the number `layer` in version 1, if it names no constant."""
    names = {param.name for param in statement.params} if isinstance(statement, ast.Method) else set[str]()
    if spec.version != 1 or environment.get(LAYER) is not None or LAYER in names:
        return
    own = [line.value for line in _without_hidden(statement.body)] if isinstance(statement, ast.Edit) else None
    for node in (node for value in own or values(statement) for node in walk(value)):
        if node == ast.Name(LAYER) and not isinstance(statement, ast.Expect):
            message = "the number `layer` belongs to version 2 of the language"
            raise PeftcError(Diagnostic("P028", message, node.span, help=NEED_VERSION_2))


def is_of_version_2(statement: ast.Statement) -> bool:
    """Whether an expanded statement is none of version 1, such as one of a used file."""
    match statement:
        case ast.Edit(body=body, where=where):
            indexed = any(isinstance(part, ast.Item) for line in body for part in walk(line.value))
            return bool(where) or indexed or differs(body)
        case ast.Train(where=where):
            return bool(where)
        case _:
            return isinstance(statement, ast.Form | ast.Moved)


def variants(call: ast.Call) -> Iterator[ast.Call]:
    """A call with each value of its lists. Without a list, `layer` is 1: what is wrong with it at
    a layer is known with a model.
    """
    lengths = [len(part.items) for part in walk(call) if isinstance(part, ast.List)]
    for number in range(max(lengths, default=1)):
        one = _variant(call, number if lengths else 1) if differs_by_layer(call) else call
        assert isinstance(one, ast.Call)
        yield one


def _variant(value: ast.Expr, number: int) -> ast.Expr:
    match value:
        case ast.List(items):
            return items[min(number, len(items) - 1)] if items else value
        case ast.Name():
            return ast.Number(number, span=value.span) if value == ast.Name(LAYER) else value
        case _:
            return fold_operation(map_children(value, lambda part: _variant(part, number)))
