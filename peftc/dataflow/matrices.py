"""Products of an activation with a matrix that code reads from a parameter itself.

`x @ self.w`, `F.linear(x, self.in_proj_weight)` and `einsum("bnd,dhk->bhnk", x, self.wq)` compute
what a Linear does. The matrix is a parameter of any shape, or a part of one; its dimensions become
those of (out, in) by an order, and rows are what a view of it leaves out.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn

from peftc.addressing.sites import FeatureDims, MatrixLayout, Slice
from peftc.dataflow.activations import is_activation, parameter_of
from peftc.dataflow.einsum import einsum_labels, einsum_operands, is_einsum
from peftc.dataflow.nodes import example, first_input, is_tensor, shape
from peftc.dataflow.numbers import as_slice
from peftc.dataflow.operations import LAYOUT, Op, is_in_place, is_zeros, name_of, op_of, rerun
from peftc.dataflow.values import value_users, writes_into
from peftc.tracing.operations import new_version

MOST_DIMS = 5  # of a parameter: there are n! orders


@dataclass(frozen=True)
class MatrixPart:
    """Rows of a parameter as a matrix (out, in), or as a vector (out) of a bias."""

    parameter: str  # dotted name
    layout: MatrixLayout | None
    rows: Slice | None
    size: int  # rows of the whole parameter

    def place_of(self, rows: Slice | None) -> tuple[bool, Slice | None]:
        """Whether these rows of the parameter are among the part's, and where; None: all of it."""
        own = numbers_of(self.rows, self.size)
        places = {number: i for i, number in enumerate(own)}
        wanted = [places.get(number, -1) for number in numbers_of(rows, self.size)]
        if -1 in wanted or wanted == list(range(len(own))):
            return -1 not in wanted, None
        place = as_slice(torch.tensor(wanted), len(own))
        return place is not None, place


def numbers_of(rows: Slice | None, size: int) -> list[int]:
    """The rows one by one; None stands for all."""
    return [i for start, stop in (rows or Slice(0, size)).blocks() for i in range(start, stop)]


