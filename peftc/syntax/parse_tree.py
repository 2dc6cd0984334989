"""Access to Lark's parse trees: children by name, and spans."""

from __future__ import annotations

from lark import Token, Tree

from peftc.diagnostics import Span
from peftc.syntax.lexer import span_of

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
