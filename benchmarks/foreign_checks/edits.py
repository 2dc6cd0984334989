"""The edits of the second coverage benchmark, and which roles each of their arms needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALPHA, R = 4, 2
LORA = f"h += lora(x, r={R}, alpha={ALPHA})"
LOWRANK = f"w += lowrank(r={R}, alpha={ALPHA})"
SEQUENTIAL = "h += adapter(h, r=4, act=relu, init=lora)"
PARALLEL = "h += adapter(x, r=4, act=relu, init=lora)"
SCALE = "h *= vector(init=1)"
PREFIX = "kv = concat(prefix(len=3), kv)"


@dataclass(frozen=True)
class Arm:
    """One `edit` of a trial.

    Attributes:
        selector: below `layer[*].`.
        equation: the edit's.
        needs: a pattern of the roles without which the arm is left out.
    """

    selector: str
    equation: str
    needs: str

    def applies(self, roles: Iterable[str]) -> bool:
        return any(re.fullmatch(self.needs, role) for role in roles)


@dataclass(frozen=True)
class Trial:
    """Edits that are compiled together.

    Attributes:
        folds: whether all of it must fold into the weights.
        identity: computes what the base computes until it is trained.
        counts: whether the share of models "with every edit" counts it.
        dynamo: whether torch.compile runs on it, which takes longer than all the rest.
    """

    title: str
    arms: tuple[Arm, ...]
    folds: bool = False
    identity: bool = True
    counts: bool = True
    dynamo: bool = False

    def text(self, arms: Iterable[Arm]) -> str:
        edits = (f"edit e{self.arms.index(a)} at layer[*].{a.selector} {{ {a.equation} }}\n" for a in arms)
        return "peft 1\n" + "".join(edits)


_ATTN = r"attn\.(self\.|cross\.)?"
_PROJECTIONS = tuple(Arm(f"attn.{role}", LORA, _ATTN + role) for role in "qv")
_LINEARS = (
    Arm("attn.o", LORA, _ATTN + "o"),
    *(Arm(f"ffn.{role}", LORA, rf"ffn\.{role}") for role in ("up", "gate", "down")),
    *(Arm(f"ffn.{p}.{r}", LOWRANK, rf"ffn\.{p}\.{r}") for p in ("experts", "shared") for r in ("up", "gate", "down")),
)
_SCALES = (
    *(Arm(f"attn.{role}", SCALE, _ATTN + role) for role in "kv"),
    Arm("ffn.hidden", SCALE, r"ffn\.down"),
)

TRIALS: Mapping[str, Trial] = {
    "a": Trial("LoRA on q and v", _PROJECTIONS, folds=True, dynamo=True),
    "b": Trial("LoRA on o, up, gate and down", _LINEARS, folds=True),
    "c": Trial(
        "sequential adapter on attn, parallel on ffn",
        (Arm("attn", SEQUENTIAL, r"attn\..*"), Arm("ffn", PARALLEL, r"ffn\.(?!norm).*")),
        dynamo=True,
    ),
    "d": Trial("vectors on k, v and ffn.hidden", _SCALES, folds=True),
    "e": Trial("prefix on attn", (Arm("attn", PREFIX, r"attn\..*[qkv]"),), identity=False, counts=False),
}
