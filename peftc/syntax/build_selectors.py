"""Parse trees of selectors to AST."""

from __future__ import annotations

from lark import Token

from peftc.diagnostics import Diagnostic
from peftc.syntax import ast
from peftc.syntax.lexer import span_of
from peftc.syntax.parse_tree import Parse, optional_child, optional_token, span, token, trees

_RULES = frozenset({"path", "glob", "union", "difference", "selection"})
_MAX_DIGITS = 9


class SelectorBuilder:
    """Builds selectors; errors that the grammar cannot express are added to `errors`."""

    def __init__(self, errors: list[Diagnostic]) -> None:
        self.errors = errors

    def of_statement(self, statement: Parse) -> ast.Selector | None:
        """The selector among the children of a statement."""
        return next((self.build(child) for child in trees(statement) if child.data in _RULES), None)

    def build(self, item: Parse) -> ast.Selector:
        match item.data:
            case "path":
                return ast.Path(tuple(map(self._step, trees(item))), span=span(item))
            case "glob":
                pattern = str(token(item, "STRING"))[1:-1]
                if not pattern.strip():
                    help_ = 'e.g. "model.layers.*.mlp"'
                    self.errors.append(Diagnostic("P016", "this pattern is empty", span(item), help=help_))
                return ast.Glob(pattern, span=span(item))
            case "selection":
                return self.build(trees(item)[0])
            case "union":
                return ast.Union(tuple(map(self.build, trees(item))), span=span(item))
            case _:
                left, right = map(self.build, trees(item))
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
        for child in item.children:
            assert isinstance(child, Token)
            if child.type == "DOT_DOT":
                ends.append(None)
            elif child.type == "NUMBER":
                ends[-1] = self._integer(child, negative)
            negative = child.type == "MINUS"
        start, stop = ends[0], ends[-1]
        if start is not None and stop is not None and start > stop and (start < 0) == (stop < 0):
            help_ = f"did you mean `{stop}..{start}`?"
            self.errors.append(Diagnostic("P017", f"the range `{start}..{stop}` is empty", span(item), help=help_))
        return ast.Index(start, stop, span=span(item))

    def _integer(self, literal: Token, negative: bool) -> int:
        text = str(literal)
        if text.isdigit() and len(text) <= _MAX_DIGITS:
            return -int(text) if negative else int(text)
        help_ = "layers count from 0, or from the end: `-1` is the last"
        self.errors.append(Diagnostic("P017", f"`{text}` is not an index", span_of(literal), help=help_))
        return 0
