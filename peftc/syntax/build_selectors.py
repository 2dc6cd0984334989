"""Selectors out of the parser's tree."""

from __future__ import annotations

from lark import Token, Tree

from peftc.diagnostics import Diagnostic
from peftc.syntax import ast
from peftc.syntax.nodes import Item, kind, only, span, token, trees, word
from peftc.syntax.tokens import span_of

SELECTORS = frozenset({"path", "glob", "union", "difference", "selection"})
_LARGEST = 9  # digits of an index


class Selectors:
    """Builds selectors; what the grammar cannot say of them is collected in `errors`."""

    def __init__(self, errors: list[Diagnostic]) -> None:
        self.errors = errors

    def build(self, item: Item) -> ast.Selector:
        assert isinstance(item, Tree)
        match kind(item):
            case "path":
                return ast.Path(tuple(map(self._step, trees(item))), span=span(item))
            case "glob":
                return self._glob(item)
            case "selection":
                return self.build(trees(item)[0])
            case "union":
                return ast.Union(tuple(map(self.build, trees(item))), span=span(item))
            case _:
                left, right = map(self.build, trees(item))
                return ast.Difference(left, right, span=span(item))

    def of(self, statement: Item) -> ast.Selector | None:
        """The selector among the children of a statement."""
        found = next((child for child in trees(statement) if child.data in SELECTORS), None)
        return None if found is None else self.build(found)

    def _glob(self, item: Item) -> ast.Glob:
        pattern = str(word(item, "STRING"))[1:-1]
        if not pattern.strip():
            self.errors.append(
                Diagnostic("P016", "this pattern is empty", span(item), help='e.g. "model.layers.*.mlp"')
            )
        return ast.Glob(pattern, span=span(item))

    def _step(self, item: Item) -> ast.Step:
        indices = only(item, "indices")
        found = None if indices is None else tuple(map(self._index, trees(indices)))
        return ast.Step(str(word(item, "NAME", "DOUBLE_STAR")), found, span=span(item))

    def _index(self, item: Item) -> ast.Index:
        assert isinstance(item, Tree)
        if token(item, "STAR"):
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
        start, stop = (ends[0], ends[0]) if len(ends) == 1 else ends
        if start is not None and stop is not None and start > stop and (start < 0) == (stop < 0):
            help_ = f"did you mean `{stop}..{start}`?"
            self.errors.append(Diagnostic("P017", f"the range `{start}..{stop}` is empty", span(item), help=help_))
        return ast.Index(start, stop, span=span(item))

    def _integer(self, written: Token, negative: bool) -> int:
        text = str(written)
        if text.isdigit() and len(text) <= _LARGEST:
            return -int(text) if negative else int(text)
        help_ = "a layer is counted from 0, or from the end: `-1` is the last"
        self.errors.append(Diagnostic("P017", f"`{text}` is no index", span_of(written), help=help_))
        return 0
