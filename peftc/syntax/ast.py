"""The abstract syntax tree of a `.peft` spec: frozen dataclasses with a span on every node.

Equality ignores spans and comments, so that `parse(print(spec)) == spec`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from peftc.diagnostics import NOWHERE, Source, Span
from peftc.diagnostics.record import record
from peftc.syntax.nodes import AnyNode as AnyNode
from peftc.syntax.nodes import BracedPath as BracedPath
from peftc.syntax.nodes import Braces as Braces
from peftc.syntax.nodes import Difference as Difference
from peftc.syntax.nodes import Glob as Glob
from peftc.syntax.nodes import Index as Index
from peftc.syntax.nodes import Node as Node
from peftc.syntax.nodes import Path as Path
from peftc.syntax.nodes import Selector as Selector
from peftc.syntax.nodes import Step as Step
from peftc.syntax.nodes import Union as Union
from peftc.syntax.nodes import build as build

# Expressions


@record()
class Number(Node):
    """`30`, `6.8%`, `27.4M`; `value` is as written, before the unit is applied."""

    value: int | float
    unit: Literal["", "%", "K", "M", "B"] = ""


@record()
class Boolean(Node):
    """`true` or `false`"""

    value: bool


@record()
class Name(Node):
    """A state, a parameter, a `let`, or a word such as `relu`. May be dotted (`enc.ffn`)."""

    id: str


@record()
class Word(Name):
    """`layer` in an argument that takes words, where it is not the number of the layer."""


@record()
class String(Node):
    """`"model.layers.*"`"""

    value: str


@record()
class Keyword(Node):
    """`r=64`, an argument by name."""

    name: str
    value: Expr


@record()
class Call(Node):
    """`adapter(x, r=64)`: a form, a frozen module of the site, `concat`, or a fact."""

    function: str
    args: tuple[Expr, ...] = ()
    kwargs: tuple[Keyword, ...] = ()
    function_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Negative(Node):
    """`-h`"""

    operand: Expr


@record()
class Binary(Node):
    """`4 * x`, `B @ x`"""

    op: Literal["+", "-", "*", "/", "@"]
    left: Expr
    right: Expr


@record()
class List(Node):
    """`[4, 4, 8]`"""

    items: tuple[Expr, ...] = ()


@record()
class Pair(Node):
    """`(k, v)`"""

    first: Expr
    second: Expr


@record()
class Item(Node):
    """`table[0]`, `A[0, i]`"""

    value: Expr
    indices: tuple[Expr, ...]


@record()
class Attribute(Node):
    """`svd(w, r).u`"""

    value: Expr
    name: str


@record()
class Binding(Node):
    """`i in n`: the first argument of `sum` or `product`, in which i is 0, 1, … n - 1."""

    name: str
    count: Expr
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


Expr = Number | Boolean | Name | String | Call | Negative | Binary | List | Pair | Item | Attribute | Binding


# Statements


@record(kw_only=True)
class Statement(Node):
    """A statement with its comments, above ("" for a blank line) and behind its first line."""

    leading: tuple[str, ...] = field(default=(), compare=False, repr=False)
    trailing: str | None = field(default=None, compare=False, repr=False)
    origin: Source | None = field(default=None, compare=False, repr=False)  # of the spans; None: the `Spec`'s
    via: tuple[str, ...] = field(default=(), compare=False, repr=False)  # `apply`s that expanded to it, as notes


@record()
class Condition(Node):
    """`if bias`, or `if reduction == none`: a line of a form is there or not. `where d(x) >= 1024`:
    a site is one of an edit or not.
    """

    left: Expr
    op: Literal["", "==", "!=", "<", "<=", ">", ">="] = ""
    right: Expr | None = None


@record()
class Equation(Statement):
    """`h += 4 * adapter(x, r=512)`"""

    target: str
    op: Literal["=", "+=", "*="]
    value: Expr
    condition: Condition | None = None  # in a form
    target_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Let(Statement):
    """`let g = gate(h)`"""

    name: str
    value: Expr
    condition: Condition | None = None  # in a form


@record()
class Edit(Statement):
    """`edit NAME at SELECTOR [where …] [per task] { equations }`; tensors are saved under NAME.

    `adapters` are those attached to a model that have this edit, each with its own parameters. No
    text has them.
    """

    name: str
    selector: Selector
    body: tuple[Equation | Let, ...]
    per_task: bool = False
    where: tuple[Condition, ...] = ()
    adapters: tuple[str, ...] = ()
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)  # comments before the brace
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Train(Statement):
    """`train NAME = [w, b] at SELECTOR [where …]`: unfreezes parameters of the base. `adapters`: as
    those of `Edit`.
    """

    name: str
    states: tuple[str, ...]
    selector: Selector
    where: tuple[Condition, ...] = ()
    adapters: tuple[str, ...] = ()
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)
    state_spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)


@record()
class Expect(Statement):
    """`expect stored <= 6.8%`, or without a comparison `expect foldable(qv)`."""

    left: Expr
    op: Literal["==", "!=", "<", "<=", ">", ">="] | None = None
    right: Expr | None = None


@record()
class SiteGroup(Statement):
    """`let attn_qv at layer[*].attn.{q, v}`: a name for sites, in the place of a path."""

    name: str
    selector: Selector
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Moved(Statement):
    """`moved qv -> attention`: what older adapters call `old` is `new`. With `at`, `moved ffn at
    layer[*].ffn -> layer[*].ffn.down`: the edit `old` is at sites of other names.
    """

    old: str
    new: str
    at: Path | None = None
    to: Path | None = None
    old_span: Span = field(default=NOWHERE, compare=False, repr=False)
    new_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Use(Statement):
    """`use mam from std` (source None) or `use mam from "file.peft"`."""

    name: str
    source: str | None = None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)
    source_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Apply(Statement):
    """`apply mam(r=256) at encoder as enc`"""

    name: str
    args: tuple[Keyword, ...] = ()
    at: Selector | None = None
    alias: str | None = None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Param(Node):
    """`r = 512`, a parameter of a method with its default."""

    name: str
    default: Expr
    leading: tuple[str, ...] = field(default=(), compare=False, repr=False)
    trailing: str | None = field(default=None, compare=False, repr=False)


@record()
class Method(Statement):
    """`method mam(l = 30) { … }`"""

    name: str
    params: tuple[Param, ...]
    body: tuple[Edit | Train | Expect | Apply | Let | SiteGroup | Moved, ...]
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)


@record()
class FormParam(Node):
    """`r`, or `alpha = r` with a default. One whose name is a state is an input."""

    name: str
    default: Expr | None = None
    leading: tuple[str, ...] = field(default=(), compare=False, repr=False)
    trailing: str | None = field(default=None, compare=False, repr=False)


@record()
class Require(Statement):
    """`require r <= min(d(x), d(out))`"""

    left: Expr
    op: Literal["==", "!=", "<", "<=", ">", ">="]
    right: Expr
    condition: Condition | None = None


@record()
class Parameter(Statement):
    """`param A[r, d(x)] per edit = kaiming if bias`; `fixed` values are drawn and never trained."""

    name: str
    sizes: tuple[Expr, ...]
    value: Expr
    fixed: bool = False
    scope: str = ""
    common: bool = False
    condition: Condition | None = None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@record()
class Save(Statement):
    """`save prompt(len=len, tokens=P) if keep == false`: the simpler form that an adapter has."""

    call: Call
    condition: Condition | None = None


@record()
class Form(Statement):
    """`form lora(x, r, alpha = r) { … }`"""

    name: str
    params: tuple[FormParam, ...]
    body: tuple[Require | Parameter | Let | Equation | Save, ...]
    built_in: bool = field(default=False, compare=False)  # as a saved adapter has it; no text of a spec
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


Expanded = Form | Let | Edit | Train | Expect | Moved  # what is left behind expansion
TopLevel = Expanded | SiteGroup | Method | Use | Apply


@record()
class Spec(Node):
    """A whole text, with the comments around its statements."""

    version: int
    statements: tuple[TopLevel, ...]
    header: tuple[str, ...] = field(default=(), compare=False, repr=False)  # comments above `peft 1`
    header_trailing: str | None = field(default=None, compare=False, repr=False)
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False)  # comments after the last statement
    source: Source = field(default=Source("<text>", ""), compare=False, repr=False)

    @property
    def per_task(self) -> bool:
        """Whether an edit of the text is `per task`; of an expanded one, whether any is."""
        return any(isinstance(statement, Edit) and statement.per_task for statement in self.statements)
