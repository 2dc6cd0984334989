"""The primitives of linear transforms, one row each: permutations, chosen places, and transforms of
signals.
"""

from __future__ import annotations

from math import prod

from peftc.equations import rules
from peftc.equations.rules import Primitive
from peftc.equations.transforms.filters import WAVELETS
from peftc.equations.values import Type


def _padded(operands: rules.Types) -> Type:
    (own,), n = rules.vector(operands).size, operands[1]
    if not isinstance(n, int) or isinstance(n, bool) or n < own:
        raise rules.Mismatch(f"the vector has {own} entries, and cannot be padded to {n}", 1, "P106")
    return Type((n,))


def _permuted(operands: rules.Types) -> Type:
    if rules.vector(operands) != rules.vector(operands, 1):
        raise rules.Mismatch(f"{operands[0]} has not as many entries as its order, {operands[1]}", 1)
    return rules.vector(operands)


def _gathered(operands: rules.Types) -> Type:
    """The rows, or entries, at places."""
    value, places = rules.tensor(operands), rules.vector(operands, 1)
    if value.batch or not value.size:
        raise rules.Mismatch(f"expected a vector or rows that are the same for all tokens, found {value}", 0)
    return Type((*places.size, *value.size[1:]))


def _shuffle(operands: rules.Types) -> Type:
    """Rows in groups, of m n parts each."""
    value, sizes = rules.tensor(operands), operands[1:]
    numbers = [n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    if value.batch or len(numbers) < len(sizes) or not value.size or value.size[0] % prod(numbers):
        texts = " × ".join(map(str, sizes))
        raise rules.Mismatch(f"{value} has no rows in {texts} parts of the same size", 0)
    return value


def _wavelet(operands: rules.Types) -> Type:
    name = operands[1]
    if name not in WAVELETS:
        raise rules.Mismatch(
            f"expected the name of a wavelet, found {name}", 1, "P106", f"one of {', '.join(WAVELETS)}"
        )
    return rules.matrix(operands)


def _walsh(operands: rules.Types) -> Type:
    (n,) = rules.vector(operands).size
    if n & (n - 1):
        raise rules.Mismatch(f"there is a Walsh-Hadamard transform of 1, 2, 4, 8, … entries, not of {n}", 0)
    return rules.vector(operands)


TRANSFORMS: dict[str, Primitive] = {
    primitive.name: primitive
    for primitive in (
        Primitive(
            "pad",
            "pad(v, n)",
            "v with zeros behind it, a vector of n entries",
            _padded,
            "peftc.equation_code.functions.pad",
            lambda x, n: 0.0 if x == 0 else None,
            "linear",
            operands=(2, 2),
        ),
        Primitive(
            "permuted",
            "permuted(v, order)",
            "the entries of v in another order: `fixed order[n] = permutation`",
            _permuted,
            "peftc.equation_code.functions.permuted",
            lambda x, order: x,
            "linear",
            operands=(2, 2),
        ),
        Primitive(
            "gather",
            "gather(v, places)",
            "the entries of v, or its rows, at places: `fixed places[k] = choice(n)`",
            _gathered,
            "peftc.equation_code.transforms.gather",
            lambda x, places: x,
            "linear",
            rules.own_rank,
            operands=(2, 2),
        ),
        Primitive(
            "shuffle",
            "shuffle(A, groups, m, n)",
            "rows numbered (group, i, j, k) as (group, j, i, k), i below m, j below n: a permutation of a butterfly",
            _shuffle,
            "peftc.equation_code.transforms.shuffle",
            lambda x, *sizes: x,
            "linear",
            rules.own_rank,
            operands=(4, 4),
        ),
        Primitive(
            "walsh",
            "walsh(v)",
            "H v, H the Hadamard matrix of as many rows, a power of two: the Walsh-Hadamard transform",
            _walsh,
            "peftc.equation_code.functions.walsh",
            lambda x: 0.0 if x == 0 else None,
            "linear",
            flops=lambda operands, result: result.entries * (result.entries.bit_length() - 1),
        ),
        Primitive(
            "fourier",
            "fourier(A)",
            "the real part of the inverse discrete Fourier transform of a matrix, in both directions",
            rules.matrix,
            "peftc.equation_code.functions.fourier",
            lambda x: 0.0 if x == 0 else None,
            "linear",
            flops=lambda operands, result: 5 * result.entries * max(1, result.entries.bit_length() - 1),
        ),
        Primitive(
            "wavelet",
            "wavelet(A, name)",
            "the inverse discrete wavelet transform of one level of a matrix, in both directions, as wide as A",
            _wavelet,
            "peftc.equation_code.transforms.wavelet",
            lambda x, name: 0.0 if x == 0 else None,
            "linear",
            flops=lambda operands, result: 4 * result.entries * len(WAVELETS[str(operands[1])]),
            operands=(2, 2),
        ),
    )
}
