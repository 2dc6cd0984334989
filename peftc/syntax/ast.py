"""The abstract syntax tree of a `.peft` spec: frozen dataclasses with a span on every node.

Equality ignores spans and comments, so that `parse(print(spec)) == spec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from peftc.diagnostics import NOWHERE, Source, Span


@dataclass(frozen=True, kw_only=True)
class Node:
    span: Span = field(default=NOWHERE, compare=False, repr=False)


AnyNode = TypeVar("AnyNode", bound=Node)


def build(node: type[AnyNode], **fields: Any) -> AnyNode:
    """A node of all the fields that have no default.

    The parser's way: `__init__` of a frozen class takes four times as long.
    """
    new = object.__new__(node)
    object.__setattr__(new, "__dict__", fields)
    return new


# Expressions


@dataclass(frozen=True)
class Number(Node):
    """`30`, `6.8%`, `27.4M`; `value` is as written, before the unit is applied."""

    value: int | float
    unit: Literal["", "%", "K", "M", "B"] = ""


@dataclass(frozen=True)
class Boolean(Node):
    value: bool


@dataclass(frozen=True)
class Name(Node):
    """A state, a parameter, a `let`, or a word such as `relu`. May be dotted (`enc.ffn`)."""

    id: str


@dataclass(frozen=True)
class String(Node):
    value: str


@dataclass(frozen=True)
class Keyword(Node):
    name: str
    value: Expr


@dataclass(frozen=True)
class Call(Node):
    """`adapter(x, r=64)`: a form, a frozen module of the site, `concat`, or a fact."""

    function: str
    args: tuple[Expr, ...] = ()
    kwargs: tuple[Keyword, ...] = ()
    function_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True)
class Negative(Node):
    operand: Expr


@dataclass(frozen=True)
class Binary(Node):
    op: Literal["+", "-", "*", "/"]
    left: Expr
    right: Expr


Expr = Number | Boolean | Name | String | Call | Negative | Binary


# Selectors


@dataclass(frozen=True)
class Index(Node):
    """`3` (start = stop), `0..5` (inclusive), `6..`, `..5`, `*` (neither), `-1` (from the end)."""

    start: int | None
    stop: int | None


@dataclass(frozen=True)
class Step(Node):
    """`layer[0, 3..5]`, `attn`, `**`; `indices` is None without brackets."""

    name: str
    indices: tuple[Index, ...] | None = None


@dataclass(frozen=True)
class Path(Node):
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Glob(Node):
    """A pattern on module names. `*` and `?` match within a segment, `**` across segments."""

    pattern: str


@dataclass(frozen=True)
class Union(Node):
    arms: tuple[Selector, ...]


@dataclass(frozen=True)
class Difference(Node):
    left: Selector
    right: Selector


Selector = Path | Glob | Union | Difference


# Statements


@dataclass(frozen=True, kw_only=True)
class Statement(Node):
    """A statement with its comments, above ("" for a blank line) and behind its first line."""

    leading: tuple[str, ...] = field(default=(), compare=False, repr=False)
    trailing: str | None = field(default=None, compare=False, repr=False)
    origin: Source | None = field(default=None, compare=False, repr=False)  # of the spans; None: the `Spec`'s
    via: tuple[str, ...] = field(default=(), compare=False, repr=False)  # `apply`s that expanded to it, as notes


@dataclass(frozen=True)
class Equation(Statement):
    """`h += 4 * adapter(x, r=512)`"""

    target: str
    op: Literal["=", "+=", "*="]
    value: Expr
    target_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True)
class Let(Statement):
    name: str
    value: Expr


@dataclass(frozen=True)
class Edit(Statement):
    """`edit NAME at SELECTOR [per task] { equations }`; trained tensors are saved under NAME."""

    name: str
    selector: Selector
    body: tuple[Equation | Let, ...]
    per_task: bool = False
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)  # comments before the brace
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True)
class Train(Statement):
    """`train NAME = [w, b] at SELECTOR`: unfreezes parameters of the base."""

    name: str
    states: tuple[str, ...]
    selector: Selector
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True)
class Expect(Statement):
    """`expect stored <= 6.8%`, or without a comparison `expect foldable(qv)`."""

    left: Expr
    op: Literal["==", "!=", "<", "<=", ">", ">="] | None = None
    right: Expr | None = None


@dataclass(frozen=True)
class Use(Statement):
    """`use mam from std` (source None) or `use mam from "file.peft"`."""

    name: str
    source: str | None = None


@dataclass(frozen=True)
class Apply(Statement):
    name: str
    args: tuple[Keyword, ...] = ()
    at: Selector | None = None
    alias: str | None = None


@dataclass(frozen=True)
class Param(Node):
    name: str
    default: Expr
    leading: tuple[str, ...] = field(default=(), compare=False, repr=False)
    trailing: str | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Method(Statement):
    name: str
    params: tuple[Param, ...]
    body: tuple[Edit | Train | Expect | Apply | Let, ...]
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)


TopLevel = Method | Use | Apply | Let | Edit | Train | Expect


@dataclass(frozen=True)
class Spec(Node):
    version: int
    statements: tuple[TopLevel, ...]
    header: tuple[str, ...] = field(default=(), compare=False, repr=False)  # comments above `peft 1`
    header_trailing: str | None = field(default=None, compare=False, repr=False)
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)  # comments after the last statement
    source: Source = field(default=Source("<text>", ""), compare=False, repr=False)
