"""LoRA as other programs keep it: for each module A, B and a number, the scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peftc.exchange.low_rank_changes.products import Product

_PLACES = 4  # decimals of a number that a person may have written


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """h + scale · B A x. Shapes: A (r, in), B (out, r).

    `exact`: A and B have the bits of the parameters of the edits; else they are rounded once.
    """

    a: Tensor
    b: Tensor
    scale: float
    exact: bool = True

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def matrix(self) -> Tensor:
        """In float64."""
        return self.scale * (self.b.double() @ self.a.double())


def joined(products: Sequence[Product], dtype: torch.dtype) -> LoraWeights:
    """Products as one: A is stacked, B side by side. The scale is the commonest of their numbers;
    others move into B, where powers of two change no mantissa. Products with one A that are
    changes of other rows are one product.
    """
    products = _merged(products)
    numbers = Counter(abs(product.factor) for product in products if product.factor)
    scale = numbers.most_common(1)[0][0] if numbers else 1.0
    a = torch.cat([product.a for product in products])
    b = torch.cat([product.b * (product.factor / scale) for product in products], 1)
    own_a, own_b = a.to(dtype).contiguous(), b.to(dtype).contiguous()
    exact = (
        not any(product.computed for product in products)
        and all(_is_power_of_two(product.factor / scale) for product in products if product.factor)
        and torch.equal(own_a.double(), a)
        and torch.equal(own_b.double(), b)
    )
    return LoraWeights(own_a, own_b, scale, exact)


def _merged(products: Sequence[Product]) -> list[Product]:
    """f B A + f B' A = f (B + B') A, where no entry of B + B' is a sum of two."""
    merged = list[Product]()
    for own in products:
        for i, one in enumerate(merged):
            if _has_other_rows(one, own):
                merged[i] = replace(one, b=one.b + own.b)
                break
        else:
            merged.append(own)
    return merged


def _has_other_rows(one: Product, other: Product) -> bool:
    return (
        one.factor == other.factor
        and one.computed == other.computed
        and torch.equal(one.a, other.a)
        and not bool((one.b.any(1) & other.b.any(1)).any())
    )


def _is_power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5


def alphas(pairs: Iterable[tuple[float, int]], rslora: bool) -> list[float] | None:
    """lora_alpha for each scale and rank, so that alpha / r (alpha / √r) is the scale, bit for bit.
    None where a number has no such alpha.
    """
    result = list[float]()
    for scale, rank in pairs:
        root = math.sqrt(rank) if rslora else rank
        alpha = scale * root
        near = (round(alpha), round(alpha, _PLACES), alpha, math.nextafter(alpha, 0), math.nextafter(alpha, math.inf))
        exact = next((one for one in near if one / root == scale), None)
        if exact is None:
            return None
        result.append(exact)
    return result


def are_written(numbers: Iterable[float]) -> bool:
    """Whether a person may have written all of them."""
    return all(number == round(number, _PLACES) for number in numbers)


def chosen_alphas(pairs: Sequence[tuple[float, int]]) -> tuple[bool, list[float]] | None:
    """Whether to divide by √r, and the alphas: those that look like what was written."""
    both = ((rslora, alphas(pairs, rslora)) for rslora in (False, True))
    choices = [(rslora, own) for rslora, own in both if own is not None]
    return min(choices, key=lambda choice: not are_written(choice[1]), default=None)
