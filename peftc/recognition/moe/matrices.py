"""Experts whose matrices are slices of one parameter.

Code of stacked experts picks a matrix out of a parameter for each expert, multiplies what is routed
to it by that matrix, and goes on as any feed-forward network. The products with picked matrices are
its Linears. Dataflow gives their roles, the rows of each in a fused `gate`-and-`up` matrix, and
whether a matrix is stored (out, in) or (in, out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from peftc.addressing.sites import FeatureDims, Slice
from peftc.dataflow.einsum import einsum_labels, einsum_operands, is_einsum
from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.matrices import MatrixProduct
from peftc.dataflow.nodes import example, first_input, is_tensor, module_path, output_of, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import value_users
from peftc.recognition.ffn import Projection, input_projections


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of `count` equal slices, one an expert; `transposed`: each is stored (in, out).
    `owner` and `reader` are modules of the layer; `d_out`, `d_in` the features of a whole slice.
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
    """Experts whose matrices are slices of parameters."""

    module: str
    count: int
    roles: Mapping[str, StackedLinear]


class ExpertGraph(LayerGraph):
    """The code of experts, in which products with slices of parameters are Linears, too, and those
    whose values are only chosen from are none: a bias is picked by the result of the router.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        super().__init__(graph, root)
        self._picked: dict[fx.Node, PickedMatrix | None] = {}

    def picked(self, node: fx.Node) -> PickedMatrix | None:
        if node not in self._picked:
            self._picked[node] = picked_matrix(node)
        return self._picked[node]

    def is_linear(self, node: object) -> bool:
        if isinstance(node, fx.Node) and self.picked(node) is not None:
            return True
        return super().is_linear(node) and not (isinstance(node, fx.Node) and _is_router(node))

    def product(self, node: fx.Node) -> MatrixProduct | None:
        return None if self.picked(node) is not None else super().product(node)

    def input_of(self, linear: fx.Node) -> fx.Node | None:
        picked = self.picked(linear)
        return super().input_of(linear) if picked is None else picked.x

    def feature_dims(self, linear: fx.Node) -> FeatureDims:
        """Where the features of one expert are."""
        picked, size = self.picked(linear), len(shape(linear))
        if picked is None:
            return super().feature_dims(linear)
        return FeatureDims(tuple(dim for dim in range(size) if dim != picked.dim), (picked.dim,))


def stacked_experts(module: str, code: LayerGraph) -> StackedExperts | None:
    """The experts of which code picks the matrices. `module`: its name in the layer."""
    # Seen in: most mixtures of experts
    code = ExpertGraph(code.graph, code.root)
    downs = {p: matrix for p in source_linears(code, output_of(code.graph)) if (matrix := code.picked(p[0]))}
    down = next(iter(downs)) if len({matrix.parameter.target for matrix in downs.values()}) == 1 else None
    hidden = code.input_of(down[0]) if down is not None else None
    if down is None or hidden is None:
        return None
    projections = {"down": Projection(*down)} | input_projections(hidden, code)
    roles = {role: linear for role, p in projections.items() if (linear := _stacked_linear(p, module)) is not None}
    counts = {linear.weight.count for linear in roles.values()}
    return StackedExperts(module, counts.pop(), roles) if roles and len(counts) == 1 else None


def multiplies_slices(code: LayerGraph) -> bool:
    """Whether code multiplies by slices of parameters, as that of experts does."""
    # Seen in: LongCat, whose experts would be untraced without it
    # an einsum with all matrices at once may as well be that of heads
    return any(not is_einsum(node) and picked_matrix(node) is not None for node in code.graph.nodes)


@dataclass(frozen=True, eq=False)
class PickedMatrix:
    """A slice of a parameter as an operand, or all of them at once, each for its own tokens.

    Attributes:
        x: the other operand.
        transposed: against (out, in).
        dim: of the result, where the features are.
    """

    x: fx.Node
    parameter: fx.Node
    count: int
    transposed: bool
    dim: int


