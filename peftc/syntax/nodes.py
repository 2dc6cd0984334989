"""The node that all of the syntax tree derives from, and the nodes of selectors."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar

from peftc.diagnostics import NOWHERE, Span
from peftc.diagnostics.record import record


@record(kw_only=True)
class Node:
    """What has a place in the text."""

    span: Span = field(default=NOWHERE, compare=False, repr=False)


AnyNode = TypeVar("AnyNode", bound=Node)


def build(node: type[AnyNode], **fields: Any) -> AnyNode:
    """A node of all the fields that have no default.

    The parser's way: `__init__` also checks its arguments.
    """
    new = object.__new__(node)
    object.__setattr__(new, "__dict__", fields)
    return new


@record()
class Index(Node):
    """`3` (start = stop), `0..5` (inclusive), `6..`, `..5`, `*` (neither), `-1` (from the end)."""

    start: int | None
    stop: int | None


@record()
class Step(Node):
    """`layer[0, 3..5]`, `attn`, `**`; `indices` is None without brackets."""

    name: str
    indices: tuple[Index, ...] | None = None


@record()
class Path(Node):
    """`encoder.layer[*].ffn`; `layer[*].ffn.gate?` is optional: it may match nothing."""

    steps: tuple[Step, ...]
    optional: bool = False


@record()
class Braces(Node):
    """`{q, v}`, alternatives in the place of a step."""

    paths: tuple[Path | BracedPath, ...]


@record()
class BracedPath(Node):
    """`layer[*].attn.{q, v}`, the union of the paths that `peftc.syntax.walk.spell_out` gives."""

    steps: tuple[Step | Braces, ...]
    optional: bool = False


@record()
class Glob(Node):
    """A pattern on module names. `*`, `?` and `[qv]` stay in a segment, `**` spans segments."""

    pattern: str
    optional: bool = False


@record()
class Union(Node):
    """`a | b | c`"""

    arms: tuple[Selector, ...]


@record()
class Difference(Node):
    """`a - b`"""

    left: Selector
    right: Selector


Selector = Path | BracedPath | Glob | Union | Difference
