"""The primitives of matrices, one row each, and decompositions, for first values."""

from __future__ import annotations

from collections.abc import Mapping

from peftc.equations import rules
from peftc.equations.rules import Primitive
from peftc.equations.transforms.rows import TRANSFORMS
from peftc.equations.values import Type

_SVD, _QR = "peftc.equation_code.functions.svd", "peftc.equation_code.functions.qr"


def _scattered(operands: rules.Types) -> Type:
    value, places, n = rules.tensor(operands), rules.vector(operands, 1), operands[2]
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise rules.Mismatch(f"expected a whole number above 0, found {n}", 2, "P106")
    if value.batch or value.size[:1] != places.size:
        raise rules.Mismatch(f"{value} has not one row for each of the places {places}")
    return Type((n, *value.size[1:]))


def _at_places(operands: rules.Types) -> Type:
    value, places = rules.tensor(operands), rules.vector(operands, 1)
    if value.batch or not value.size or value.size[0] < places.size[0]:
        raise rules.Mismatch(f"{value} has not as many rows as there are places, {places}")
    return value


def _rows(operands: rules.Types) -> Type:
    """Rows of keys, of each head."""
    type_ = rules.tensor(operands)
    if type_.batch or len(type_.size) != 3:
        raise rules.Mismatch(f"expected rows of keys [heads, rows, features], found {type_}", 0)
    return type_


def _circulant(operands: rules.Types) -> Type:
    """Of one vector (b,), or of each of m × n blocks (m, n, b)."""
    c = rules.tensor(operands)
    if c.batch or len(c.size) not in (1, 3):
        raise rules.Mismatch(f"expected a vector, or m × n vectors [m, n, b], found {c}", 0)
    *counts, b = c.size
    return Type(tuple(count * b for count in counts or (1, 1)))


def _pruned(operands: rules.Types) -> Type:
    """A parameter of a site, of which entries are left."""
    value, n = rules.tensor(operands), operands[2]
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise rules.Mismatch(f"expected a whole number above 0, found {n}", 2, "P106")
    if rules.broadcast(operands[:2]) != value:
        raise rules.Mismatch(f"{operands[1]} is no factor for each entry of {value}", 1)
    return value


def _under_budget(operands: rules.Types) -> Type:
    """A vector, five whole numbers and two others."""
    for at, number in enumerate(operands[1:], 1):
        if not isinstance(number, int if at < 6 else int | float) or isinstance(number, bool):
            raise rules.Mismatch(f"expected {'a whole' if at < 6 else 'a'} number, found {number}", at, "P106")
    return rules.vector(operands)


def _joined(operands: rules.Types) -> Type:
    """Vectors, or the features of each token, one behind the other."""
    parts = [rules.plain(operands, at) for at in range(len(operands))]
    for at, type_ in enumerate(parts):
        if len(type_.size) != 1 or type_.batch != parts[0].batch:
            raise rules.Mismatch(f"expected vectors, or features of each token, found {parts[0]} and {type_}", at)
    return Type((sum(type_.size[0] for type_ in parts),), parts[0].batch)


def _column(operands: rules.Types) -> Type:
    return Type((*rules.vector(operands).size, 1))


