"""What is known of a value in the equation of a form before it is computed. No tensors."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Literal, NamedTuple

from peftc.diagnostics.record import record
from peftc.forms.form import Dims, Spot
from peftc.forms.shapes import Heads, Ids, Prompt, Rows, Scalar, Shape, Tokens, Vector, Weight
from peftc.syntax import ast
from peftc.syntax.printer import print_expression

VECTORS = "a vector is a matrix of one column in `column(v)`, and of one row in `t(column(v))`"  # help for what is none
Number = int | float | bool | str  # known when the plan is made; text: the name of an activation
Batch = Literal["", "examples", "tokens", "ids"]


@record()
class Type:
    """The shape of a tensor.

    Attributes:
        size: its dimensions without those of the batch and the tokens.
        batch: what it has one value for: "" for the whole batch, "examples" or "tokens" for each of
            these; "ids" are tokens that stand for one-hot vectors.
    """

    size: tuple[int, ...]
    batch: Batch = ""

    @property
    def entries(self) -> int:
        return prod(self.size)

    def item(self, count: int) -> Type:
        """That of `A[i]`, with so many indices; one feature of each token is a dimension."""
        size = self.size[count:]
        return Type(size or (1,) * bool(self.batch), self.batch)

    def __str__(self) -> str:
        size = ", ".join(map(str, self.size))
        match self.batch:
            case "tokens":
                return f"[…, {size}]"
            case "examples":
                return f"[batch, {size}]"
            case "ids":
                return f"[…] of {size} ids"
            case _:
                return f"[{size}]" if self.size else "scalar"


@record()
class Value:
    """A tensor in an equation.

    Attributes:
        initial: what each entry equals when training starts; None: not one number.
        pair: of keys and values the type of the values; `type` is that of the keys.
        first: what it is then as a function of the base's weight, such as `norm(w)`; or empty.
        varies: whether it depends on an input of the form.
        reason: why it is not affine in the input; None if it is.
        shifted: whether it may differ from zero where the input is zero.
        rank: the most rank that a matrix can have, or a linear map of the input; None: any.
    """

    type: Type
    initial: float | None = None
    varies: bool = False
    reason: str | None = None
    shifted: bool = False
    rank: int | None = None
    first: str = ""
    pair: Type | None = None


class Budget(NamedTuple):
    """A parameter of which training gives up entries: `budget(v, target, total, …)`.

    Attributes:
        name: of the parameter.
        target: how many entries are left in the end, on average over the sites.
        total: steps of the whole training.
        warmup, cooldown: steps before the first round, and after the last one.
        every: steps between two rounds.
        beta1, beta2: smoothing of the importances, and of their uncertainty.
    """

    name: str
    target: int
    total: int
    warmup: int
    cooldown: int
    every: int
    beta1: float
    beta2: float


class Selection(NamedTuple):
    """`scatter(values, places, n)`, and `fixed places[k] = selection(select)`.

    Attributes:
        values: the name of the parameter.
        places: the name of the numbers of rows, or of entries.
        criterion: the name of the argument that says by what they are selected.
        dimension: of `values`, the one of places.
        units: how many rows, or entries, the site has.
        together: whether sites select together.
        fills: whether the value of the form is that of `scatter`, with other dimensions.
    """

    values: str
    places: str
    criterion: str
    dimension: int
    units: int
    together: bool
    fills: bool


class Pruning(NamedTuple):
    """`pruned(v, z, n)`, of which the n largest entries of all sites are left in the end.

    Attributes:
        name: of the parameter v.
        call: the expression.
        entries: n.
        fills: whether the value of the form is that of `pruned`, with other dimensions.
    """

    name: str
    call: ast.Call
    entries: int
    fills: bool


class SiteNumbers(NamedTuple):
    """What an equation knows of its site besides shapes: 0 where its text does not ask.

    Attributes:
        widest: the most features that any site reads, and writes.
        d_model: the features of the residual stream.
        sites: how many sites have parameters in common.
        site: which of them this is.
        layers: how many layers they are in.
        layer: which of these this one is in.
        stack: which of their stacks this one is in.
        parts, part: how many places in a layer they are at, and which of these this one is at.
        stack_parts, stack_part: the same among the sites of this one's stack.
        over_sites: the rows, or entries, of which sites select together.
        top: whether this is the last of the sites.
    """

    widest: tuple[int, int] = (0, 0)
    d_model: int = 0
    sites: int = 0
    site: int = 0
    layers: int = 0
    layer: int = 0
    stack: int = 0
    parts: int = 0
    part: int = 0
    stack_parts: int = 0
    stack_part: int = 0
    over_sites: int = 0
    top: bool = False


_OF_GROUPS = frozenset({"layers", "layer", "stack", "parts", "part", "stack_parts", "stack_part"})
TOP = "top"
NUMBERS_OF_SITES = ("d_model", "sites", "site", "over_sites", TOP, *sorted(_OF_GROUPS))


def numbers_of(dims: Dims, names: Collection[str], is_wide: bool) -> SiteNumbers:
    """The numbers of these names, so that sites which do not differ in them are one place."""
    own = {"d_model": dims.d_model, "sites": dims.sites, "site": dims.index, "over_sites": dims.spread[1]}
    if not _OF_GROUPS.isdisjoint(names):
        own |= numbers_of_groups(dims)
    numbers = {name: own[name] for name in names if name != TOP}
    is_top = TOP in names and dims.index + 1 >= dims.sites
    return SiteNumbers(dims.widest if is_wide else (0, 0), **numbers, top=is_top)


def numbers_of_groups(dims: Dims) -> dict[str, int]:
    """The layers, stacks and parts of layers that sites are in, in their order. A module outside of
    layers is a layer of its own.
    """
    spots = dims.spots or (Spot("", "", 0, 0),)
    homes = [spot.home or spot.layer or spot.part for spot in spots]
    stacks = [home.rpartition("[")[0] for home in homes]
    places = [(stack, spot.part) for stack, spot in zip(stacks, spots, strict=True)]
    at = dims.index if dims.spots else 0
    layers, parts = list(dict.fromkeys(homes)), list(dict.fromkeys(spot.part for spot in spots))
    own = [part for stack, part in dict.fromkeys(places) if stack == stacks[at]]
    return {
        "layers": len(layers),
        "layer": layers.index(homes[at]),
        "stack": list(dict.fromkeys(stacks)).index(stacks[at]),
        "parts": len(parts),
        "part": parts.index(spots[at].part),
        "stack_parts": len(own),
        "stack_part": own.index(spots[at].part),
    }


class FormError(Exception):
    """An equation that has no meaning at a place. `node`: the part of the text that is wrong."""

    def __init__(self, code: str, message: str, node: ast.Node, help_: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.node, self.help = code, message, node, help_


def real(value: Value | Number, node: ast.Expr) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise FormError("P105", f"expected a number, found `{print_expression(node)}`", node)


def shown(value: Number) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def type_of(shape: Shape) -> Type | None:
    """The type of a state; None for one that no equation reads or writes."""
    match shape:
        case Tokens(d=d):
            return Type((d,), "tokens")
        case Heads(heads, d_head) | Rows(heads, d_head):
            return Type((heads, d_head), "tokens")
        case Ids(count):
            return Type((count,), "ids")
        case Weight(d_out, d_in):
            return Type((d_out, d_in))
        case Vector(d):
            return Type((d,))
        case _:
            return None


def shape_of(type_: Type, target: Shape, tokens: str = "") -> Shape | None:
    """The shape of a state that has a type; None if none has.

    Args:
        target: the state that the equation writes.
        tokens: whose tokens a hidden state has.
    """
    has_heads = isinstance(target, Heads | Rows)
    match type_.batch, type_.size:
        case "", (rows, d) if isinstance(target, Tokens):
            return Prompt(d, rows=rows)
        case "tokens", (d,):
            return Tokens(d, tokens)
        case "tokens", (heads, d_head):
            return Rows(heads, d_head, target.of) if isinstance(target, Rows) else Heads(heads, d_head)
        case "", (_, _) if has_heads and type_of(target) == Type(type_.size, "tokens"):
            return target
        case "examples", (1,) | ():
            return Scalar(per_example=True)
        case "examples", (rows,):
            return Scalar(per_example=True, rows=rows)
        case "", (1,) | ():
            return Scalar()
        case "", (d,):
            return Vector(d)
        case "", (d_out, d_in):
            return Weight(d_out, d_in)
        case _:
            return None


def pair_of(node: ast.Pair, keys: Value | Number, values: Value | Number) -> Value:
    """Rows of keys and values, [heads, rows, features] each. Raises: FormError for other values."""
    for operand, part in ((keys, node.first), (values, node.second)):
        if not isinstance(operand, Value) or operand.type.batch or len(operand.type.size) != 3:
            other = operand.type if isinstance(operand, Value) else "a number"
            message = f"expected rows [heads, rows, features], `{print_expression(part)}` is {other}"
            raise FormError("P301", message, part)
    assert isinstance(keys, Value)
    assert isinstance(values, Value)
    if keys.type.size[:2] != values.type.size[:2]:
        raise FormError("P301", f"keys {keys.type} and values {values.type} have other heads or rows", node)
    return Value(keys.type, reason="it adds rows to the keys and values, which no weight holds", pair=values.type)
