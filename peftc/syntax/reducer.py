"""A text without errors to expressions, selectors and the phrases of its statements.

The LALR(1) tables run over the words of the text. Each reduction makes what its rule means, at
once: there is no tree in between. Statements have comments, which are read in the order of the
text, so their phrases are left to `peftc.syntax.build`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any, Literal, NamedTuple, cast

from peftc.diagnostics import Diagnostic, Span
from peftc.syntax import ast
from peftc.syntax.ast import AnyNode
from peftc.syntax.lexer import NEED_VERSION_2, ONE_VALUE, Lexemes, excerpt
from peftc.syntax.tables import END, Rule, tables
from peftc.syntax.walk import MAX_PATHS, count_paths

_MAX_NUMBER, _MAX_INDEX = 40, 9  # characters
_SKIPPED = tables().ignored | {"COMMENT"}


class Phrase(NamedTuple):
    """What a rule has matched: numbers of words, and what their phrases mean."""

    rule: str
    children: list[Any]
    first: int
    last: int


_new = tuple.__new__  # of named tuples, whose own constructor takes twice as long
Value = Any  # the number of a word, a node, a phrase, or a list of these, for the rule around it
Make = Callable[[list[Value], int, int], Value]  # of the children, and the first and the last word


class Reducer:
    """Runs the tables over `lexemes`, and collects the errors that the grammar cannot express."""

    def __init__(self, lexemes: Lexemes) -> None:
        self.errors: list[Diagnostic] = []
        self._words, self._types = lexemes.words, lexemes.types
        self._span, self._version = lexemes.span, lexemes.version

    def reduce(self, start: str) -> Value | None:
        """What the text means as a `start`; None at a syntax error."""
        end, state = tables().short_ends[start], tables().short_starts[start]
        states, values, firsts = [state], list[Value](), list[int]()
        make = {rule: self._make(rule) for rule in tables().rules}
        skipped = _SKIPPED
        last = 0  # the word before the present one
        for at, terminal in enumerate(self._types):
            if terminal in skipped:
                continue
            action: Any
            while (action := state.get(terminal)).__class__ is Rule:
                size = action.size
                if size > 1:
                    rest = 1 - size
                    children = values[-size:]
                    del values[rest:], states[rest:], firsts[rest:]
                    values[-1] = make[action](children, firsts[-1], last)
                elif not action.passes:
                    values[-1] = make[action](values[-1:], firsts[-1], last)
                states[-1] = state = states[-2][action.origin]
                if terminal == END and state is end:
                    return values[-1]
            if action is None:
                return None
            state = action
            states.append(action)
            values.append(at)
            firsts.append(at)
            last = at
        return None

    def _make(self, rule: Rule) -> Make:
        """What a reduction makes."""
        if rule.inlined:
            return _grow if rule.several else _children
        make: Make = getattr(self, f"_{rule.origin}", None) or _phrase(rule.origin)
        return make if not rule.several else lambda children, first, last: make(_splice(children), first, last)

    def _error(self, code: str, message: str, at: Span, help_: str | None = None) -> None:
        self.errors.append(Diagnostic(code, message, at, help=help_))

    # Expressions

    def _expression(self, children: list[Value], first: int, last: int) -> Value:
        return children[0]

    def _group(self, children: list[Value], first: int, last: int) -> Value:
        return children[1]

    def _string(self, children: list[Value], first: int, last: int) -> ast.String:
        return ast.build(ast.String, value=self._words[first][1:-1], span=self._span(first, last))

    def _boolean(self, children: list[Value], first: int, last: int) -> ast.Boolean:
        return ast.build(ast.Boolean, value=self._types[first] == "TRUE", span=self._span(first, last))

    def _name(self, children: list[Value], first: int, last: int) -> ast.Name:
        words = self._words
        text = words[first] if first == last else "".join([words[part] for part in children])
        return ast.build(ast.Name, id=text, span=self._span(first, last))

    def _negative(self, children: list[Value], first: int, last: int) -> ast.Negative:
        return ast.build(ast.Negative, operand=children[1], span=self._span(first, last))

    def _add(self, children: list[Value], first: int, last: int) -> ast.Binary:
        left, op, right = children
        return ast.build(ast.Binary, op=self._words[op], left=left, right=right, span=self._span(first, last))

    _multiply = _add
    _matmul = _add

    def _list(self, children: list[Value], first: int, last: int) -> ast.List:
        return self._new(ast.List(tuple(children[1:-1:2]), span=self._span(first, last)), "a list", ONE_VALUE)

    def _pair(self, children: list[Value], first: int, last: int) -> ast.Pair:
        return self._new(ast.Pair(children[1], children[3], span=self._span(first, last)), "a pair")

    def _item(self, children: list[Value], first: int, last: int) -> ast.Item:
        value, _, *indices = children
        return self._new(ast.Item(value, tuple(indices[:-1:2]), span=self._span(first, last)), "an index")

    def _attribute(self, children: list[Value], first: int, last: int) -> ast.Attribute:
        value, _, name = children
        return self._new(ast.Attribute(value, self._words[name], span=self._span(first, last)), "an attribute")

    def _new(self, node: AnyNode, kind: str, help_: str = NEED_VERSION_2) -> AnyNode:
        """A node that version 1 of the language does not have."""
        if self._version == "1":
            message = f"{kind} in an expression belongs to version 2 of the language"
            self._error("P028", message, node.span, help_)
        return node

    def _call(self, children: list[Value], first: int, last: int) -> ast.Call:
        name, (args, kwargs) = children
        span = self._span(first, last)
        return ast.build(ast.Call, function=name.id, args=args, kwargs=kwargs, function_span=name.span, span=span)

    def _binding(self, children: list[Value], first: int, last: int) -> ast.Binding:
        name, _, count = children
        name_span = self._span(name, name)
        return ast.build(
            ast.Binding, name=self._words[name], count=count, name_span=name_span, span=self._span(first, last)
        )

    def _keyword(self, children: list[Value], first: int, last: int) -> ast.Keyword:
        name, _, value = children
        return ast.build(ast.Keyword, name=self._words[name], value=value, span=self._span(first, last))

    def _arguments(self, children: list[Value], first: int, last: int) -> tuple[tuple[ast.Expr, ...], ...]:
        """Positional arguments, then named ones. Every other child is a bracket or a comma."""
        arguments = children[1:-1:2]
        named = [type(value) is ast.Keyword for value in arguments]
        count = len(arguments) - sum(named)
        if any(named[:count]):
            self._check_order(children)
            arguments.sort(key=lambda value: type(value) is ast.Keyword)
        return tuple(arguments[:count]), tuple(arguments[count:])

    def _check_order(self, children: list[Value]) -> None:
        keyword: ast.Keyword | None = None
        for before, value, behind in zip(children[::2], children[1::2], children[2::2], strict=False):
            if isinstance(value, ast.Keyword):
                keyword = value
            elif keyword is not None:
                at = self._between(before, behind)
                message = f"positional argument after `{keyword.name}=`"
                error = Diagnostic("P020", message, at, help="put it first, or name it")
                starts = [error.span.start if error.span else 0 for error in self.errors]
                # Before the errors in the argument, which are older.
                number = next((number for number, start in enumerate(starts) if start >= at.start), len(starts))
                self.errors.insert(number, error)

    def _between(self, first: int, last: int) -> Span:
        """The place of what stands between two words."""
        inner = [at for at in range(first + 1, last) if self._types[at] not in _SKIPPED]
        return self._span(inner[0], inner[-1])

    def _number(self, children: list[Value], first: int, last: int) -> ast.Number:
        text = self._words[first]
        span = self._span(first, last)
        if text.isdigit() and len(text) <= _MAX_NUMBER:
            return ast.build(ast.Number, value=int(text), span=span)
        unit = text[-1] if text[-1] in "%KMB" else ""
        digits = text.removesuffix(unit)
        value: int | float = 0
        if len(digits) > _MAX_NUMBER or not isfinite(float(digits)):
            message = f"the number `{excerpt(text)}` is too large or too long"
            self._error("P005", message, span, f"at most {_MAX_NUMBER} characters, below 1e308")
        else:
            value = int(digits) if digits.isdigit() else float(digits)
        return ast.Number(value, cast(Literal["", "%", "K", "M", "B"], unit), span=span)

    # Selectors

    def _path(self, children: list[Value], first: int, last: int) -> ast.Path | ast.BracedPath:
        steps, span = tuple(children[::2]), self._span(first, last)
        if all(type(step) is ast.Step for step in steps):
            return ast.build(ast.Path, steps=steps, optional=False, span=span)
        path = ast.BracedPath(steps, span=span)
        if count_paths(path) > MAX_PATHS:
            self._error("P016", f"these braces are short for more than {MAX_PATHS} paths", span, "write several edits")
            return ast.Path(steps[:1], span=span)
        return path

    def _braces(self, children: list[Value], first: int, last: int) -> ast.Braces:
        return ast.Braces(tuple(children[1:-1:2]), span=self._span(first, last))

    def _optional(self, children: list[Value], first: int, last: int) -> ast.Path | ast.BracedPath | ast.Glob:
        return replace(children[0], optional=True, span=self._span(first, last))

    def _step(self, children: list[Value], first: int, last: int) -> ast.Step:
        indices = children[1] if len(children) > 1 else None
        return ast.build(ast.Step, name=self._words[first], indices=indices, span=self._span(first, last))

    def _indices(self, children: list[Value], first: int, last: int) -> tuple[ast.Index, ...]:
        return tuple(children[1::2])

    def _index(self, children: list[Value], first: int, last: int) -> ast.Index:
        span = self._span(first, last)
        ends: list[int | None] = [None]
        negative = False
        for word in children:
            terminal = self._types[word]
            if terminal == "DOT_DOT":
                ends.append(None)
            elif terminal == "NUMBER":
                ends[-1] = -self._integer(word) if negative else self._integer(word)
            negative = terminal == "MINUS"
        start, stop = ends[0], ends[-1]
        if start is not None and stop is not None and start > stop and (start < 0) == (stop < 0):
            self._error("P017", f"the range `{start}..{stop}` is empty", span, f"did you mean `{stop}..{start}`?")
        return ast.build(ast.Index, start=start, stop=stop, span=span)

    def _integer(self, word: int) -> int:
        text = self._words[word]
        if text.isdigit() and len(text) <= _MAX_INDEX:
            return int(text)
        help_ = "layers count from 0, or from the end: `-1` is the last"
        self._error("P017", f"`{text}` is not an index", self._span(word, word), help_)
        return 0

    def _glob(self, children: list[Value], first: int, last: int) -> ast.Glob:
        pattern, span = self._words[first][1:-1], self._span(first, last)
        if not pattern.strip():
            self._error("P016", "this pattern is empty", span, 'e.g. "model.layers.*.mlp"')
        return ast.build(ast.Glob, pattern=pattern, optional=False, span=span)

    _selection = _group

    def _union(self, children: list[Value], first: int, last: int) -> ast.Union:
        return ast.build(ast.Union, arms=tuple(children[::2]), span=self._span(first, last))

    def _difference(self, children: list[Value], first: int, last: int) -> ast.Difference:
        left, _, right = children
        return ast.build(ast.Difference, left=left, right=right, span=self._span(first, last))


def _children(children: list[Value], first: int, last: int) -> list[Value]:
    return children


def _grow(children: list[Value], first: int, last: int) -> list[Value]:
    """The children of a rule that is recursive on its left: the list in front grows in place."""
    front = children[0]
    if type(front) is not list:
        return _splice(children)
    front += children[1:]
    return front


def _splice(children: list[Value]) -> list[Value]:
    """The children, with those of lists in their place."""
    spliced: list[Value] = []
    for child in children:
        if type(child) is list:
            spliced += child
        else:
            spliced.append(child)
    return spliced


def _phrase(rule: str) -> Make:
    return lambda children, first, last: _new(Phrase, (rule, children, first, last))
