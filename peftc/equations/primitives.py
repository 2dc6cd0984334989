"""The primitives of equations: one row each, from which everything about a form follows. No torch.

A row says, of the types and numbers of its operands, which type its value has, what it equals when
training starts, whether it is affine in them, which rank it can have and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from peftc.diagnostics.record import record
from peftc.equations import rules
from peftc.equations.rules import Operand, Types
from peftc.equations.values import Type

Affinity = Literal["linear", "sum", "product", "quotient", "nonlinear"]


@record()
class Primitive:
    """One operation.

    Attributes:
        name: as it is written.
        signature: how it is called.
        doc: what it computes.
        type: the type of the value, of the types of its operands (numbers stay numbers).
        torch: the function that computes it, by its dotted name.
        initial: its value of the initial values of its operands, if all are numbers.
        affinity: "linear" in its first operand, a "sum", a "product" or a "quotient" of its two,
            or "nonlinear".
        rank: the most rank of its value, of the ranks and types of its operands.
        flops: for one token, of the types of operands and value.
        operands: how many it takes, at least and at most.
        by_rows: whether it also holds for operands with a first dimension of rows, aligned from
            the right: it acts on entries, or on the last dimension.
    """

    name: str
    signature: str
    doc: str
    type: Callable[[Types], Type]
    torch: str
    initial: Callable[..., float | None] | None = None
    affinity: Affinity = "nonlinear"
    rank: Callable[[Sequence[Operand]], int | None] | None = None
    flops: Callable[[Types, Type], int] | None = None
    operands: tuple[int, int] = (1, 1)
    by_rows: bool = False


# The table


def _gelu(value: float) -> float:
    return value * (1 + math.erf(value / math.sqrt(2))) / 2


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _gelu_tanh(value: float) -> float:
    return value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2


_F = "torch.nn.functional"
OPERATORS: Mapping[str, Primitive] = {
    "@": Primitive(
        "@",
        "A @ x",
        "the product of a matrix with each vector of features, with a matrix or with a vector",
        rules.product,
        f"{_F}.linear",
        affinity="product",
        rank=rules.least_rank,
        flops=rules.matmul_flops,
        operands=(2, 2),
    ),
    "+": Primitive(
        "+",
        "a + b",
        "the sum",
        rules.broadcast,
        "operator.add",
        float.__add__,
        "sum",
        rules.sum_of_ranks,
        rules.entries,
        operands=(2, 2),
    ),
    "-": Primitive(
        "-",
        "a - b",
        "the difference",
        rules.broadcast,
        "operator.sub",
        float.__sub__,
        "sum",
        rules.sum_of_ranks,
        rules.entries,
        operands=(2, 2),
    ),
    "*": Primitive(
        "*",
        "a * b",
        "the product of the entries",
        rules.broadcast,
        "operator.mul",
        float.__mul__,
        "product",
        rules.product_of_ranks,
        rules.entries,
        operands=(2, 2),
    ),
    "/": Primitive(
        "/",
        "a / b",
        "the quotient of the entries",
        rules.broadcast,
        "operator.truediv",
        float.__truediv__,
        "quotient",
        rules.quotient_rank,
        rules.entries,
        operands=(2, 2),
    ),
}

_ENTRIES: Mapping[str, Primitive] = {
    name: Primitive(name, f"{name}(x)", doc, rules.same, torch, initial, flops=rules.entries, by_rows=True)
    for name, doc, torch, initial in (
        ("relu", "max(x, 0)", f"{_F}.relu", lambda x: max(x, 0.0)),
        ("gelu", "x Φ(x)", f"{_F}.gelu", _gelu),
        ("gelu_tanh", "gelu, approximated by tanh", "peftc.equation_code.functions.gelu_tanh", _gelu_tanh),
        ("silu", "x σ(x)", f"{_F}.silu", lambda x: x * _sigmoid(x)),
        ("leaky_relu", "x, or x / 100 below zero", f"{_F}.leaky_relu", lambda x: max(x, 0.01 * x)),
        ("tanh", "the hyperbolic tangent", "torch.tanh", math.tanh),
        ("sigmoid", "σ(x) = 1 / (1 + exp(-x))", "torch.sigmoid", _sigmoid),
        ("sqrt", "the square root", "torch.sqrt", lambda x: math.sqrt(x) if x >= 0 else None),
        ("abs", "|x|", "torch.abs", math.fabs),
        ("softplus", "log(1 + exp(x))", f"{_F}.softplus", lambda x: math.log1p(math.exp(x)) if x < 30 else x),
        ("exp", "the exponential function", "torch.exp", lambda x: math.exp(x) if x < 700 else math.inf),
    )
} | {"none": Primitive("none", "none(x)", "x", rules.same, "", lambda x: x, "linear", rules.own_rank, by_rows=True)}
ACTIVATIONS: Mapping[str, Primitive] = {name: row for name, row in _ENTRIES.items() if name not in ("sqrt", "abs")}

PAPER_NAMES = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}  # of activations, as papers write them

FUNCTIONS: Mapping[str, Primitive] = {
    **_ENTRIES,
    **{
        primitive.name: primitive
        for primitive in (
            Primitive(
                "softmax",
                "softmax(x)",
                "exp(x) / Σ exp(x) over the features; softmax(x, k) over the k largest, and 0 for the others",
                rules.among_features,
                "peftc.equation_code.functions.softmax",
                flops=rules.entries,
                operands=(1, 2),
                by_rows=True,
            ),
            Primitive(
                "top_k",
                "top_k(x, k)",
                "the k largest features, and 0 for the others",
                rules.among_features,
                "peftc.equation_code.functions.top_k",
                lambda x, k: 0.0 if x == 0 else None,
                flops=rules.entries,
                operands=(2, 2),
                by_rows=True,
            ),
            Primitive(
                "rms_norm",
                "rms_norm(x)",
                "x / √(mean of x²) of the features of each token, without weights",
                rules.same,
                "peftc.equation_code.functions.rms_norm",
                lambda x: 0.0 if x == 0 else None,
                flops=rules.entries,
                by_rows=True,
            ),
            Primitive(
                "norm",
                "norm(w)",
                "‖w‖ of each row, or of the features of each token",
                rules.last_of_each,
                "peftc.equation_code.functions.norm",
                flops=lambda operands, result: 2 * rules.tensor(operands).entries,
                by_rows=True,
            ),
            Primitive(
                "mean",
                "mean(x)",
                "the mean of the features, or of each row",
                rules.last_of_each,
                "peftc.equation_code.functions.mean",
                lambda x: x,
                "linear",
                flops=lambda operands, result: rules.tensor(operands).entries,
                by_rows=True,
            ),
            Primitive(
                "token_mean",
                "mean(x, tokens)",
                "the mean over the tokens of each example",
                rules.over_tokens,
                "peftc.equation_code.functions.token_mean",
                lambda x: x,
                flops=rules.entries,
            ),
            Primitive(
                "layer_norm",
                "layer_norm(x)",
                "(x - mean) / deviation of the features of each token, without weights",
                rules.same,
                "peftc.equation_code.functions.layer_norm",
                lambda x: 0.0 if x == 0 else None,
                flops=rules.entries,
                by_rows=True,
            ),
            Primitive(
                "dropout",
                "dropout(x, p)",
                "x; while training, each entry is zero with probability p",
                rules.dropout,
                f"{_F}.dropout",
                lambda x, p: x,
                "linear",
                rules.own_rank,
                operands=(2, 2),
                by_rows=True,
            ),
            Primitive(
                "frozen",
                "frozen(x)",
                "x, through which no gradient flows",
                rules.same,
                "torch.Tensor.detach",
                lambda x: x,
                "linear",
                rules.own_rank,
                by_rows=True,
            ),
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
                rules.column,
                "peftc.equation_code.functions.column",
                lambda x: x,
                "linear",
            ),
            Primitive(
                "ratio",
                "ratio(a, b)",
                "a / b, and a where b is 0",
                rules.broadcast,
                "peftc.equation_code.functions.ratio",
                affinity="quotient",
                rank=rules.quotient_rank,
                flops=rules.entries,
                operands=(2, 2),
                by_rows=True,
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
                affinity="linear",
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
                "torch.linalg.solve",
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
                "the matrix whose column j is c, moved down by j",
                rules.circulant,
                "peftc.equation_code.functions.circulant",
                lambda x: x,
                "linear",
            ),
            Primitive(
                "fourier",
                "fourier(A)",
                "the real part of the inverse discrete Fourier transform of a matrix, in both directions",
                rules.same_matrix,
                "peftc.equation_code.functions.fourier",
                lambda x: 0.0 if x == 0 else None,
                "linear",
                flops=lambda operands, result: 5 * result.entries * max(1, result.entries.bit_length() - 1),
            ),
            Primitive(
                "inverse",
                "inverse(A)",
                "A⁻¹, of each block",
                rules.square,
                "torch.linalg.inv",
                flops=lambda operands, result: 2 * result.entries * result.size[-1],
            ),
        )
    },
}
