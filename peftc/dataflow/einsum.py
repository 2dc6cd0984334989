"""The labels of an einsum: which dimensions of its operands and of its result are one."""

from torch import fx

from peftc.dataflow.nodes import shape


def einsum_operands(product: fx.Node) -> list[fx.Node]:
    """The operands of `einsum(equation, *operands)`, which may be in one list."""
    operands = product.args[1] if isinstance(product.args[1], (tuple, list)) else product.args[1:]
    return [node for node in operands if isinstance(node, fx.Node)]


def einsum_labels(product: fx.Node) -> tuple[list[str], str]:
    """A label for each dimension of each operand, and of the result."""
    operands = einsum_operands(product)
    labels, result = expand_labels(str(product.args[0]), [len(shape(n)) for n in operands])
    if "->" not in str(product.args[0]):  # the labels that occur once, sorted
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
