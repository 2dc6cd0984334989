"""The specialised forwards of a generated class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from peftc.diagnostics.diagnostic import printable


@dataclass(frozen=True)
class Variant:
    """One specialisation of a forward.

    Args:
        predicate: the source of `holds`, and the names that it uses.
        traits: what its conditions mean.
    """

    name: str
    conditions: tuple[str, ...]
    make_graph: Callable[[], fx.Graph]
    source: str
    predicate: tuple[str, Mapping[str, Any]]
    passthrough: frozenset[str]
    traits: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def graph(self) -> fx.Graph:
        return self.make_graph()

    @cached_property
    def holds(self) -> Callable[..., bool]:
        """Whether it is for a call: a function of the module and the arguments."""
        source, values = self.predicate
        namespace = dict(values)
        exec(compile(source, f"<peftc {self.name}>", "exec"), namespace)
        return namespace["holds"]


def captions(variants: Sequence[Variant]) -> list[str]:
    """What each variant is for: mode, cache, distinctive traits; of twins also a condition."""
    names = dict.fromkeys(n for v in variants for n in v.traits if n not in ("mode", "cache"))
    shown = ["cache", *(n for n in names if len({v.traits.get(n) for v in variants}) > 1)]
    words = [[v.traits.get("mode", "training and evaluation"), *map(v.traits.get, shown)] for v in variants]
    labels = [", ".join(filter(None, each)) for each in words]
    texts: list[str] = []
    for variant, label in zip(variants, labels, strict=True):
        twins = [v for v, other in zip(variants, labels, strict=True) if other == label and v is not variant]
        own = next((c for c in variant.conditions if any(c not in v.conditions for v in twins)), None)
        texts.append(printable(label if own is None else f"{label}, {own}")[:110])
    return texts