def picked_matrix(product: fx.Node) -> PickedMatrix | None:
    """The matrix of one expert that a product multiplies by."""
    if not is_tensor(product) or (operands := _operands(product)) is None:
        return None
    x, operand, transposed, dim = operands
    node, sizes = operand, list[tuple[int, ...]]()
    while isinstance(node, fx.Node) and node.op != "get_attr":
        sizes.append(shape(node))
        swaps = name_of(node) in ("t", "T", "mT") or node.args[1:] in ((-1, -2), (-2, -1), (1, 2), (2, 1))
        if op_of(node) is Op.PERMUTE and swaps:
            transposed = not transposed
        elif not picks(node) and op_of(node) not in (Op.CAST, Op.RESHAPE):
            return None
        node = first_input(node)
    if not isinstance(node, fx.Node) or not isinstance(example(node), nn.Parameter):
        return None
    count = next((size[0] for size in reversed([*sizes, shape(node)]) if len(size) == 3), None)
    return PickedMatrix(x, node, count, transposed, dim) if count is not None else None


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, bool, int] | None:
    """What a product multiplies, the matrix, whether that is (in, out), the dimension of features
    in the result.
    """
    op, last = op_of(product), len(shape(product)) - 1
    if op is Op.MATMUL and is_einsum(product):
        return _operands_of_einsum(product)
    start = 1 if name_of(product) == "baddbmm" else 0
    operands = [n for n in product.args[start : start + 2] if isinstance(n, fx.Node)]
    if op not in (Op.LINEAR, Op.MATMUL) or len(operands) < 2:
        return None
    return operands[0], operands[1], op is Op.MATMUL, last


def _operands_of_einsum(product: fx.Node) -> tuple[fx.Node, fx.Node, bool, int] | None:
    """The same of an einsum, whose matrix has labels of experts before those of in and out."""
    # Seen in: no transformers model, but `einsum("end,edf->enf", x, self.w_in)` written by hand
    operands = einsum_operands(product)
    if len(operands) != 2:
        return None
    labels, result = einsum_labels(product)
    for i, (x, matrix) in enumerate((operands, operands[::-1])):
        of_x, of_matrix = labels[i], labels[1 - i]
        experts, own = of_matrix[:-2], of_matrix[-2:]
        if any(c not in of_x and c not in result for c in experts) or not is_tensor(matrix):
            continue
        summed = [c for c in own if c in of_x and c not in result]
        features = [c for c in own if c in result and c not in of_x]
        if len(summed) == len(features) == 1:
            return x, matrix, own[0] == summed[0], result.index(features[0])
    return None


def picks(node: fx.Node) -> bool:
    """Whether one slice is taken by its number, or several by theirs."""
    if op_of(node) is not Op.SELECT or len(node.args) < 2:
        return False
    index = node.args[1]
    if isinstance(index, tuple) and index and all(rest in (..., slice(None)) for rest in index[1:]):
        index = index[0]  # Seen in: no transformers model, but GPT-OSS as its authors publish it
    index = example(index)
    is_index = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.is_floating_point())
    return is_index or name_of(node) == "index_select"


def _is_router(linear: fx.Node) -> bool:
    """Whether nothing but a choice reads the result of a Linear."""
    # Seen in: no transformers model, but GPT-OSS as its authors publish it
    users = [user for user in linear.users if op_of(user) is not Op.QUERY]
    return bool(users) and all(op_of(user) is Op.CHOICE for user in users)


def _stacked_linear(projection: Projection, module: str) -> StackedLinear | None:
    if (matrix := picked_matrix(projection.node)) is None:
        return None
    sizes = shape(matrix.parameter)
    d_in, d_out = math.prod(sizes) // matrix.count // sizes[-1], sizes[-1]
    if not matrix.transposed:
        d_in, d_out = d_out, d_in
    weight = _parameter(matrix.parameter, matrix.count, matrix.transposed, d_out, d_in, module)
    rows = projection.rows if projection.rows is not None and projection.rows.width < weight.d_out else None
    return StackedLinear(weight, rows, _bias_of(projection.node, module, weight))


def _parameter(node: fx.Node, count: int, transposed: bool, d_out: int, d_in: int, module: str) -> StackedParameter:
    owner, _, attribute = str(node.target).rpartition(".")
    owner, reader = (f"{module}.{name}".strip(".") for name in (owner, module_path(node)))
    return StackedParameter(owner, attribute, count, reader, transposed, d_out, d_in)


def _bias_of(product: fx.Node, module: str, weight: StackedParameter) -> StackedParameter | None:
    """The parameter whose slices are added to a product: one vector (out) an expert."""
    # Seen in: GPT-OSS, whose experts have no `b` without it
    operands = [*product.args[2:3], product.kwargs.get("bias")] if op_of(product) is Op.LINEAR else []
    operands += product.args[:1] if name_of(product) == "baddbmm" else []
    for user in value_users(product):
        if op_of(user) is Op.ADD:
            operands += [a for a in user.args[:2] if a is not product]
    for value in operands:
        node = value if isinstance(value, fx.Node) else None
        while node is not None and (picks(node) or op_of(node) in (Op.CAST, Op.RESHAPE)):
            node = first_input(node)
        if node is not None and node.op == "get_attr" and shape(node) == (weight.count, weight.d_out):
            return _parameter(node, weight.count, False, weight.d_out, 1, module)
    return None
