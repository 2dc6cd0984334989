"""Keywords that a region's code only hands on with `**`, whichever they are.

A forward that takes `**kwargs` is given whatever the model was called with. Where its code only hands them on, the call is
traced once with none of them and once with all that transformers knows; if the two traces differ only in that some calls got
all of them, those calls are printed with `**kwargs`, and one forward serves every choice of these keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import fx

from peftc.specialization.code_printer import REST
from peftc.specialization.guarded_tracer import is_argument, name_of
from peftc.specialization.passthrough_arguments import Call, Same, alike, asked, tried

COMMON = (
    *("use_cache", "cache_position", "position_ids", "output_attentions", "output_hidden_states", "return_dict"),
    *("output_router_logits", "num_items_in_batch", "logits_to_keep", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)

WithKeywords: TypeAlias = Callable[[frozenset[str], Mapping[str, Any]], Call]
"""Traces one call: with these arguments symbolic, and these keywords."""


def open_rest(
    trace: WithKeywords, signature: inspect.Signature, handed: frozenset[str], given: Iterable[str]
) -> tuple[Call, frozenset[str]] | None:
    """The trace of a call without keywords, in which the calls that are given the rest are marked; and which keywords that
    rest may have, those `given` in this call among them. None where there is no such trace.
    """
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    own = frozenset(n for n in handed if not n.startswith("**"))
    if rest is None or not handed.issuperset(f"**{k}" for k in given):
        return None
    base = tried(trace, own, {})
    keys = frozenset([*COMMON, *given]).difference(signature.parameters)
    while base is not None and keys:
        probe = tried(trace, own | {f"**{k}" for k in keys}, dict.fromkeys(keys))
        lost = asked(probe) if probe else frozenset(f"**{k}" for k in keys)
        found = WithRest(probe, keys) if probe else None
        agree = not lost and probe is not None and found is not None and alike(base[0], probe[0], found)
        if agree and found is not None:
            for node in found.given:
                node.meta[REST] = rest
            return (base, keys) if keys.issuperset(given) else None
        lost = frozenset(n[2:] for n in lost) | (found.lost if found else frozenset())
        keys = keys - lost if lost & keys else frozenset()
    return None


class WithRest(Same):
    """Compares a trace without keywords with one that has `keys`, where some calls are given all of them."""

    def __init__(self, probe: Call, keys: frozenset[str]) -> None:
        self.keys = keys
        names = {f"**{k}" for k in keys}
        super().__init__({n: object() for n in probe[0].graph.nodes if is_argument(n) and name_of(n) in names})
        self.given: list[fx.Node] = []
        self.lost = frozenset[str]()  # keys that some call was not given with the others

    def keywords(self, a: fx.Node, b: fx.Node) -> bool:
        extra = frozenset(k for k, v in b.kwargs.items() if v in self.constants and k not in a.kwargs)
        if extra and extra != self.keys:
            self.lost |= self.keys - extra
            return False
        if extra:
            self.given.append(a)
        return self.argument(a.kwargs, {k: v for k, v in b.kwargs.items() if k not in extra})