def rows_within(outer: Slice | None, inner: Slice | None, size: int) -> Slice | None:
    """Rows of a parameter: the `inner` ones of `outer` ones; None for all of `size`."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    numbers = torch.tensor(numbers_of(outer, size))
    return as_slice(torch.cat([numbers[start:stop] for start, stop in inner.blocks()]), size)


@dataclass(frozen=True)
class BiasPart:
    """What is added to some rows of a product: a parameter, a constant tensor of the module's by
    its name, or zeros.
    """

    rows: Slice
    parameter: MatrixPart | None = None
    constant: str = ""


@dataclass(frozen=True, eq=False)
class MatrixProduct:
    """h = W x + b by a bare parameter W. `node` is the product, and `result` that or, of code that
    adds the bias behind it, the sum. `d_in`, `d_out`: where the features of x and of h are.
    `biases`: the parts of a bias that code joins.
    """

    node: fx.Node
    x: fx.Node
    result: fx.Node
    weight: MatrixPart
    bias: MatrixPart | None
    d_in: FeatureDims
    d_out: FeatureDims
    biases: tuple[BiasPart, ...] = ()

    def bias_of(self, rows: Slice | None) -> BiasPart | None:
        """The part of a joined bias that is added to exactly these rows."""
        # Seen in: BEiT (query and value biases, joined with zeros)
        return next((part for part in self.biases if part.rows == rows), None)

    @property
    def width(self) -> int:
        return self.d_out.width(shape(self.result))

    @property
    def has_computed_bias(self) -> bool:
        """Whether h has a bias that code computes."""
        return self.bias is None and (bool(self.biases) or isinstance(_bias_operand(self.result), fx.Node))


@dataclass(frozen=True)
class _Operands:
    """A product of two tensors, and which dimensions of both, and of the result, are one.

    `summed`: pairs of dimensions of matrix and input. `own`: of matrix and result.
    """

    x: fx.Node
    matrix: fx.Node
    summed: list[tuple[int, int]]
    own: list[tuple[int, int]]


def matrix_product(node: fx.Node) -> MatrixProduct | None:
    """The product with a matrix at a node; None for any other node."""
    if not is_tensor(node) or (operands := _operands(node)) is None:
        return None
    operands.own.sort(key=lambda pair: pair[1])
    operands.summed.sort(key=lambda pair: pair[1])
    rows, columns = ([dim for dim, _ in pairs] for pairs in (operands.own, operands.summed))
    d_in = _feature_dims(operands.x, [dim for _, dim in operands.summed])
    d_out = _feature_dims(node, [dim for _, dim in operands.own])
    weight = part_of(operands.matrix, rows, columns)
    if weight is None or d_in is None or d_out is None or not is_activation(operands.x):
        return None
    result, bias, parts = _with_bias(node, d_out)
    x, d_in = _without_ones(operands.x, d_in)
    return MatrixProduct(node, x, result, weight, bias, d_in, d_out, parts)


def _operands(node: fx.Node) -> _Operands | None:
    """The operands of a product, if one of them is computed from parameters alone."""
    match op_of(node):
        case Op.LINEAR if len(node.args) > 1 and all(isinstance(n, fx.Node) for n in node.args[:2]):
            x, matrix = node.args[:2]
            return _Operands(x, matrix, [(1, len(shape(x)) - 1)], [(0, len(shape(node)) - 1)])  # pyright: ignore
        case Op.MATMUL if is_einsum(node):
            return _of_einsum(node)
        case Op.MATMUL if node.kwargs.get("alpha", 1) == 1:  # another factor is no part of the matrix
            start = int(name_of(node) in ("baddbmm", "addmm"))
            factors = [n for n in node.args[start : start + 2] if isinstance(n, fx.Node)]
            return _of_matmul(node, *factors) if len(factors) == 2 else None
        case _:
            return None


def _of_einsum(node: fx.Node) -> _Operands | None:
    operands = einsum_operands(node)
    bare = [i for i, n in enumerate(operands) if parameter_of(n) is not None]
    if len(operands) != 2 or len(bare) != 1:
        return None
    labels, result = einsum_labels(node)
    own, other = labels[bare[0]], labels[1 - bare[0]]
    if any(len(set(text)) != len(text) for text in (own, other, result)):
        return None
    matrix, x = operands[bare[0]], operands[1 - bare[0]]
    common = [c for c in own if c in other and c in result and shape(matrix)[own.index(c)] > 1]
    if common or any(c not in other and c not in result for c in own) or set(other) - set(own) - set(result):
        return None  # a matrix for each entry of a dimension, or a sum over one operand alone
    summed = [(own.index(c), other.index(c)) for c in own if c in other and c not in result]
    return _Operands(x, matrix, summed, [(own.index(c), result.index(c)) for c in own if c not in other])


def _of_matmul(node: fx.Node, first: fx.Node, second: fx.Node) -> _Operands | None:
    is_second = parameter_of(second) is not None
    if is_second == (parameter_of(first) is not None):
        return None
    x, matrix = (first, second) if is_second else (second, first)
    x_dims, dims, result_dims = len(shape(x)), len(shape(matrix)), len(shape(node))
    if min(x_dims, dims) < 2 or result_dims != max(x_dims, dims):
        return None
    column, row = (dims - 2, dims - 1) if is_second else (dims - 1, dims - 2)
    own = [(row, result_dims - 1 if is_second else result_dims - 2)]
    for dim in range(dims - 2):  # a matrix for each head, of one input
        at = dim + result_dims - dims
        at_x = at + x_dims - result_dims
        if shape(matrix)[dim] > 1:
            if at_x >= 0 and shape(x)[at_x] > 1:
                return None
            own.append((dim, at))
    return _Operands(x, matrix, [(column, x_dims - 1 if is_second else x_dims - 2)], own)


def _view(node: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
    """The parameter that a value is a view of, and the view, of a contiguous tensor on meta."""
    if (origin := parameter_of(node)) is None:
        return None
    parameter, steps = origin
    whole = torch.empty(shape(parameter), device="meta")
    view = _view_of(whole, parameter, steps)
    is_view = isinstance(view, torch.Tensor) and view.untyped_storage()._cdata == whole.untyped_storage()._cdata  # pyright: ignore
    return (parameter, view) if is_view and isinstance(view, torch.Tensor) else None


def _view_of(value: torch.Tensor, node: fx.Node, steps: Sequence[fx.Node]) -> object:
    """What operations give of another value of `node`; None where they cannot."""
    values: dict[fx.Node, object] = {node: value}
    for step in steps:
        source = step.args[0]
        assert isinstance(source, fx.Node)
        if op_of(step) is Op.CAST:
            values[step] = values[source]
            continue
        args, kwargs = fx.map_arg((step.args, step.kwargs), lambda n: cast(Any, values.get(n, example(n))))
        try:
            values[step] = rerun(step, args, kwargs)
        except (RuntimeError, TypeError, IndexError):
            return None
    return values[steps[-1] if steps else node]


def part_of(node: fx.Node, rows: Sequence[int], columns: Sequence[int]) -> MatrixPart | None:
    """A view of a parameter as rows of it. `rows`, `columns`: dimensions of the view."""
    if (source := _view(node)) is None:
        return None
    parameter, view = source
    sizes, strides = view.shape, view.stride()
    rest = [d for d in range(view.ndim) if d not in (*rows, *columns) and sizes[d] > 1]
    if rest or any(strides[d] == 0 and sizes[d] > 1 for d in range(view.ndim)) or view.numel() == 1:
        return None
    starts = _offsets(sizes, strides, rows) + int(view.storage_offset())
    steps = _offsets(sizes, strides, columns)
    return _layout(str(parameter.target), shape(parameter), starts, steps, bool(columns))


def _layout(
    name: str, sizes: tuple[int, ...], starts: torch.Tensor, steps: torch.Tensor, is_matrix: bool
) -> MatrixPart | None:
    """The order of dimensions in which rows begin at `starts` and go on by `steps`."""
    count = len(sizes)
    if count > MOST_DIMS:
        return None
    strides = torch.empty(sizes, device="meta").stride()
    splits = range(1, count) if is_matrix else (count,)
    for order, rows in itertools.product(itertools.permutations(range(count)), splits):
        columns = _offsets(sizes, strides, order[rows:])
        if not torch.equal(columns, steps):
            continue
        places = {start: i for i, start in enumerate(_offsets(sizes, strides, order[:rows]).tolist())}
        numbers = [places.get(start, -1) for start in starts.tolist()]
        if -1 in numbers or numbers != sorted(set(numbers)):
            continue
        if (part := as_slice(torch.tensor(numbers), len(places))) is not None:
            layout = MatrixLayout(order, rows)
            own = part if part.width < len(places) else None
            return MatrixPart(name, None if layout.is_plain else layout, own, len(places))
    return None


def _offsets(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """Where in memory the entries of some dimensions begin, in their order."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for dim in dims:
        offsets = (offsets[:, None] + torch.arange(sizes[dim]) * strides[dim]).flatten()
    return offsets


