"""Expressions out of the parser's tree."""

from __future__ import annotations

from math import isfinite
from typing import Literal, cast

from lark import Token, Tree

from peftc.diagnostics import Diagnostic
from peftc.syntax import ast
from peftc.syntax.nodes import Item, kind, only, span, token, trees, word
from peftc.syntax.situation import shown
from peftc.syntax.tokens import span_of

_LONGEST = 40  # characters of a number


class Expressions:
    """Builds expressions; what the grammar cannot say of them is collected in `errors`."""

    def __init__(self, errors: list[Diagnostic]) -> None:
        self.errors = errors

    def build(self, item: Item) -> ast.Expr:
        assert isinstance(item, Tree)
        match kind(item):
            case "number":
                return self.number(word(item, "NUMBER"))
            case "string":
                return ast.String(str(word(item, "STRING"))[1:-1], span=span(item))
            case "boolean":
                return ast.Boolean(token(item, "TRUE") is not None, span=span(item))
            case "name":
                return ast.Name(dotted(item), span=span(item))
            case "group":
                return self.build(trees(item)[0])
            case "negative":
                return ast.Negative(self.build(trees(item)[0]), span=span(item))
            case "call":
                return self._call(item)
            case _:
                return self._binary(item)

    def _binary(self, item: Item) -> ast.Binary:
        left, right = trees(item)
        op = str(word(item, "PLUS", "MINUS", "STAR", "SLASH"))
        return ast.Binary(cast(Literal["+", "-", "*", "/"], op), self.build(left), self.build(right), span=span(item))

    def _call(self, item: Item) -> ast.Call:
        name, arguments = trees(item)
        args, kwargs = self.arguments(arguments)
        return ast.Call(dotted(name), args, kwargs, function_span=span(name), span=span(item))

    def arguments(self, item: Item) -> tuple[tuple[ast.Expr, ...], tuple[ast.Keyword, ...]]:
        """Positional arguments come first."""
        args: list[ast.Expr] = []
        kwargs: list[ast.Keyword] = []
        for child in trees(item):
            if child.data == "keyword":
                kwargs.append(ast.Keyword(str(word(child, "NAME")), self.build(trees(child)[0]), span=span(child)))
                continue
            if kwargs:
                message = f"an argument without a name stands after `{kwargs[-1].name}=`"
                self.errors.append(Diagnostic("P020", message, span(child), help="put it first, or name it"))
            args.append(self.build(child))
        return tuple(args), tuple(kwargs)

    def number(self, written: Token) -> ast.Number:
        text = str(written)
        unit = text[-1] if text[-1] in "%KMB" else ""
        digits = text[: len(text) - len(unit)]
        value: int | float = 0
        if len(digits) > _LONGEST or not isfinite(float(digits)):
            message = f"the number `{shown(text)}` is too large or too long"
            self.errors.append(
                Diagnostic("P005", message, span_of(written), help=f"at most {_LONGEST} characters, below 1e308")
            )
        else:
            value = int(digits) if digits.isdigit() else float(digits)
        return ast.Number(value, cast(Literal["", "%", "K", "M", "B"], unit), span=span_of(written))


def dotted(item: Item) -> str:
    """`enc.qv`, of a `name`."""
    assert isinstance(item, Tree)
    return "".join(str(child) for child in item.children)


def name_of(item: Item) -> str:
    """The dotted name among the children of a statement."""
    found = only(item, "name")
    assert found is not None
    return dotted(found)
