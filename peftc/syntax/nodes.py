"""Reading Lark's trees: children by kind, and the span of a subtree."""

from __future__ import annotations

from collections.abc import Iterator

from lark import Token, Tree

from peftc.diagnostics import Span
from peftc.syntax.tokens import span_of

Item = Tree[Token] | Token


def span(item: Item) -> Span:
    """From the first to the last word of a subtree."""
    if isinstance(item, Token):
        return span_of(item)
    at = item.meta
    return Span(at.start_pos, at.end_pos, at.line, at.column, at.end_line, at.end_column)


def kind(item: Item) -> str:
    """`data` of a tree, `type` of a token."""
    return item.type if isinstance(item, Token) else str(item.data)


def trees(item: Item) -> list[Tree[Token]]:
    """The children that are trees."""
    return [] if isinstance(item, Token) else [child for child in item.children if isinstance(child, Tree)]


def only(item: Item, name: str) -> Tree[Token] | None:
    """The child of this name, if there is one."""
    return next((child for child in trees(item) if child.data == name), None)


def token(item: Item, *types: str) -> Token | None:
    """The first child that is a token of one of `types`."""
    children = [] if isinstance(item, Token) else item.children
    return next((child for child in children if isinstance(child, Token) and child.type in types), None)


def word(item: Item, *types: str) -> Token:
    """As `token`, where the grammar says that there is one."""
    found = token(item, *types)
    assert found is not None, (kind(item), types)
    return found


def deepest(item: Item, limit: int) -> Item | None:
    """Something that is more than `limit` levels down. Not recursive: trees can be as deep as a text is long."""
    stack: list[tuple[Item, int]] = [(item, 0)]
    while stack:
        found, level = stack.pop()
        if level > limit:
            return found
        stack.extend((child, level + 1) for child in _children(found))
    return None


def _children(item: Item) -> Iterator[Item]:
    return iter(()) if isinstance(item, Token) else iter(item.children)
