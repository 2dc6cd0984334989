"""The types of PEFT adapters as equations: one row for each set of tensors of a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig, refusal

Tensors = Mapping[str, Tensor]  # of one module, by the end of their names in PEFT
Numbers = dict[str, Any]  # for the braces of an equation
_LORA_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")  # which leave the base as it is


@dataclass(frozen=True)
class PeftRow:
    """What PEFT computes at a module that has these tensors.

    Attributes:
        tensors: the end of PEFT's name, and ours: `form.parameter`.
        equation: at the module, with braces for numbers.
        step: the site below the module's own sub-layer where the equation stands, if it is not the
            module itself.
    """

    tensors: Mapping[str, str]
    equation: str
    step: str = ""


@dataclass(frozen=True)
class PeftType:
    """A type of adapters.

    Attributes:
        rows: by the tensors of a module.
        numbers: reads the configuration for a module. Raises: P802.
        ignored: keys that matter for training alone, or together with others.
    """

    rows: tuple[PeftRow, ...]
    numbers: Callable[[PeftConfig, str, Tensors], Numbers]
    ignored: Collection[str] = field(default=())

    def row(self, ends: Collection[str], chosen: str = "") -> PeftRow | None:
        return next((row for row in self.rows if set(row.tensors) == set(ends) and row.step == chosen), None)


def shown(number: float) -> str:
    """A number in the text of a spec, of which all digits are read again."""
    return str(int(number)) if float(number).is_integer() and abs(number) < 2**53 else repr(float(number))


def _lora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.one_of(
        "init_lora_weights", _LORA_INITS, "PEFT changes the weights of the base when it loads such an adapter"
    )
    rank = int(config.number("r", 8, module, "rank_pattern"))
    alpha = config.number("lora_alpha", 8, module, "alpha_pattern")
    rslora, dropout = config.flag("use_rslora"), config.number("lora_dropout", 0.0)
    config.flag("use_dora")  # its tensors tell
    config.flag("lora_bias")
    if alpha <= 0:
        raise refusal("lora_alpha", alpha, "it is above 0")
    options = f", alpha={shown(alpha)}" if alpha != rank or rslora else ""
    options += ", rslora=true" if rslora else ""
    return {
        "r": rank,
        "options": options,
        "dropout": f", dropout={shown(dropout)}" if dropout else "",
        "scale": shown(alpha / (math.sqrt(rank) if rslora else rank)),
    }


_A, _B = "lora_A.weight", "lora_B.weight"
_LORA_ROWS = (
    PeftRow({_A: "lora.A", _B: "lora.B"}, "h += lora(x, r={r}{options}{dropout})"),
    PeftRow(
        {_A: "lowrank.A", _B: "lowrank.B", "lora_magnitude_vector": "magnitude.m"},
        "w = magnitude(w + lowrank(r={r}{options}))",
    ),
    PeftRow(
        {_A: "lora.A", _B: "lora.B", "lora_B.bias": "vector.scale"},
        "h += {scale} * (lora(x, r={r}{dropout}) + vector(init=0))",
    ),
    PeftRow({"lora_embedding_A": "lora.A", "lora_embedding_B": "lora.B"}, "h += lora(x, r={r}{options})"),
)

TYPES: Mapping[str, PeftType] = {
    "LORA": PeftType(_LORA_ROWS, _lora, ("qalora_group_size", "loftq_config", "eva_config", "lora_ga_config")),
}
