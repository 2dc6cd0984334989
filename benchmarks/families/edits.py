"""The five edits that run on every model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """An edit: its arms (each a selector and the part of the model that it needs), its equation,
    and whether it is the identity at initialisation.
    """

    arms: tuple[tuple[str, str], ...]  # (selector, "attn" | "projection" | "ffn" | "layer")
    equation: str
    identity: bool = True  # computes what the base computes until it is trained

    def text(self, arms: tuple[tuple[str, str], ...] | None = None) -> str:
        selector = " | ".join(s for s, _ in arms or self.arms)
        return f"peft 1\nedit e at {selector} {{ {self.equation} }}\n"


TRIALS: Mapping[str, Trial] = {
    "a": Trial((("layer[*].attn.q", "projection"), ("layer[*].attn.v", "projection")), "h += lora(x, r=2, alpha=4)"),
    "b": Trial((("layer[*].ffn", "ffn"),), "h += adapter(x, r=4, act=relu, init=lora)"),
    "c": Trial((("layer[*].attn", "attn"), ("layer[*].ffn", "ffn")), "h += adapter(h, r=4, act=relu, init=lora)"),
    "d": Trial((("layer[*].attn", "attn"),), "kv = concat(prefix(len=3), kv)", identity=False),
    "e": Trial((("layer[*]", "layer"),), "h *= vector(init=1)"),
}
TITLES: Mapping[str, str] = {
    "a": "LoRA on q and v",
    "b": "parallel adapter on ffn",
    "c": "sequential adapter on attn and ffn",
    "d": "prefix on attn",
    "e": "vector on layer",
}