def _feature_dims(node: fx.Node, features: list[int]) -> FeatureDims | None:
    """Where features are; of the other dimensions at most those of batch and tokens count."""
    others = [dim for dim in range(len(shape(node))) if dim not in features]
    while len(others) > 2 and (ones := [dim for dim in others[1:] if shape(node)[dim] == 1]):
        others.remove(ones[0])
    return FeatureDims(tuple(others), tuple(features)) if features else None


def _without_ones(x: fx.Node, dims: FeatureDims) -> tuple[fx.Node, FeatureDims]:
    """A value before `unsqueeze`: without the dimensions in which it is repeated."""
    source = first_input(x) if op_of(x) is Op.RESHAPE else None
    dims_left = sorted((*dims.tokens, *dims.features))
    if source is None or len(dims_left) == len(shape(x)) or shape(source) != tuple(shape(x)[dim] for dim in dims_left):
        return x, dims
    places = {dim: i for i, dim in enumerate(dims_left)}
    return source, FeatureDims(tuple(places[d] for d in dims.tokens), tuple(places[d] for d in dims.features))


def _with_bias(node: fx.Node, dims: FeatureDims) -> tuple[fx.Node, MatrixPart | None, tuple[BiasPart, ...]]:
    """The result of a product with its bias, an operand or the term of a sum right behind it."""
    if (operand := _bias_operand(node)) is not None:
        if node.kwargs.get("beta", 1) != 1:
            return node, None, ()
        return node, _bias(operand, node, dims), joined_bias(operand, node, dims)
    users = value_users(node)
    is_sum = len(users) == 1 and op_of(users[0]) is Op.ADD and users[0].kwargs.get("alpha", 1) == 1
    if is_sum and shape(users[0]) == shape(node):
        others = [a for a in users[0].args[:2] if a is not node]
        if len(others) == 1:
            bias, parts = _bias(others[0], node, dims), joined_bias(others[0], node, dims)
            return (users[0], bias, parts) if bias is not None or parts else (node, None, ())
    return node, None, ()