MATRICES: Mapping[str, Primitive] = TRANSFORMS | {
    primitive.name: primitive
    for primitive in (
        Primitive(
            "corner",
            "corner(A, rows, columns)",
            "the first rows and columns of a matrix",
            rules.corner,
            "peftc.equation_code.functions.corner",
            lambda x, rows, columns: x,
            "linear",
            rules.own_rank,
            operands=(3, 3),
            by_rows=True,
        ),
        Primitive(
            "column",
            "column(v)",
            "a vector as a matrix of one column: a factor for each row of a matrix",
            _column,
            "peftc.equation_code.functions.column",
            lambda x: x,
            "linear",
        ),
        Primitive(
            "reshape",
            "reshape(A, rows, columns)",
            "the entries of A in their order, with these dimensions; of x the features of each token",
            rules.reshaped,
            "peftc.equation_code.functions.reshape",
            lambda x, *sizes: x,
            "linear",
            operands=(2, 5),
        ),
        Primitive(
            "total",
            "total(A)",
            "the sum of all entries of a parameter",
            rules.one,
            "torch.sum",
            lambda x: 0.0 if x == 0 else None,
            flops=lambda operands, result: rules.tensor(operands).entries,
        ),
        Primitive(
            "narrow",
            "narrow(A, start, count)",
            "so many of the rows of A, or entries of a vector, from the one numbered `start` on; of x of the features",
            rules.narrowed,
            "peftc.equation_code.functions.narrow",
            lambda x, start, count: x,
            "linear",
            rules.own_rank,
            operands=(3, 3),
        ),
        Primitive(
            "t",
            "t(A)",
            "the transpose, of each head",
            rules.transpose,
            "peftc.equation_code.functions.t",
            lambda x: x,
            "linear",
            rules.own_rank,
            by_rows=True,
        ),
        Primitive(
            "kron",
            "kron(A, B)",
            "the Kronecker product",
            rules.kronecker,
            "peftc.equation_code.functions.kron",
            float.__mul__,
            "product",
            rules.product_of_ranks,
            rules.entries,
            operands=(2, 2),
        ),
        Primitive(
            "blocks",
            "blocks(A)",
            "the matrix with the blocks of A [count, rows, columns] on its diagonal",
            rules.block_diagonal,
            "peftc.equation_code.functions.blocks",
            lambda x: 0.0 if x == 0 else None,
            "linear",
        ),
        Primitive(
            "orthonormal",
            "orthonormal(A)",
            "the rows of A made orthonormal, one after the other (Gram-Schmidt)",
            rules.wide_matrix,
            "peftc.equation_code.functions.orthonormal",
            rank=rules.own_rank,
            flops=lambda operands, result: 4 * result.entries * result.size[0],
            by_rows=True,
        ),
        Primitive(
            "skew",
            "skew(q)",
            "the skew-symmetric matrices with the entries of q [count, n (n - 1) / 2] above the diagonal",
            rules.skew,
            "peftc.equation_code.functions.skew",
            lambda x: 0.0 if x == 0 else None,
            "linear",
        ),
        Primitive(
            "eye",
            "eye(A)",
            "the identity, as large as the square matrix A, of each block",
            rules.square,
            "peftc.equation_code.functions.eye",
            affinity="linear",
        ),
        Primitive(
            "power",
            "power(A, n)",
            "the product of n times A, of each block",
            rules.power,
            "torch.linalg.matrix_power",
            lambda x, n: 0.0 if x == 0 and n > 0 else None,
            flops=lambda operands, result: 2 * result.entries * result.size[-1],
            operands=(2, 2),
        ),
        Primitive(
            "solve",
            "solve(A, B)",
            "A⁻¹ B, of each block",
            rules.solution,
            "peftc.equation_code.functions.solve",
            lambda a, b: 0.0 if b == 0 else None,
            flops=lambda operands, result: 2 * result.entries * result.size[-2],
            operands=(2, 2),
        ),
        Primitive(
            "cayley",
            "cayley(Q)",
            "(I - Q) (I + Q)⁻¹, of each block: a rotation if Q is skew-symmetric",
            rules.square,
            "peftc.equation_code.functions.cayley",
            flops=lambda operands, result: 2 * result.entries * result.size[-1],
        ),
        Primitive(
            "circulant",
            "circulant(c)",
            "the matrix whose column j is c, moved down by j; of c[m, n, b] the matrix of m × n such blocks",
            _circulant,
            "peftc.equation_code.functions.circulant",
            lambda x: x,
            "linear",
        ),
        Primitive(
            "pruned",
            "pruned(v, z, n)",
            "v z; after `peftc.calibrate` v, of which n entries of all sites are left, and the others are 0",
            _pruned,
            "peftc.equation_code.functions.pruned",
            flops=lambda operands, result: 2 * result.entries,
            operands=(3, 3),
        ),
        Primitive(
            "concat",
            "concat(u, v)",
            "vectors, or the features of each token, one behind the other; of two or more",
            _joined,
            "peftc.equation_code.functions.concat",
            lambda *numbers: numbers[0] if len(set(numbers)) == 1 else None,
            "sum",
            rules.sum_of_ranks,
            operands=(2, 16),
        ),
        Primitive(
            "budget",
            "budget(v, target, total, warmup, cooldown, every, beta1, beta2)",
            "v; training gives up its least important entries, until there are `target` at each site",
            _under_budget,
            "",
            affinity="linear",
            operands=(8, 8),
            by_rows=True,
        ),
        Primitive(
            "scatter",
            "scatter(v, places, n)",
            "n rows, or entries, of which those at `places` are v, and the others 0",
            _scattered,
            "peftc.equation_code.functions.scatter",
            affinity="linear",
            operands=(3, 3),
        ),
        Primitive(
            "rows_at",
            "rows_at(a, places)",
            "a at the rows, or entries, of these places, and 0 at the others",
            _at_places,
            "peftc.equation_code.transforms.rows_at",
            lambda a, places: 0.0 if a == 0 else None,
            "linear",
            flops=rules.entries,
            operands=(2, 2),
        ),
        Primitive(
            "counted",
            "counted(rows)",
            "rows of keys that positions count: the first token has the number of rows as its position",
            _rows,
            "",
            lambda x: x,
            "linear",
            rules.own_rank,
        ),
        Primitive(
            "inverse",
            "inverse(A)",
            "A⁻¹, of each block",
            rules.square,
            "peftc.equation_code.functions.inverse",
            flops=lambda operands, result: 2 * result.entries * result.size[-1],
        ),
    )
}

# Parts of decompositions, by their names in texts.
DECOMPOSITIONS: Mapping[str, Primitive] = {
    f"{function}.{part}": Primitive(f"{function}.{part}", f"{call}.{part}", doc, rule, torch, operands=operands)
    for function, part, call, doc, rule, torch, operands in (
        (
            "svd",
            "u",
            "svd(w, r)",
            "the first r left singular vectors, as columns",
            rules.left_vectors,
            _SVD,
            (2, 2),
        ),
        ("svd", "s", "svd(w, r)", "the r largest singular values of w", rules.singular_values, _SVD, (2, 2)),
        (
            "svd",
            "v",
            "svd(w, r)",
            "the first r right singular vectors, as columns",
            rules.right_vectors,
            _SVD,
            (2, 2),
        ),
        ("qr", "q", "qr(w)", "Q of w = Q R, with orthonormal columns", rules.orthonormal_factor, _QR, (1, 1)),
        ("qr", "r", "qr(w)", "R of w = Q R, upper triangular", rules.triangular_factor, _QR, (1, 1)),
    )
}
DECOMPOSED = {"svd": ("u", "s", "v"), "qr": ("q", "r")}
