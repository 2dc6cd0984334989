"""Statements out of the parser's tree, with the comments that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, TypeVar, cast

from lark import Token, Tree

from peftc.diagnostics import Diagnostic, Source, Span
from peftc.syntax import ast
from peftc.syntax.build_expressions import Expressions, name_of
from peftc.syntax.build_selectors import Selectors
from peftc.syntax.comments import Comments
from peftc.syntax.nodes import Item, only, span, token, trees, word
from peftc.syntax.tokens import span_of

Simple = TypeVar("Simple", ast.Equation, ast.Let, ast.Train, ast.Expect, ast.Use, ast.Apply)
_STATEMENTS = frozenset({"method", "use", "apply", "let", "edit", "train", "expect", "equation"})


class Builder:
    """Builds a `Spec`, from its first statement to the last, since `comments` is read in that order."""

    def __init__(self, source: Source, comments: Comments) -> None:
        self.errors: list[Diagnostic] = []
        self._source = source
        self._comments = comments
        self._expressions = Expressions(self.errors)
        self._selectors = Selectors(self.errors)
        self.expression = self._expressions.build

    def spec(self, item: Tree[Token]) -> ast.Spec:
        header, *statements = trees(item)
        at = span(header)
        above = (*self._comments.above(at.start, at.line, first=True), *self._comments.inside(at.end))
        beside = self._comments.beside(at.end, at.end_line)
        version = self._version(word(header, "NUMBER"))
        body = [self._statement(statement, first=False) for statement in statements]
        end = len(self._source.text)
        closing = self._comments.above(end + 1, 0)
        return ast.Spec(
            version,
            cast(tuple[ast.TopLevel, ...], tuple(body)),
            header=above,
            header_trailing=beside,
            closing=closing,
            source=self._source,
            span=span(item),
        )

    def _version(self, written: Token) -> int:
        if str(written) != "1":
            message = f"this spec is in version {written} of the language; this peftc reads version 1"
            self.errors.append(Diagnostic("P002", message, span_of(written), help="write `peft 1`, or update peftc"))
        return 1

    def _statement(self, item: Tree[Token], first: bool) -> Any:
        build: Callable[[Tree[Token], bool], ast.Statement] = getattr(self, f"_{item.data}")
        return build(item, first)

    # Blocks

    def _edit(self, item: Tree[Token], first: bool) -> ast.Edit:
        above, beside = self._opened(item, first)
        selector = self._selectors.of(item)
        assert selector is not None
        body = self._body(item)
        closing, beside = self._closed(item, beside)
        return ast.Edit(
            name_of(item),
            selector,
            cast(tuple[ast.Equation | ast.Let, ...], body),
            per_task=self._per_task(only(item, "per_task")),
            name_span=self._name_span(item),
            leading=above,
            trailing=beside,
            closing=closing,
            span=span(item),
        )

    def _method(self, item: Tree[Token], first: bool) -> ast.Method:
        params = only(item, "params")
        above: tuple[str, ...] = ()
        if params is not None:
            at, inner = span(item), span(params)
            above = (*self._comments.above(at.start, at.line, first), *self._comments.inside(inner.start))
        built = self._params(params)
        more, beside = self._opened(item, first or params is not None)
        body = self._body(item)
        closing, beside = self._closed(item, beside)
        return ast.Method(
            str(word(item, "NAME")),
            built,
            cast(tuple[ast.Edit | ast.Train | ast.Expect | ast.Apply | ast.Let, ...], body),
            leading=above + more,
            trailing=beside,
            closing=closing,
            span=span(item),
        )

    def _params(self, item: Tree[Token] | None) -> tuple[ast.Param, ...]:
        found: list[ast.Param] = []
        children: list[Item] = [] if item is None else item.children
        for child, following in zip_longest(children, children[1:]):
            if isinstance(child, Token):
                continue
            at = span(child)
            above = (*self._comments.above(at.start, at.line, first=True), *self._comments.inside(at.end))
            value = self.expression(trees(child)[0])
            end = span_of(following) if isinstance(following, Token) and following.type == "COMMA" else at
            beside = self._comments.beside(end.end, end.end_line)
            found.append(ast.Param(str(word(child, "NAME")), value, leading=above, trailing=beside, span=at))
        return tuple(found)

    def _opened(self, item: Tree[Token], first: bool) -> tuple[tuple[str, ...], str | None]:
        """The comments above and within the head of a block, and the one beside its `{`."""
        at, brace = span(item), span_of(word(item, "LBRACE"))
        above = (*self._comments.above(at.start, at.line, first), *self._comments.inside(brace.start))
        return above, self._comments.beside(brace.end, brace.line)

    def _body(self, item: Tree[Token]) -> tuple[ast.Statement, ...]:
        return tuple(self._statement(child, first=not number) for number, child in enumerate(self._inner(item)))

    def _inner(self, item: Tree[Token]) -> list[Tree[Token]]:
        return [child for child in trees(item) if child.data in _STATEMENTS]

    def _closed(self, item: Tree[Token], beside: str | None) -> tuple[tuple[str, ...], str | None]:
        """The comments before the `}` of a block, and the one that is printed beside its head."""
        brace = span_of(word(item, "RBRACE"))
        closing = self._comments.above(brace.start, 0, first=len(self._inner(item)) == 0)
        last = self._comments.beside(brace.end, brace.line)
        if last is None or beside is None:
            return closing, beside or last
        return (*closing, last), beside

    def _per_task(self, item: Tree[Token] | None) -> bool:
        if item is None:
            return False
        name = word(item, "NAME")
        if str(name) != "task":
            self.errors.append(Diagnostic("P023", f"expected `task` after `per`, found `{name}`", span_of(name)))
        return True

    # Statements of one line

    def _simple(self, item: Tree[Token], first: bool, build: Callable[[], Simple]) -> Simple:
        at = span(item)
        above = (*self._comments.above(at.start, at.line, first), *self._comments.inside(at.end))
        beside = self._comments.beside(at.end, at.end_line)
        return replace(build(), leading=above, trailing=beside, span=at)

    def _equation(self, item: Tree[Token], first: bool) -> ast.Equation:
        target, op = word(item, "NAME"), str(word(item, "EQUAL", "PLUS_EQUAL", "STAR_EQUAL"))
        value = self.expression(trees(item)[0])
        operator = cast(Literal["=", "+=", "*="], op)
        return self._simple(
            item, first, lambda: ast.Equation(str(target), operator, value, target_span=span_of(target))
        )

    def _let(self, item: Tree[Token], first: bool) -> ast.Let:
        return self._simple(item, first, lambda: ast.Let(name_of(item), self.expression(trees(item)[1])))

    def _train(self, item: Tree[Token], first: bool) -> ast.Train:
        selector, states = self._selectors.of(item), only(item, "states")
        assert selector is not None
        assert states is not None
        names = tuple(str(child) for child in states.children if isinstance(child, Token) and child.type == "NAME")
        name_span = self._name_span(item)
        return self._simple(item, first, lambda: ast.Train(name_of(item), names, selector, name_span=name_span))

    def _expect(self, item: Tree[Token], first: bool) -> ast.Expect:
        values = [self.expression(child) for child in trees(item)]
        op = token(item, "COMPARISON")
        compared = None if op is None else cast(Literal["==", "!=", "<", "<=", ">", ">="], str(op))
        return self._simple(item, first, lambda: ast.Expect(values[0], compared, values[1] if compared else None))

    def _use(self, item: Tree[Token], first: bool) -> ast.Use:
        name, *rest = [
            child for child in item.children if isinstance(child, Token) and child.type in {"NAME", "STRING"}
        ]
        return self._simple(item, first, lambda: ast.Use(str(name), self._file(rest)))

    def _file(self, rest: Sequence[Token]) -> str | None:
        found = rest[-1]
        if found.type == "STRING":
            return str(found)[1:-1]
        if str(found) != "std":
            help_ = f'`from std`, or from a file: `from "{found}.peft"`'
            self.errors.append(
                Diagnostic("P022", f"expected `std` or a file in quotes, found `{found}`", span_of(found), help=help_)
            )
        return None

    def _apply(self, item: Tree[Token], first: bool) -> ast.Apply:
        arguments, alias = only(item, "arguments"), only(item, "name")
        args, kwargs = self._expressions.arguments(arguments) if arguments is not None else ((), ())
        for value in args:
            help_ = "write `NAME=value` for each parameter of the method"
            self.errors.append(Diagnostic("P020", "arguments of a method have names", value.span, help=help_))
        at = self._selectors.of(item)
        found = None if alias is None else name_of(item)
        return self._simple(item, first, lambda: ast.Apply(str(word(item, "NAME")), kwargs, at, found))

    def _name_span(self, item: Item) -> Span:
        found = only(item, "name")
        assert found is not None
        return span(found)
