"""Each type of PEFT: as equations, or why it has none."""

from __future__ import annotations

from collections.abc import Mapping

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.rows import (
    decompositions,
    lora,
    maps,
    places,
    prompts,
    random,
    routed,
    vectors,
    weights,
)
from peftc.exchange.peft_format.rows.adamss import ADAMSS
from peftc.exchange.peft_format.rows.attention import cached
from peftc.exchange.peft_format.rows.attention.adaption import ADAPTION_PROMPT
from peftc.exchange.peft_format.rows.butterflies import BOFT
from peftc.exchange.peft_format.rows.glora import GLORA
from peftc.exchange.peft_format.rows.wavelets import WAVEFT
from peftc.exchange.peft_format.types import PeftType

TYPES: Mapping[str, PeftType] = {
    **vectors.TYPES,
    **lora.TYPES,
    **weights.TYPES,
    **maps.TYPES,
    **places.TYPES,
    **random.TYPES,
    **decompositions.TYPES,
    "ADAMSS": ADAMSS,
    "ADAPTION_PROMPT": ADAPTION_PROMPT,
    "BOFT": BOFT,
    "WAVEFT": WAVEFT,
    "GLORA": GLORA,
    **prompts.TYPES,
    **routed.TYPES,
    **cached.TYPES,
}


# Why no equation says what PEFT computes.
WITHOUT_EQUATION: Mapping[str, str] = {
    "SHADOW": "its first state is computed by a model of its own, with layers, attention and a cache",
    "XLORA": "what it reads is computed by a forward of its own, without its adapters",
}


def type_of(config: PeftConfig) -> PeftType:
    """Raises: P802 for a type that no equation says, with the reason."""
    name = config.values.get("peft_type")
    if config.type in TYPES:
        return TYPES[config.type]
    if config.type in WITHOUT_EQUATION:
        raise refusal("peft_type", name, WITHOUT_EQUATION[config.type])
    help_ = did_you_mean(config.type, [*TYPES, *WITHOUT_EQUATION])
    message = f"the configuration has `peft_type: {name!r}`, which peftc does not know"
    raise PeftcError(Diagnostic("P802", message, help=help_))
