"""The primitives of equations: one row each, from which everything about a form follows. No torch.

A row says, of the types and numbers of its operands, which type its value has, what it equals when
training starts, whether it is affine in them, which rank it can have and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
        least, most: how many operands it takes.
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
    least: int = 1
    most: int = 1
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
        least=2,
        most=2,
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
        least=2,
        most=2,
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
        least=2,
        most=2,
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
        least=2,
        most=2,
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
        least=2,
        most=2,
    ),
}

ACTIVATIONS: Mapping[str, Primitive] = {
    name: Primitive(name, f"{name}(x)", doc, rules.same, torch, initial, flops=rules.entries, by_rows=True)
    for name, doc, torch, initial in (
        ("relu", "max(x, 0)", f"{_F}.relu", lambda x: max(x, 0.0)),
        ("gelu", "x Φ(x)", f"{_F}.gelu", _gelu),
        ("gelu_tanh", "gelu, approximated by tanh", "peftc.equation_code.functions.gelu_tanh", _gelu_tanh),
        ("silu", "x σ(x)", f"{_F}.silu", lambda x: x * _sigmoid(x)),
        ("leaky_relu", "x, or x / 100 below zero", f"{_F}.leaky_relu", lambda x: max(x, 0.01 * x)),
        ("tanh", "the hyperbolic tangent", "torch.tanh", math.tanh),
        ("sigmoid", "σ(x) = 1 / (1 + exp(-x))", "torch.sigmoid", _sigmoid),
        ("softplus", "log(1 + exp(x))", f"{_F}.softplus", lambda x: math.log1p(math.exp(x)) if x < 30 else x),
        ("exp", "the exponential function", "torch.exp", lambda x: math.exp(x) if x < 700 else math.inf),
    )
} | {"none": Primitive("none", "none(x)", "x", rules.same, "", lambda x: x, "linear", rules.own_rank, by_rows=True)}

PAPER_NAMES = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}  # of activations, as papers write them

FUNCTIONS: Mapping[str, Primitive] = {
    **ACTIVATIONS,
    **{
        primitive.name: primitive
        for primitive in (
            Primitive(
                "softmax",
                "softmax(x)",
                "exp(x) / Σ exp(x) over the features",
                rules.same,
                "peftc.equation_code.functions.softmax",
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
                least=2,
                most=2,
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
                least=3,
                most=3,
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
                least=2,
                most=2,
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
                least=2,
                most=2,
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

# Functions of numbers, and of the shapes of inputs and of `out`, the state that is written.
NUMBERS: Mapping[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "abs": abs,
    "floor": math.floor,
    "root_divisor": lambda n: max(m for m in range(1, math.isqrt(n) + 1) if n % m == 0),
}
SIZES: Mapping[str, str] = {
    "d": "the features of hidden states, or of a vector",
    "rows": "the outputs of a weight",
    "cols": "the inputs of a weight",
    "heads": "the heads of an attention's states",
    "d_head": "the features of a head",
    "widest": "the most features that any site of the edit has there",
}
INITIAL_VALUES: Mapping[str, str] = {
    "zeros": "0",
    "ones": "1",
    "kaiming": "uniform in ±1/√(last size), as nn.Linear",
    "normal": "normal, normal(std) with a standard deviation other than 1",
    "truncated": "normal, cut at two deviations: truncated(std)",
    "uniform": "uniform in ±bound: uniform(bound)",
    "orthogonal": "orthonormal rows, or columns if there are more rows",
    "identity": "ones on the diagonal",
}