def joined_bias(operand: object, product: fx.Node, dims: FeatureDims) -> tuple[BiasPart, ...]:
    """The parts of a bias that code joins of parameters and constants, or of a parameter's copy in
    which it sets rows to zero; none where it does neither.
    """
    while isinstance(operand, fx.Node) and op_of(operand) is Op.CAST and not any(writes_into(operand)):
        operand = first_input(operand)
    is_vector = isinstance(operand, fx.Node) and len(shape(operand)) == 1
    if not is_vector or len(dims.features) != 1 or shape(operand)[0] != shape(product)[dims.features[0]]:
        return ()
    if op_of(cast(fx.Node, operand)) is not Op.JOIN or any(writes_into(cast(fx.Node, operand))):
        return _zeroed_bias(cast(fx.Node, operand), product)
    parts: list[BiasPart] = []
    for piece in cast(Sequence[Any], cast(fx.Node, operand).args[0]):
        if not shape(piece):
            return ()  # an edit inserted it
        start = parts[-1].rows.stop if parts else 0
        rows = Slice(start, start + shape(piece)[0])
        part = None if isinstance(example(piece), nn.Parameter) else _constant_bias(piece, rows)
        if part is None and (parameter := part_of(piece, (0,), ())) is not None:
            part = BiasPart(rows, parameter)
        if part is None:
            return ()
        parts.append(part)
    return tuple(parts)


def _zeroed_bias(node: fx.Node, product: fx.Node) -> tuple[BiasPart, ...]:
    """The parts of a copy of a parameter, some of whose rows are zero before the product."""
    # Seen in: Swin v2 of torchvision, without a bias of the keys
    while node.target is new_version:
        node = cast(fx.Node, node.args[0])
    source, writers = first_input(node) if name_of(node) == "clone" else None, list(writes_into(node))
    whole = None if source is None else part_of(source, (0,), ())
    if whole is None or not all(writer < product for writer in writers):
        return ()
    zeros = torch.zeros(shape(node), dtype=torch.bool)
    for writer in writers:
        if (rows := _zero_rows(writer, node, len(zeros))) is None:
            return ()
        zeros[rows] = True
    starts = [0, *(torch.nonzero(zeros[1:] != zeros[:-1]).flatten() + 1).tolist(), len(zeros)]
    parts = [Slice(start, stop) for start, stop in itertools.pairwise(starts)]
    own = [replace(whole, rows=rows_within(whole.rows, rows, whole.size)) for rows in parts]
    return tuple(BiasPart(at, None if zeros[at.start] else part) for at, part in zip(parts, own, strict=True))


def _zero_rows(writer: fx.Node, vector: fx.Node, size: int) -> torch.Tensor | None:
    """The rows of a vector that an operation in place sets to zero; None where it does not."""
    steps: list[fx.Node] = []
    view, *operands = (*writer.args, *writer.kwargs.values())
    while isinstance(view, fx.Node) and view is not vector and op_of(view) in LAYOUT:
        steps.insert(0, view)
        view = first_input(view)
    is_zero = name_of(writer) == "zero" or (name_of(writer) in ("fill", "setitem") and operands[-1] == 0)
    rows = _view_of(torch.arange(size), vector, steps) if view is vector and is_zero else None
    if isinstance(rows, torch.Tensor) and name_of(writer) == "setitem":
        return rows[fx.map_arg(cast(Any, operands[0]), lambda n: cast(Any, example(n)))]
    return rows if isinstance(rows, torch.Tensor) else None


def _constant_bias(piece: fx.Node, rows: Slice) -> BiasPart | None:
    """A buffer, or zeros that code creates."""
    if piece.op == "get_attr":
        return BiasPart(rows, constant=str(piece.target))
    return BiasPart(rows) if is_zeros(piece) and not any(map(is_in_place, piece.users)) else None


def _bias_operand(node: fx.Node) -> object:
    """What a call adds to its product by itself."""
    if op_of(node) is Op.LINEAR:
        return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return node.args[0] if name_of(node) in ("addmm", "baddbmm") else None


def _bias(operand: object, product: fx.Node, dims: FeatureDims) -> MatrixPart | None:
    if not isinstance(operand, fx.Node):
        return None
    shift = len(shape(product)) - len(shape(operand))
    features = [dim - shift for dim in dims.features]
    if any(dim < 0 or shape(operand)[dim] != shape(product)[dim + shift] for dim in features):
        return None
    return part_of(operand, features, ())
