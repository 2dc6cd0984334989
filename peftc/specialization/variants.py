"""Variants: the specialisations of a region's forward, one for each call pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from peftc.diagnostics.diagnostic import printable


@dataclass(frozen=True)
class Variant:
    """One specialisation of a forward. `traits`: what its conditions mean."""

    name: str
    conditions: tuple[str, ...]
    graph: fx.Graph
    source: str
    holds: Callable[..., bool]
    passthrough: frozenset[str]
    traits: Mapping[str, str] = field(default_factory=dict[str, str])


def captions(variants: Sequence[Variant]) -> list[str]:
    """What each variant is for: `evaluation, with a cache`. Named is what tells the variants apart.

    Variants with the same traits are told apart by their first condition that others do not have.
    """
    names = dict.fromkeys(name for v in variants for name in v.traits if name not in ("mode", "cache"))
    differing = [name for name in names if len({v.traits.get(name) for v in variants}) > 1]
    labels: list[str] = []
    for variant in variants:
        words = [variant.traits.get("mode", "training and evaluation"), variant.traits.get("cache")]
        labels.append(", ".join(filter(None, [*words, *(variant.traits.get(name) for name in differing)])))
    found: list[str] = []
    for variant, label in zip(variants, labels, strict=True):
        twins = [v for v, other in zip(variants, labels, strict=True) if other == label and v is not variant]
        own = next((c for c in variant.conditions if any(c not in v.conditions for v in twins)), None)
        found.append(printable(label if own is None else f"{label}, {own}")[:110])
    return found
