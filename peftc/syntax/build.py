"""Parse trees to AST, with the comments of each statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, cast

from lark import Token

from peftc.diagnostics import Diagnostic, Source
from peftc.syntax import ast
from peftc.syntax.build_expressions import ExpressionBuilder
from peftc.syntax.build_selectors import SelectorBuilder
from peftc.syntax.comments import CommentCursor
from peftc.syntax.lexer import span_of
from peftc.syntax.parse_tree import Parse, child, dotted_name, optional_child, optional_token, span, token, trees

_STATEMENTS = frozenset({"method", "use", "apply", "let", "edit", "train", "expect", "equation"})


class Builder:
    """Builds a `Spec` in the order of the text, since `comments` is a cursor."""

    def __init__(self, source: Source, comments: CommentCursor) -> None:
        self.errors: list[Diagnostic] = []
        self._source = source
        self._comments = comments
        self._expressions = ExpressionBuilder(self.errors)
        self._selectors = SelectorBuilder(self.errors)
        self.expression = self._expressions.build

    def spec(self, item: Parse) -> ast.Spec:
        header, *statements = trees(item)
        at = span(header)
        leading = self._comments.leading(at, at.end, first=True)
        trailing = self._comments.trailing(at)
        version = token(header, "NUMBER")
        if str(version) != "1":
            message = f"this spec is in version {version} of the language; this peftc reads version 1"
            self._error("P002", message, version, "write `peft 1`, or update peftc")
        return ast.Spec(
            1,
            tuple(self._statement(statement, first=False) for statement in statements),
            header=leading,
            header_trailing=trailing,
            closing=self._comments.closing(len(self._source.text) + 1),
            source=self._source,
            span=span(item),
        )

    def _statement(self, item: Parse, first: bool) -> Any:
        if item.data in ("edit", "method"):
            return self._block(item, first)
        build: Callable[[Parse], ast.Statement] = getattr(self, f"_{item.data}")
        at = span(item)
        leading = self._comments.leading(at, at.end, first)
        return replace(build(item), leading=leading, trailing=self._comments.trailing(at), span=at)

    # Blocks

    def _block(self, item: Parse, first: bool) -> ast.Edit | ast.Method:
        """An edit or a method, with the comments above it, in it and next to its braces."""
        params = optional_child(item, "params")
        opening, closing = (span_of(token(item, brace)) for brace in ("LBRACE", "RBRACE"))
        leading = self._comments.leading(span(item), opening.start if params is None else span(params).start, first)
        parameters = () if params is None else self._params(params)
        leading += self._comments.inner(opening.start)
        trailing = self._comments.trailing(opening)
        children = [child for child in trees(item) if child.data in _STATEMENTS]
        body = tuple(self._statement(child, first=not number) for number, child in enumerate(children))
        comments = self._comments.closing(closing.start, first=not body)
        last = self._comments.trailing(closing)
        if trailing is None:
            trailing = last
        elif last is not None:
            comments += (last,)
        block = self._edit(item, body) if item.data == "edit" else self._method(item, parameters, body)
        return replace(block, leading=leading, trailing=trailing, closing=comments, span=span(item))

    def _edit(self, item: Parse, body: tuple[Any, ...]) -> ast.Edit:
        name, per_task = child(item, "name"), optional_child(item, "per_task")
        if per_task is not None and str(token(per_task, "NAME")) != "task":
            word = token(per_task, "NAME")
            self._error("P023", f"expected `task` after `per`, found `{word}`", word)
        selector = self._selector(item)
        return ast.Edit(dotted_name(name), selector, body, per_task=per_task is not None, name_span=span(name))

    def _method(self, item: Parse, params: tuple[ast.Param, ...], body: tuple[Any, ...]) -> ast.Method:
        return ast.Method(str(token(item, "NAME")), params, body)

    def _params(self, item: Parse) -> tuple[ast.Param, ...]:
        params: list[ast.Param] = []
        for param, following in zip_longest(item.children, item.children[1:]):
            if isinstance(param, Token):
                continue
            at = span(param)
            leading = self._comments.leading(at, at.end, first=True)
            comma = isinstance(following, Token) and following.type == "COMMA"
            trailing = self._comments.trailing(span(following) if comma else at)
            value = self.expression(trees(param)[0])
            params.append(ast.Param(str(token(param, "NAME")), value, leading=leading, trailing=trailing, span=at))
        return tuple(params)

    # Statements of one line

    def _equation(self, item: Parse) -> ast.Equation:
        target = token(item, "NAME")
        op = cast(Literal["=", "+=", "*="], str(token(item, "EQUAL", "PLUS_EQUAL", "STAR_EQUAL")))
        return ast.Equation(str(target), op, self.expression(trees(item)[0]), target_span=span_of(target))

    def _let(self, item: Parse) -> ast.Let:
        name, value = trees(item)
        return ast.Let(dotted_name(name), self.expression(value))

    def _train(self, item: Parse) -> ast.Train:
        name = child(item, "name")
        tokens = child(item, "states").children
        states = tuple(str(state) for state in tokens if isinstance(state, Token) and state.type == "NAME")
        return ast.Train(dotted_name(name), states, self._selector(item), name_span=span(name))

    def _expect(self, item: Parse) -> ast.Expect:
        left, *right = map(self.expression, trees(item))
        op = optional_token(item, "COMPARISON")
        if op is None:
            return ast.Expect(left)
        return ast.Expect(left, cast(Literal["==", "!=", "<", "<=", ">", ">="], str(op)), right[0])

    def _use(self, item: Parse) -> ast.Use:
        words = [word for word in item.children if isinstance(word, Token) and word.type in {"NAME", "STRING"}]
        name, file = words[0], words[-1]
        if file.type == "STRING":
            return ast.Use(str(name), str(file)[1:-1])
        if str(file) != "std":
            help_ = f'`from std`, or from a file: `from "{file}.peft"`'
            self._error("P022", f"expected `std` or a file in quotes, found `{file}`", file, help_)
        return ast.Use(str(name))

    def _apply(self, item: Parse) -> ast.Apply:
        arguments, alias = optional_child(item, "arguments"), optional_child(item, "name")
        args, kwargs = self._expressions.arguments(arguments) if arguments is not None else ((), ())
        for value in args:
            help_ = "write `NAME=value` for each parameter of the method"
            self.errors.append(Diagnostic("P020", "arguments of a method are named", value.span, help=help_))
        selector = self._selectors.of_statement(item)
        return ast.Apply(str(token(item, "NAME")), kwargs, selector, None if alias is None else dotted_name(alias))

    def _selector(self, item: Parse) -> ast.Selector:
        selector = self._selectors.of_statement(item)
        assert selector is not None  # by the grammar
        return selector

    def _error(self, code: str, message: str, at: Token, help_: str | None = None) -> None:
        self.errors.append(Diagnostic(code, message, span_of(at), help=help_))
