"""The labels of a contraction: which dimensions of its operands and of its result are one.

An einsum has them in its equation, or in lists behind its operands. `tensordot` and `inner` are
einsums, too.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from peftc.dataflow.nodes import shape
from peftc.dataflow.operations import name_of

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_einsum(product: fx.Node) -> bool:
    """Whether labels tell what a product sums over."""
    return product.target is torch.einsum or (name_of(product) in _PAIRS and _dims_of_pairs(product) is not None)


def equation_of(product: fx.Node) -> str:
    """`abc,cd->abd`, as the code has it or would have it."""
    if product.target is not torch.einsum:
        return _equation_of_pairs(product)
    if isinstance(product.args[0], str):
        return product.args[0]
    lists = [cast(Sequence[Any], a) for a in product.args if not isinstance(a, fx.Node)]
    texts = ["".join("..." if label is ... else _LETTERS[label] for label in labels) for labels in lists]
    inputs = ",".join(texts[: len(einsum_operands(product))])
    return f"{inputs}->{texts[-1]}" if len(texts) > len(einsum_operands(product)) else inputs


def einsum_operands(product: fx.Node) -> list[fx.Node]:
    """The operands, which may be in one list behind the equation."""
    args = product.args
    is_list = len(args) == 2 and isinstance(args[0], str) and isinstance(args[1], (tuple, list))
    operands = cast(Sequence[Any], args[1]) if is_list else args
    return [node for node in operands if isinstance(node, fx.Node)]


def einsum_labels(product: fx.Node) -> tuple[list[str], str]:
    """A label for each dimension of each operand, and of the result."""
    operands, equation = einsum_operands(product), equation_of(product)
    labels, result = expand_labels(equation, [len(shape(n)) for n in operands])
    if "->" not in equation:  # the labels that occur once, sorted
        text = "".join(labels)
        result = "".join(sorted(c for c in set(text) if text.count(c) == 1))
    return labels, result


def expand_labels(equation: str, dimensions: list[int]) -> tuple[list[str], str]:
    """The labels of an einsum's operands and of its result, with digits in the place of `...`."""
    inputs, _, result = equation.replace(" ", "").partition("->")
    texts = inputs.split(",")
    digits = [
        "0123456789"[: n - len(t.replace("...", ""))] if "..." in t else ""
        for t, n in zip(texts, dimensions, strict=False)
    ]
    most = max(digits, key=len)
    labels = [t.replace("...", most[len(most) - len(d) :]) for t, d in zip(texts, digits, strict=False)]
    return labels, result.replace("...", most)


def _equation_of_pairs(product: fx.Node) -> str:
    """The equation of a sum over pairs of dimensions; all others stay, in order."""
    first, second = (list(text) for text in _labels_of_operands(product))
    pairs = _dims_of_pairs(product) or ()
    for one, other in pairs:
        second[other] = first[one]
    summed = {first[one] for one, _ in pairs}
    result = [c for c in (*first, *second) if c not in summed]
    return f"{''.join(first)},{''.join(second)}->{''.join(result)}"


def _labels_of_operands(product: fx.Node) -> tuple[str, str]:
    first, second = (len(shape(n)) for n in einsum_operands(product))
    return _LETTERS[:first], _LETTERS[first : first + second]


def _dims_of_pairs(product: fx.Node) -> list[tuple[int, int]] | None:
    """The dimensions of two operands that are summed over; None where code computes them."""
    operands = einsum_operands(product)
    if len(operands) != 2 or min(sizes := [len(shape(n)) for n in operands]) < 1:
        return None
    return _PAIRS[name_of(product)](product, *sizes)


def _of_tensordot(product: fx.Node, first: int, second: int) -> list[tuple[int, int]] | None:
    dims: Any = product.kwargs.get("dims", product.args[2] if len(product.args) > 2 else 2)
    if isinstance(dims, int):
        return [(first - dims + i, i) for i in range(dims)]
    pair = [[one] if isinstance(one, int) else one for one in dims] if isinstance(dims, (tuple, list)) else []
    if len(pair) != 2 or not all(isinstance(dim, int) for one in pair for dim in one):
        return None
    return [(one % first, other % second) for one, other in zip(*pair, strict=True)]


def _of_inner(product: fx.Node, first: int, second: int) -> list[tuple[int, int]]:
    return [(first - 1, second - 1)]


_PAIRS: dict[str, Any] = {"tensordot": _of_tensordot, "inner": _of_inner}
