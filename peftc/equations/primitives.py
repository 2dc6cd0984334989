"""The primitives of equations: one row each, from which everything about a form follows. No torch.

A row says, of the types and numbers of its operands, which type its value has, what it equals when
training starts, whether it is affine in them, which rank it can have and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from peftc.equations import rules
from peftc.equations.matrices import MATRICES
from peftc.equations.rules import Primitive, Types
from peftc.equations.transforms.filters import WAVELETS
from peftc.equations.values import Type


def _gelu(value: float) -> float:
    return value * (1 + math.erf(value / math.sqrt(2))) / 2


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _gelu_tanh(value: float) -> float:
    return value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2


def _noise(operands: rules.Types) -> Type:
    """A tensor, and the deviation of each of its entries."""
    if rules.broadcast(operands) != rules.plain(operands):
        raise rules.Mismatch(f"{operands[1]} is no deviation for each entry of {operands[0]}", 1)
    return rules.plain(operands)


def _attention(operands: Types) -> Type:
    """Features of each token, of which each head has a part."""
    for at in range(3):
        type_ = rules.plain(operands, at)
        if type_.batch != "tokens" or len(type_.size) != 1:
            raise rules.Mismatch(f"expected features of each token, found {type_}", at)
    q, k, v = (rules.tensor(operands, at) for at in range(3))
    heads = operands[3]
    if q != k:
        raise rules.Mismatch(f"queries are {q} and keys {k}, and they have the same features", 1)
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise rules.Mismatch(f"expected a number of heads, found {heads}", 3, "P106")
    for type_ in (q, v):
        if type_.size[0] % heads:
            raise rules.Mismatch(f"{type_.size[0]} features have no {heads} equal parts, one for each head", 3, "P106")
    return v


def _attention_flops(operands: Types, result: Type) -> int:
    """Of one token that sees itself alone."""
    return 2 * rules.tensor(operands).size[0] + 2 * result.entries


def _over_batch(operands: rules.Types) -> Type:
    type_ = rules.plain(operands)
    if not type_.batch:
        raise rules.Mismatch(f"{type_} is the same for the whole batch", 0)
    return Type(type_.size)


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
    name: Primitive(
        name, f"{name}(x)", doc, rules.same, torch, initial, flops=rules.entries, entries=True, by_rows=True
    )
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
        ("cos", "the cosine", "torch.cos", math.cos),
        ("sin", "the sine", "torch.sin", math.sin),
        ("softplus", "log(1 + exp(x))", f"{_F}.softplus", lambda x: math.log1p(math.exp(x)) if x < 30 else x),
        ("exp", "the exponential function", "torch.exp", lambda x: math.exp(x) if x < 700 else math.inf),
        ("log", "the natural logarithm", "torch.log", lambda x: math.log(x) if x > 0 else None),
    )
} | {
    "none": Primitive(
        "none", "none(x)", "x", rules.same, "", lambda x: x, "linear", rules.own_rank, entries=True, by_rows=True
    )
}
_NUMBERS = ("sqrt", "abs", "log", "cos", "sin")  # functions of entries that are no activations
ACTIVATIONS: Mapping[str, Primitive] = {name: row for name, row in _ENTRIES.items() if name not in _NUMBERS}

WORDS = frozenset({*ACTIVATIONS, *WAVELETS})  # what equations name besides values

PAPER_NAMES = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}  # of activations, as papers write them

_PLACES: Mapping[str, str] = {  # where a form that asks for a size belongs
    **dict.fromkeys(("d", "widest"), "it changes hidden states, as in `h += lora(x, r=8)`"),
    **dict.fromkeys(("rows", "cols"), "it changes weights of Linears: `w += lowrank(r=8)` at `layer[*].attn.q`"),
}


def place_help(function: str, type_: Type) -> str | None:
    """Where a form that asks for this size belongs, if an input has a type without one."""
    if function in ("d", "widest") and type_.batch and len(type_.size) > 1:
        return (
            "it has heads: `x` and `h` of the Linear have none, as in `h += lora(x, r=8)` at `layer[*].attn.q`; "
            "`d_head` is the size of a head"
        )
    return _PLACES.get(function)


OF_PAIRS = "of keys and values, `heads(out)` and `d_head(out)` are sizes"
OF_VALUES: Mapping[str, str] = {  # what to write for a function of numbers, of values
    "max": "of values, `relu(z)` is max(z, 0), and `clamp(z, low, high)` has both ends",
    "min": "of values, `-relu(-z)` is min(z, 0), and `clamp(z, low, high)` has both ends",
}

FUNCTIONS: Mapping[str, Primitive] = {
    **_ENTRIES,
    **MATRICES,
    **{
        primitive.name: primitive
        for primitive in (
            Primitive(
                "softmax",
                "softmax(x)",
                "exp(x) / Σ exp(x) over the features; softmax(x, n) over the n largest, and 0 for the others",
                rules.among_features,
                "peftc.equation_code.functions.softmax",
                flops=rules.entries,
                operands=(1, 2),
                by_rows=True,
            ),
            Primitive(
                "top_k",
                "top_k(x, n)",
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
                lambda x: 0.0 if x == 0 else None,
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
                by_rows=True,
            ),
            Primitive(
                "batch_mean",
                "mean(x, batch)",
                "the mean over the tokens of all examples of the batch",
                _over_batch,
                "peftc.equation_code.functions.batch_mean",
                lambda x: x,
                flops=rules.entries,
            ),
            Primitive(
                "layer_norm",
                "layer_norm(x)",
                "(x - mean) / √(variance + e) of the features of each token, without weights; "
                "layer_norm(x, e), without e 1e-5",
                rules.normalized,
                "peftc.equation_code.functions.layer_norm",
                lambda x, *_: 0.0 if x == 0 else None,
                flops=rules.entries,
                operands=(1, 2),
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
                entries=True,
                by_rows=True,
            ),
            Primitive(
                "clamp",
                "clamp(x, low, high)",
                "x, but low where it is less, and high where it is more",
                rules.clamped,
                "torch.clamp",
                lambda x, low, high: min(max(x, low), high),
                flops=rules.entries,
                operands=(3, 3),
                entries=True,
                by_rows=True,
            ),
            Primitive(
                "logistic_noise",
                "logistic_noise(x)",
                "x; while training, x + log(u / (1 - u)), with u uniform in (0, 1) for each entry, in each forward",
                rules.same,
                "peftc.equation_code.functions.logistic_noise",
                lambda x: x,
                "linear",
                rules.own_rank,
                by_rows=True,
            ),
            Primitive(
                "normal_noise",
                "normal_noise(x, s)",
                "x; while training, x + s e, with e standard normal for each entry, in each forward",
                _noise,
                "peftc.equation_code.functions.normal_noise",
                lambda x, s: x,
                "linear",
                rules.own_rank,
                flops=rules.entries,
                operands=(2, 2),
                by_rows=True,
                only_first=True,
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
                entries=True,
                by_rows=True,
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
                entries=True,
                by_rows=True,
            ),
            Primitive(
                "positions",
                "positions(x, first, last, token)",
                "x at the first and the last tokens of each sequence, and from the id `token` on; 0 at the others",
                rules.at_positions,
                "peftc.equation_code.functions.at_positions",
                lambda x, *ends: 0.0 if x == 0 else None,
                rank=rules.own_rank,
                operands=(3, 4),
                by_rows=True,
            ),
            Primitive(
                "causal_attention",
                "causal_attention(q, k, v, heads)",
                "softmax(q kᵀ / √e) v in each head, of e features, over the tokens of a sequence up to each one",
                _attention,
                "peftc.equation_code.attention.attention_with_past",
                flops=_attention_flops,
                operands=(4, 4),
            ),
            Primitive(
                "history",
                "history(x)",
                "x at this site and at those below, one row each, from the lowest on: for each token a matrix",
                rules.history,
                "peftc.equation_code.functions.history",
                operands=(2, 2),  # the second one is the number of rows
            ),
        )
    },
}
