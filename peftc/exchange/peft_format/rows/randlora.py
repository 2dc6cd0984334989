"""RandLoRA of PEFT: products of random matrices of all modules, with trained factors of each."""

from __future__ import annotations

from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors, dropout_text, shown
from peftc.semantics.recipes import form_text

_RANDLORA = form_text("randlora")

_NOT_SAVED = "PEFT draws the matrices for all modules together, and its file does not have them"


def _randlora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.one_of("save_projection", (True,), _NOT_SAVED)
    for key in ("projection_prng_key", "sparse", "very_sparse"):  # the file has the matrices
        config.read(key, None)
    rank, alpha = config.whole("r", 32), config.number("randlora_alpha", 640)
    options = f", alpha={shown(alpha)}" if alpha != rank else ""
    return {"r": rank, "options": options + dropout_text(config, "randlora_dropout")}


RANDLORA = PeftType(
    (
        PeftRow(
            {"randlora_lambda": "randlora.factors", "randlora_gamma": "randlora.gamma"},
            "h += randlora(x, r={r}{options})",
            _RANDLORA,
            common={"base_model.randlora_A": "randlora.A", "base_model.randlora_B": "randlora.B"},
        ),
    ),
    _randlora,
    has_transposition=True,
    dimensions=3,
)
