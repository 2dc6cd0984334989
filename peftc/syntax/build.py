"""Parse trees to AST, with the comments of each statement."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from math import isfinite
from typing import Any, Literal, cast

from lark import Token, Tree

from peftc.diagnostics import Diagnostic, Source, Span
from peftc.syntax import ast
from peftc.syntax.lexer import CommentCursor, excerpt, span_of

Parse = Tree[Token]


def span(item: Parse | Token) -> Span:
    if isinstance(item, Token):
        return span_of(item)
    at = item.meta
    return Span(at.start_pos, at.end_pos, at.line, at.column, at.end_line, at.end_column)


def trees(item: Parse) -> list[Parse]:
    """The children that are trees."""
    return [child for child in item.children if isinstance(child, Tree)]


def optional_child(item: Parse, *rules: str) -> Parse | None:
    return next((child for child in trees(item) if child.data in rules), None)


def child(item: Parse, *rules: str) -> Parse:
    """The child of one of the grammar rules; the grammar guarantees that it exists."""
    return next(child for child in trees(item) if child.data in rules)


def optional_token(item: Parse, *types: str) -> Token | None:
    return next((child for child in item.children if isinstance(child, Token) and child.type in types), None)


def token(item: Parse, *types: str) -> Token:
    """The first child that is a token of one of `types`; the grammar guarantees that it exists."""
    return next(child for child in item.children if isinstance(child, Token) and child.type in types)


def dotted_name(item: Parse) -> str:
    """The text of a `name`: `enc.qv`."""
    return "".join(str(child) for child in item.children)


def deeper_than(item: Parse, limit: int) -> Parse | Token | None:
    """A descendant more than `limit` levels down. Not recursive: a text may nest without bound."""
    stack: list[tuple[Parse | Token, int]] = [(item, 0)]
    while stack:
        node, level = stack.pop()
        if level > limit:
            return node
        if isinstance(node, Tree):
            stack.extend((child, level + 1) for child in node.children)
    return None


_STATEMENTS = frozenset({"method", "use", "apply", "let", "edit", "train", "expect", "equation"})
_SELECTORS = ("path", "glob", "union", "difference", "selection")
_MAX_NUMBER, _MAX_INDEX = 40, 9  # characters


class Builder:
    """Builds a `Spec` in the order of the text, since `comments` is a cursor."""

    def __init__(self, source: Source, comments: CommentCursor) -> None:
        self.errors: list[Diagnostic] = []  # those that the grammar cannot express
        self._source = source
        self._comments = comments

    def spec(self, item: Parse) -> ast.Spec:
        header, *statements = trees(item)
        at = span(header)
        leading = self._comments.leading(at, at.end, first=True)
        trailing = self._comments.trailing(at)
        version = token(header, "NUMBER")
        if str(version) != "1":
            message = f"this spec is in version {version} of the language; this peftc reads version 1"
            self._error("P002", message, span_of(version), "write `peft 1`, or update peftc")
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

    def _error(self, code: str, message: str, at: Span, help_: str | None = None) -> None:
        self.errors.append(Diagnostic(code, message, at, help=help_))

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
        if trailing and last:
            comments += (last,)
        method = item.data == "method"
        block = ast.Method(str(token(item, "NAME")), parameters, body) if method else self._edit(item, body)
        return replace(block, leading=leading, trailing=trailing or last, closing=comments, span=span(item))

    def _edit(self, item: Parse, body: tuple[Any, ...]) -> ast.Edit:
        name, per_task = child(item, "name"), optional_child(item, "per_task")
        if per_task is not None and (word := token(per_task, "NAME")) != "task":
            self._error("P023", f"expected `task` after `per`, found `{word}`", span_of(word))
        selector = self._selector(child(item, *_SELECTORS))
        return ast.Edit(dotted_name(name), selector, body, per_task=per_task is not None, name_span=span(name))

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
        return ast.Train(dotted_name(name), states, self._selector(child(item, *_SELECTORS)), name_span=span(name))

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
            self._error("P022", f"expected `std` or a file in quotes, found `{file}`", span_of(file), help_)
        return ast.Use(str(name))

    def _apply(self, item: Parse) -> ast.Apply:
        arguments, alias = optional_child(item, "arguments"), optional_child(item, "name")
        args, kwargs = self._arguments(arguments) if arguments is not None else ((), ())
        for value in args:
            help_ = "write `NAME=value` for each parameter of the method"
            self._error("P020", "arguments of a method are named", value.span, help_)
        at = optional_child(item, *_SELECTORS)
        selector = None if at is None else self._selector(at)
        return ast.Apply(str(token(item, "NAME")), kwargs, selector, None if alias is None else dotted_name(alias))

    # Expressions

    def expression(self, item: Parse) -> ast.Expr:
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
                return self.expression(trees(item)[0])
            case "negative":
                return ast.Negative(self.expression(trees(item)[0]), span=span(item))
            case "call":
                name, arguments = trees(item)
                args, kwargs = self._arguments(arguments)
                return ast.Call(dotted_name(name), args, kwargs, function_span=span(name), span=span(item))
            case _:
                left, right = map(self.expression, trees(item))
                op = cast(Literal["+", "-", "*", "/"], str(token(item, "PLUS", "MINUS", "STAR", "SLASH")))
                return ast.Binary(op, left, right, span=span(item))

    def _arguments(self, item: Parse) -> tuple[tuple[ast.Expr, ...], tuple[ast.Keyword, ...]]:
        """Positional arguments, then named ones."""
        args: list[ast.Expr] = []
        kwargs: list[ast.Keyword] = []
        for argument in trees(item):
            if argument.data == "keyword":
                value = self.expression(trees(argument)[0])
                kwargs.append(ast.Keyword(str(token(argument, "NAME")), value, span=span(argument)))
                continue
            if kwargs:
                message = f"positional argument after `{kwargs[-1].name}=`"
                self._error("P020", message, span(argument), "put it first, or name it")
            args.append(self.expression(argument))
        return tuple(args), tuple(kwargs)

    def _number(self, literal: Token) -> ast.Number:
        text = str(literal)
        unit = text[-1] if text[-1] in "%KMB" else ""
        digits = text.removesuffix(unit)
        value: int | float = 0
        if len(digits) > _MAX_NUMBER or not isfinite(float(digits)):
            message = f"the number `{excerpt(text)}` is too large or too long"
            self._error("P005", message, span_of(literal), f"at most {_MAX_NUMBER} characters, below 1e308")
        else:
            value = int(digits) if digits.isdigit() else float(digits)
        return ast.Number(value, cast(Literal["", "%", "K", "M", "B"], unit), span=span_of(literal))

    # Selectors

    def _selector(self, item: Parse) -> ast.Selector:
        match item.data:
            case "path":
                return ast.Path(tuple(map(self._step, trees(item))), span=span(item))
            case "glob":
                pattern = str(token(item, "STRING"))[1:-1]
                if not pattern.strip():
                    self._error("P016", "this pattern is empty", span(item), 'e.g. "model.layers.*.mlp"')
                return ast.Glob(pattern, span=span(item))
            case "selection":
                return self._selector(trees(item)[0])
            case "union":
                return ast.Union(tuple(map(self._selector, trees(item))), span=span(item))
            case _:
                left, right = map(self._selector, trees(item))
                return ast.Difference(left, right, span=span(item))

    def _step(self, item: Parse) -> ast.Step:
        indices = optional_child(item, "indices")
        built = None if indices is None else tuple(map(self._index, trees(indices)))
        return ast.Step(str(token(item, "NAME", "DOUBLE_STAR")), built, span=span(item))

    def _index(self, item: Parse) -> ast.Index:
        if optional_token(item, "STAR"):
            return ast.Index(None, None, span=span(item))
        ends: list[int | None] = [None]
        negative = False
        for part in item.children:
            assert isinstance(part, Token)
            if part.type == "DOT_DOT":
                ends.append(None)
            elif part.type == "NUMBER":
                ends[-1] = -self._integer(part) if negative else self._integer(part)
            negative = part.type == "MINUS"
        start, stop = ends[0], ends[-1]
        if start is not None and stop is not None and start > stop and (start < 0) == (stop < 0):
            self._error("P017", f"the range `{start}..{stop}` is empty", span(item), f"did you mean `{stop}..{start}`?")
        return ast.Index(start, stop, span=span(item))

    def _integer(self, literal: Token) -> int:
        text = str(literal)
        if text.isdigit() and len(text) <= _MAX_INDEX:
            return int(text)
        help_ = "layers count from 0, or from the end: `-1` is the last"
        self._error("P017", f"`{text}` is not an index", span_of(literal), help_)
        return 0
