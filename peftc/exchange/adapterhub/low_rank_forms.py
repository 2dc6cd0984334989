"""What a LoRA of AdapterHub has at a Linear: a product of two matrices, of four, or a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown

_VERA = """
# VeRA whose trained factors d and b are whole matrices. All sites have the frozen A and B in common.
# Kopiczko et al. 2024, arXiv:2310.11454, Eq. 2, as the library `adapters` has it
form vera_matrices(
    x,
    r,  # rows of A
    alpha = r,  # numerator of the scale
    dropout = 0,  # probability of zeroing a feature while training
) {
    fixed A[r, d(x)] per edit = buffer
    fixed B[d(out), r] per edit = buffer
    param d[r, r] = identity
    param b[d(out), d(out)] = 0
    f = alpha / r * b @ B @ d @ A @ dropout(x, dropout)
}
"""

_VERA_CHANGE = """
# The change of a weight by VeRA, whose trained factors d and b are whole matrices.
# Kopiczko et al. 2024, arXiv:2310.11454, Eq. 2, as the library `adapters` has it
form vera_change(
    r,  # rows of A
) {
    fixed A[r, cols(out)] per edit = buffer
    fixed B[rows(out), r] per edit = buffer
    param d[r, r] = identity
    param b[rows(out), rows(out)] = 0
    f = b @ B @ d @ A
}
"""

_MTL_LORA = """
# A LoRA with a vector of the task between A and several B, which are mixed.
# Yang et al. 2024, arXiv:2410.09437 (MTL-LoRA)
form mtl_lora(
    x,
    r,  # rank of each product
    n,  # how many B there are
    sharpness,  # divisor of the numbers that are the weights of the mixture
    alpha = r,  # numerator of the scale
    dropout = 0,  # probability of zeroing a feature while training
) {
    require sharpness > 0
    param A[r, d(x)] = kaiming
    param B[n, d(out), r] = 0
    param values[r] = 1
    param weights[n] = 1
    let g = softmax(1 / sharpness * weights)
    let z = values * A @ dropout(x, dropout)
    f = alpha / r * sum(i in n, g[i] * B[i] @ z)
}
"""

DORA = "magnitude_ratio"
# The norm is that of the whole sum without the scale, and has a gradient, which it has not in PEFT.
MAGNITUDE_RATIO = """
# The trained length of each row of a weight, divided by its own.
# Liu et al. 2024, arXiv:2402.09353, Eq. 5, as the library `adapters` has it: with the gradient of the length
form magnitude_ratio(w) {
    param m[rows(w)] = norm(w)
    f = m / reshape(norm(w), rows(w))
}
"""


@dataclass(frozen=True)
class LowRankForm:
    """A form with what the library calls its tensors.

    Attributes:
        tensors: the names of its parameters, by the library's.
        call: at a Linear, with braces for numbers.
        text: of the form, if it is none of peftc's own.
        change: the call and the text of a form for the change of the weight, which DoRA reads.
        common: the names of its tensors that all sites have in common, by the library's.
    """

    tensors: Mapping[str, str]
    call: str
    text: str = ""
    change: tuple[str, str] | None = None
    common: Mapping[str, str] | None = None


LORA = LowRankForm({"lora_A": "A", "lora_B": "B"}, "lora(x, r={r}{options})", change=("lowrank(r={r})", ""))
_COMMON = {"lora_A": "A", "lora_B": "B"}
VERA = LowRankForm(
    {"vera_D": "d", "vera_B": "b"},
    "vera_matrices(x, r={r}{options})",
    _VERA,
    ("vera_change(r={r})", _VERA_CHANGE),
    _COMMON,
)
MTL = LowRankForm(
    {"lora_A": "A", "lora_B": "B", "task_specific.values": "values", "weights": "weights"},
    "mtl_lora(x, r={r}, n={n}, sharpness={sharpness}{options})",
    _MTL_LORA,
)
FORMS = (LORA, VERA, MTL)


def form_of(config: PeftConfig) -> LowRankForm:
    """That of a configuration that adds to what a Linear writes."""
    has_vera = [config.read(key, None) is not None for key in ("vera_d", "vera_b")]
    if config.values.get("architecture") == "mtl_lora":
        return MTL
    return VERA if any(has_vera) else LORA


def numbers(config: PeftConfig, form: LowRankForm, tensors: Mapping[str, Tensor], path: str) -> dict[str, str]:
    """For the braces of calls. Raises: P802, P803."""
    rank = config.rank(path)
    own = {"r": shown(rank)}
    first = tensors["vera_D" if form is VERA else "lora_A"]
    if first.ndim != 2 or len(first) != rank:
        raise damaged(f"`{path}` has A {list(first.shape)}, and the rank {rank} by the configuration")
    if form is MTL:
        config.one_of("task_specific_matrix_type", ("singular_values",), "the library cannot make another one")
        config.read("n_up_projection", 1)
        if tensors["lora_B"].ndim != 3:
            raise damaged(f"`{path}` has B {list(tensors['lora_B'].shape)}, and three dimensions are expected")
        own |= {"n": shown(len(tensors["lora_B"])), "sharpness": shown(config.number("weights_sharpness", 0.05))}
    return own
