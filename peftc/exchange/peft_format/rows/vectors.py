"""Types of PEFT that scale or shift what Linears read and give."""

from __future__ import annotations

from collections.abc import Mapping

from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors


def _ia3(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.read("feedforward_modules", None)  # the shape tells
    return {}


def _is_of_input(config: PeftConfig, tensors: Tensors) -> bool:
    """A vector (1, in) of what a Linear reads; those of outputs are (out, 1)."""
    vector = tensors["ia3_l"]
    return vector.ndim == 2 and vector.shape[0] == 1


_IA3 = {"ia3_l": "vector.scale"}

TYPES: Mapping[str, PeftType] = {
    "BEFT": PeftType(
        (
            PeftRow(
                {"beft_bias": "vector.scale"},
                "h += vector(init=0)",
                config=lambda args: {},
                linear_alone=True,
                shapes={"beft_bias": (1, -1)},
            ),
        ),
        lambda config, module, tensors: {},
    ),
    "IA3": PeftType(
        (
            PeftRow(
                _IA3,
                "h *= vector(init=1)",
                step="hidden",
                config=lambda args: {},
                fits=_is_of_input,
                shapes={"ia3_l": (1, -1)},
            ),
            PeftRow(_IA3, "h *= vector(init=1)", config=lambda args: {}, shapes={"ia3_l": (-1, 1)}),
        ),
        _ia3,
        has_transposition=True,
    ),
    "LN_TUNING": PeftType((), lambda config, module, tensors: {}),
}
