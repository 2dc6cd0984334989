"""What a name can stand for, where it stands, and the parts of parse trees that have names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from peftc.diagnostics import Span
from peftc.syntax.automaton import Tree, Value, spliced
from peftc.syntax.lexer import Token

Kind = Literal["form", "method", "parameter", "argument", "value", "let", "group", "index", "edit", "alias"]
_LOCAL: frozenset[Kind] = frozenset({"value", "let", "group", "index", "edit", "alias"})


@dataclass(frozen=True)
class Symbol:
    """What a name stands for.

    Attributes:
        kind: a form, a method, a parameter of a method, an argument of a form, a value or a tensor
            of a form, a let, a group of sites, the index of a sum, an edit, or what `apply … as`
            calls a method.
        path: of the file that defines it.
        name: as it is written.
        owner: the method or the form that it belongs to; of a let, where it is.
    """

    kind: Kind
    path: str
    name: str
    owner: str = ""

    @property
    def is_local(self) -> bool:
        """Whether no other file can name it."""
        return self.kind in _LOCAL


class Occurrence(NamedTuple):
    """A place of a name."""

    symbol: Symbol
    span: Span
    is_definition: bool = False


_OPEN = {"METHOD": "method", "FORM": "form", "EDIT": "edit"}  # statements with braces
_FAR = 1 << 40  # behind the end of any text


def completed(values: Sequence[Value]) -> list[Value]:
    """Parse trees in which statements without their closing brace are trees, too, up to the end."""
    parts = [part for value in values for part in spliced(value)]
    for number, value in enumerate(parts):
        if isinstance(value, Token) and value.type in _OPEN:
            children: list[Value] = [value, *completed(parts[number + 1 :])]
            return [*parts[:number], Tree(_OPEN[value.type], children, value.span._replace(end=_FAR))]
    return parts


def statements_of(values: Iterable[Value]) -> Iterator[Tree]:
    for value in values:
        if isinstance(value, Tree):
            if value.rule == "spec" or value.rule.startswith("_"):
                yield from statements_of(value.children)
            else:
                yield value


def name_of(tree: Tree) -> Token | None:
    """The name that a statement defines, applies or uses."""
    for child in tree.children[1:2]:
        return word_of(child)
    return None


def alias_of(apply: Tree) -> Token | None:
    """The name behind `as`."""
    pairs = zip(apply.children, apply.children[1:], strict=False)
    return next((word_of(b) for a, b in pairs if isinstance(a, Token) and a.type == "AS"), None)


def word_of(value: Value) -> Token | None:
    """A name that is not dotted."""
    if isinstance(value, Tree):
        is_name = value.rule == "name" and len(value.children) == 1
        return word_of(value.children[0]) if is_name else None
    return value if value.type == "NAME" and value.text else None


def trees_of(tree: Tree, *rules: str) -> Iterator[Tree]:
    """The children of some rules."""
    return (child for child in tree.children if isinstance(child, Tree) and child.rule in rules)


def calls_in(values: Sequence[Value]) -> Iterator[Tree]:
    for value in values:
        if isinstance(value, Tree):
            if value.rule == "call":
                yield value
            yield from calls_in(value.children)
