"""Experts whose matrices are the slices of one parameter: which parameter holds `up`, `gate` and
`down`, and how.

The code of experts picks a matrix out of a parameter for each expert, multiplies what is routed to
it by that matrix, and goes on as any feed-forward network. The products with picked matrices are
its Linears, and dataflow gives their roles; it also tells which rows of a fused `gate`-and-`up`
matrix are which, and whether a matrix is stored (out, in) or (in, out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.dataflow.feature_rows import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, module_path, output_of, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import value_users
from peftc.recognition.ffn import Projection, input_projections


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of `count` equal slices, one an expert; `transposed`: each is stored (in, out).

    `owner` and `reader` are modules by their names in the layer; `d_out`, `d_in` are the features
    of a whole slice.
    """

    owner: str
    attribute: str
    count: int
    reader: str
    transposed: bool
    d_out: int
    d_in: int


@dataclass(frozen=True)
class StackedLinear:
    """One Linear of every expert: its parameter, the rows of each slice (None: all), its bias."""

    weight: StackedParameter
    rows: Slice | None = None
    bias: StackedParameter | None = None


@dataclass(frozen=True)
class StackedExperts:
    """The experts in a module of a layer."""

    module: str
    count: int
    roles: Mapping[str, StackedLinear]


class ExpertGraph(LayerGraph):
    """The code of experts, in which products with slices of parameters are Linears, too."""

    def is_linear(self, node: object) -> bool:
        return super().is_linear(node) or (isinstance(node, fx.Node) and picked_matrix(node) is not None)


def stacked_experts(module: str, code: LayerGraph) -> StackedExperts | None:
    """The experts that a module's code computes with; None where it picks no matrices out of
    parameters.

    Args:
        module: its name in the layer.
    """
    projections = _projections(ExpertGraph(code.graph, code.root))
    roles = {role: linear for role, p in projections.items() if (linear := _stacked_linear(p, module)) is not None}
    counts = {linear.weight.count for linear in roles.values()}
    return StackedExperts(module, counts.pop(), roles) if roles and len(counts) == 1 else None


def multiplies_slices(code: LayerGraph) -> bool:
    """Whether code multiplies by slices of parameters, as that of experts does."""
    return any(picked_matrix(node) is not None for node in code.graph.nodes)


def _projections(code: ExpertGraph) -> dict[str, Projection]:
    """The products of one expert in their roles."""
    downs = [p for p in source_linears(code, output_of(code.graph)) if picked_matrix(p[0]) is not None]
    parameters = {picked.parameter.target for p in downs if (picked := picked_matrix(p[0])) is not None}
    hidden = first_input(downs[0][0]) if len(parameters) == 1 else None
    return {} if hidden is None else {"down": Projection(*downs[0])} | input_projections(hidden, code)


@dataclass(frozen=True, eq=False)
class PickedMatrix:
    """A slice of a parameter as an operand: the node that reads the parameter, and whether it is
    transposed against (out, in).
    """

    parameter: fx.Node
    count: int
    transposed: bool


def picked_matrix(product: fx.Node) -> PickedMatrix | None:
    """The matrix of one expert that a product multiplies by."""
    op = op_of(product)
    if op not in (Op.LINEAR, Op.MATMUL) or product.target is torch.einsum or len(product.args) < 2:
        return None
    operand, transposed = product.args[2 if name_of(product) == "baddbmm" else 1], op is Op.MATMUL
    node, sizes = operand, list[tuple[int, ...]]()
    while isinstance(node, fx.Node) and node.op != "get_attr":
        sizes.append(shape(node))
        if _transposes(node):
            transposed = not transposed
        elif not picks(node) and op_of(node) not in (Op.CAST, Op.RESHAPE):
            return None
        node = first_input(node)
    if not isinstance(node, fx.Node) or not isinstance(example(node), nn.Parameter):
        return None
    count = next((size[0] for size in reversed([*sizes, shape(node)]) if len(size) == 3), None)
    return PickedMatrix(node, count, transposed) if count is not None else None


def _transposes(node: fx.Node) -> bool:
    """Whether a matrix is transposed here, or each of several."""
    if op_of(node) is not Op.PERMUTE:
        return False
    return name_of(node) in ("t", "T", "mT") or set(node.args[1:]) in ({-1, -2}, {1, 2})


def picks(node: fx.Node) -> bool:
    """Whether one slice is taken by its number, or several by theirs."""
    if op_of(node) is not Op.SELECT or len(node.args) < 2:
        return False
    index = example(node.args[1])
    is_index = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.is_floating_point())
    return is_index or name_of(node) == "index_select"


def _stacked_linear(projection: Projection, module: str) -> StackedLinear | None:
    matrix = picked_matrix(projection.node)
    if matrix is None:
        return None
    sizes = shape(matrix.parameter)
    d_in, d_out = math.prod(sizes) // matrix.count // sizes[-1], sizes[-1]
    if not matrix.transposed:
        d_in, d_out = d_out, d_in
    weight = _parameter(matrix.parameter, matrix.count, matrix.transposed, d_out, d_in, module)
    rows = projection.rows
    rows = rows if rows is None or rows.width < weight.d_out else None
    return StackedLinear(weight, rows, _bias_of(projection.node, module, weight))


def _parameter(node: fx.Node, count: int, transposed: bool, d_out: int, d_in: int, module: str) -> StackedParameter:
    owner, _, attribute = str(node.target).rpartition(".")
    owner, reader = (f"{module}.{name}".strip(".") for name in (owner, module_path(node)))
    return StackedParameter(owner, attribute, count, reader, transposed, d_out, d_in)


def _bias_of(product: fx.Node, module: str, weight: StackedParameter) -> StackedParameter | None:
    """The parameter whose slices are added to a product: one vector (out) an expert."""
    operands = [*product.args[2:3], product.kwargs.get("bias")] if op_of(product) is Op.LINEAR else []
    for user in value_users(product):
        if op_of(user) is Op.ADD:
            operands += [a for a in user.args[:2] if a is not product]
    for value in operands:
        node = first_input(value) if isinstance(value, fx.Node) and picks(value) else None
        if node is not None and node.op == "get_attr" and shape(node) == (weight.count, weight.d_out):
            return _parameter(node, weight.count, False, weight.d_out, 1, module)
    return None
