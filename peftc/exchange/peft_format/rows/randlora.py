"""RandLoRA of PEFT: products of random matrices of all modules, with trained factors of each."""

from __future__ import annotations

from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors, dropout_text, shown

_RANDLORA = """
# A sum of products of random matrices, which all sites of the edit have in common, with trained factors between them.
# Albert et al. 2025, arXiv:2502.00987 (RandLoRA)
form randlora(
    x,
    r,  # rank of each product
    alpha = r,  # numerator of the scale
    dropout = 0,  # probability of zeroing a feature while training
) {
    let least = min(d(x), d(out))
    let most = max(d(x), d(out))
    let n = floor((least + r - 1) / r)
    let widest_n = floor((min(widest(x), widest(out)) + r - 1) / r)
    param A[r, min(widest(x), widest(out))] per edit = kaiming
    param B[max(widest(x), widest(out)), widest_n, r] per edit = kaiming
    param factors[r, n] = 0
    param gamma[n, least] = 1 / most
    fixed copies[n, 1] = ones
    fixed ranks[r, 1] = ones
    let scaled = column(reshape(factors, r * n)) * kron(corner(frozen(A), r, least), copies) * kron(ranks, gamma)
    let wide = corner(reshape(frozen(B), max(widest(x), widest(out)), widest_n * r), most, n * r)
    f = alpha / r * wide @ scaled @ dropout(x, dropout) if d(x) <= d(out)
    f = alpha / r * t(scaled) @ t(wide) @ dropout(x, dropout) if d(x) > d(out)
}
"""

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
