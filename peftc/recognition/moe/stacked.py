"""Experts whose matrices are the pieces of one parameter: which parameter holds `up`, `gate` and `down`, and how.

An experts' code picks a matrix out of a parameter for each expert, multiplies what was routed to it by that matrix, and goes
on as any feed-forward network does. So the products with picked matrices are its Linears, and dataflow names them; it also
tells which rows of a fused `gate`-and-`up` matrix are which, and whether a matrix is stored (out, in) or (in, out).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.recognition import ffn
from peftc.recognition.graph import features, nodes
from peftc.recognition.graph.value_operands import value_users
from peftc.tracing.tracer import RegionTrace

_PRODUCTS = (operator.matmul, torch.matmul, torch.bmm, torch.mm)
_SAME = frozenset({"view", "reshape", "unflatten", "to", "contiguous", "squeeze", "float", "type", "type_as"})


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of `count` equal pieces, one an expert; `transposed`: each is stored (in, out).

    `owner` and `reader` are modules by their names in the layer; `d_out`, `d_in` are those of a whole piece.
    """

    owner: str
    attribute: str
    count: int
    reader: str
    transposed: bool
    d_out: int
    d_in: int


@dataclass(frozen=True)
class Role:
    """One Linear of every expert: the parameter, the rows of each piece (None: all), and the parameter of its bias."""

    weight: StackedParameter
    rows: Slice | None = None
    bias: StackedParameter | None = None


@dataclass(frozen=True)
class Experts:
    """The experts in a module of a layer."""

    module: str
    count: int
    roles: Mapping[str, Role]


def experts(module: str, traced: RegionTrace) -> Experts | None:
    """The experts that a module's code computes with; None where it picks no matrices out of parameters.

    Args: `module`: its name in the layer; `traced`: the gist of its code.
    """
    root = traced.root
    assert root is not None
    found = projections(traced, root)
    roles = {name: role_of(made, module, root) for name, made in found.items()}
    named = {name: role for name, role in roles.items() if role is not None}
    counts = {role.weight.count for role in named.values()}
    return Experts(module, counts.pop(), named) if named and len(counts) == 1 else None


def multiplies_pieces(traced: RegionTrace) -> bool:
    """Whether code multiplies by pieces of parameters, as that of experts does, whether or not these can be told apart."""
    return any(picked_in(node) is not None for node in traced.graph.nodes)


def projections(traced: RegionTrace, root: nn.Module) -> dict[str, ffn.Projection]:
    """The products in their roles, those of one expert."""
    output = next(
        n for n in traced.graph.nodes if n.op == "output"
    )  # experts add to their result in place, up to the end
    downs = [p for p in features.source_linears(output, root, is_linear=is_linear) if picked_in(p[0]) is not None]
    same = {picked.parameter.target for p in downs if (picked := picked_in(p[0])) is not None}
    hidden = nodes.first_input(downs[0][0]) if len(same) == 1 else None
    if hidden is None:
        return {}
    return {"down": ffn.Projection(*downs[0])} | ffn.before(hidden, root, is_linear)


def is_linear(node: fx.Node, root: nn.Module) -> bool:
    return nodes.is_linear(node, root) or picked_in(node) is not None


# Products with pieces of parameters ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Picked:
    """A piece of a parameter as an operand: `parameter` is the node that reads it, `turned` whether it was transposed."""

    parameter: fx.Node
    count: int
    turned: bool = False


def picked_in(node: fx.Node) -> Picked | None:
    """The matrix of one expert that a product multiplies by; `turned` is then against (out, in)."""
    if node.op == "call_function" and node.target is nn.functional.linear:
        return picked(node.args[1])
    if node.target in _PRODUCTS or (node.op == "call_method" and node.target in ("matmul", "bmm", "mm")):
        found = picked(node.args[1])
        return replace(found, turned=not found.turned) if found is not None else None
    return None


def picked(value: object, turned: bool = False) -> Picked | None:
    """Follows an operand back to the parameter that it is a piece of."""
    node = value
    while isinstance(node, fx.Node) and node.op != "get_attr":
        if turns(node):
            turned = not turned
        elif not picks(node) and not (node.op == "call_method" and node.target in _SAME):
            return None
        node = nodes.first_input(node)
    if not isinstance(node, fx.Node) or not isinstance(nodes.example(node), nn.Parameter):
        return None
    count = pieces(value, node)
    return Picked(node, count, turned) if count is not None else None


def pieces(value: object, parameter: fx.Node) -> int | None:
    """Into how many matrices a parameter is cut on the way to an operand; None where it is one matrix."""
    shapes: list[tuple[int, ...]] = []
    node = value
    while isinstance(node, fx.Node):
        shapes.append(nodes.shape(node))
        node = nodes.first_input(node) if node is not parameter else None
    first = next((shape for shape in reversed(shapes) if len(shape) == 3), None)
    return first[0] if first is not None else None


def turns(node: fx.Node) -> bool:
    """Whether a matrix is transposed here, or each of several."""
    if node.target is getattr:
        return node.args[1] in ("T", "mT")
    if node.op == "call_method":
        swaps = node.target in ("transpose", "swapaxes") and set(node.args[1:]) in ({-1, -2}, {1, 2})
        return node.target == "t" or swaps
    return False


def picks(node: fx.Node) -> bool:
    """Whether one piece is taken by its number, or several by theirs."""
    if node.target is operator.getitem:
        index = node.args[1]
        value = nodes.example(index)
        return isinstance(value, int) or (isinstance(value, torch.Tensor) and not value.is_floating_point())
    return node.op == "call_method" and node.target == "index_select"


# Where they are stored -----------------------------------------------------------------------------------------------


def role_of(made: ffn.Projection, module: str, root: nn.Module) -> Role | None:
    found = picked_in(made.node)
    if found is None:
        return None
    weight = bank(found, module, nodes.shape(found.parameter))
    rows = made.rows if made.rows is None or made.rows.width < weight.d_out else None
    return Role(weight, rows, bias_of(made.node, module, weight))


def bank(found: Picked, module: str, shape: tuple[int, ...]) -> StackedParameter:
    """The parameter of a picked matrix. `shape`: as it is stored, (count, …, …) or (count · …, …)."""
    total = 1
    for size in shape:
        total *= size
    last = shape[-1]
    other = total // found.count // last
    d_out, d_in = (last, other) if found.turned else (other, last)
    owner, _, attribute = str(found.parameter.target).rpartition(".")
    return StackedParameter(
        inside(module, owner),
        attribute,
        found.count,
        inside(module, str(found.parameter.meta["origin"][0])),
        found.turned,
        d_out,
        d_in,
    )


def bias_of(product: fx.Node, module: str, weight: StackedParameter) -> StackedParameter | None:
    """The parameter whose pieces are added to a product: one vector (out) an expert."""
    given = [product.args[2]] if product.target is nn.functional.linear and len(product.args) > 2 else []
    given += [product.kwargs["bias"]] if "bias" in product.kwargs else []
    for user in value_users(product):
        if nodes.is_add(user):
            given += [a for a in user.args[:2] if a is not product]
    for value in given:
        node = nodes.first_input(value) if isinstance(value, fx.Node) and picks(value) else None
        if node is None or node.op != "get_attr" or nodes.shape(node) != (weight.count, weight.d_out):
            continue
        owner, _, attribute = str(node.target).rpartition(".")
        reader = inside(module, str(node.meta["origin"][0]))
        return StackedParameter(inside(module, owner), attribute, weight.count, reader, False, weight.d_out, 1)
    return None


def inside(module: str, name: str) -> str:
    return f"{module}.{name}".strip(".")
