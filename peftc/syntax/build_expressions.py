"""Parse trees of expressions to AST."""

from __future__ import annotations

from math import isfinite
from typing import Literal, cast

from lark import Token

from peftc.diagnostics import Diagnostic
from peftc.syntax import ast
from peftc.syntax.error_context import excerpt
from peftc.syntax.lexer import span_of
from peftc.syntax.parse_tree import Parse, dotted_name, optional_token, span, token, trees

_MAX_DIGITS = 40


class ExpressionBuilder:
    """Builds expressions; errors that the grammar cannot express are added to `errors`."""

    def __init__(self, errors: list[Diagnostic]) -> None:
        self.errors = errors

    def build(self, item: Parse) -> ast.Expr:
        match item.data:
            case "number":
                return self._number(token(item, "NUMBER"))
            case "string":
                return ast.String(str(token(item, "STRING"))[1:-1], span=span(item))
            case "boolean":
                return ast.Boolean(optional_token(item, "TRUE") is not None, span=span(item))
            case "name":
                return ast.Name(dotted_name(item), span=span(item))
            case "group":
                return self.build(trees(item)[0])
            case "negative":
                return ast.Negative(self.build(trees(item)[0]), span=span(item))
            case "call":
                name, arguments = trees(item)
                args, kwargs = self.arguments(arguments)
                return ast.Call(dotted_name(name), args, kwargs, function_span=span(name), span=span(item))
            case _:
                left, right = map(self.build, trees(item))
                op = cast(Literal["+", "-", "*", "/"], str(token(item, "PLUS", "MINUS", "STAR", "SLASH")))
                return ast.Binary(op, left, right, span=span(item))

    def arguments(self, item: Parse) -> tuple[tuple[ast.Expr, ...], tuple[ast.Keyword, ...]]:
        """Positional arguments, then named ones."""
        args: list[ast.Expr] = []
        kwargs: list[ast.Keyword] = []
        for child in trees(item):
            if child.data == "keyword":
                kwargs.append(ast.Keyword(str(token(child, "NAME")), self.build(trees(child)[0]), span=span(child)))
                continue
            if kwargs:
                message = f"positional argument after `{kwargs[-1].name}=`"
                self.errors.append(Diagnostic("P020", message, span(child), help="put it first, or name it"))
            args.append(self.build(child))
        return tuple(args), tuple(kwargs)

    def _number(self, literal: Token) -> ast.Number:
        text = str(literal)
        unit = text[-1] if text[-1] in "%KMB" else ""
        digits = text.removesuffix(unit)
        value: int | float = 0
        if len(digits) > _MAX_DIGITS or not isfinite(float(digits)):
            message = f"the number `{excerpt(text)}` is too large or too long"
            help_ = f"at most {_MAX_DIGITS} characters, below 1e308"
            self.errors.append(Diagnostic("P005", message, span_of(literal), help=help_))
        else:
            value = int(digits) if digits.isdigit() else float(digits)
        return ast.Number(value, cast(Literal["", "%", "K", "M", "B"], unit), span=span_of(literal))
