"""Types of PEFT that mix low-rank matrices, which several modules or tasks have in common."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Size, Sizes, Tensors, shown
from peftc.semantics.recipes import form_text

_LILY = form_text("lily")

_POLY = form_text("poly")


def _lily(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    scale = config.number("scaling", 1.0)
    stride = config.whole("stride_A", 1)
    return {
        "r": config.whole("r", 32),
        "n": config.whole("num_B", 2),
        "scale": "" if scale == 1 else f"{shown(scale)} * ",
        "options": "" if stride == 1 else f", stride={stride}",
    }


def _lily_groups(config: PeftConfig, own: Mapping[str, Tensors], sizes: Sizes) -> dict[str, str]:
    """PEFT has one B for all modules with one of the names, of one size."""
    ends = config.values.get("target_modules")
    if not isinstance(ends, list):
        raise refusal("target_modules", ends, "which modules have matrices in common is known by a list of names")
    groups = dict[str, str]()
    for module, (rows, columns) in sizes.items():
        named = [end for end in map(str, ends) if module.endswith(end)]  # the last one, as in PEFT
        groups[module] = f"{named[-1] if named else module} {rows} {columns}"
    return groups


def _poly(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.one_of("poly_type", ("poly",), "there is no equation for another router")
    splits = config.whole("n_splits", 1)
    return {
        "r": config.whole("r", 8),
        "skills": config.whole("n_skills", 4),
        "options": "" if splits == 1 else f", splits={splits}",
        "tasks": config.whole("n_tasks", 1),
    }


def _read_poly(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    """The parts of the features are behind the maps."""
    own = {_POLY_ROW[end]: tensor for end, tensor in tensors.items()}
    return {**own, **{name: own[name].transpose(0, 1) for name in ("poly.A", "poly.B")}}


_LILY_ROW = {"lily_A.weight": "lily.A", "lily_B.weight": "lily.B", "lily_router.weight": "lily.router"}
_POLY_ROW = {"poly_lora_A": "poly.A", "poly_lora_B": "poly.B", "poly_router.module_logits": "poly.logits"}

TYPES: Mapping[str, PeftType] = {
    "LILY": PeftType(
        (PeftRow(_LILY_ROW, "h += {scale}lily(x, r={r}, n={n}{options})", _LILY, linear_alone=True),),
        _lily,
        groups=_lily_groups,
    ),
    "POLY": PeftType(
        (
            PeftRow(
                _POLY_ROW,
                "h += poly(x, r={r}, skills={skills}{options})",
                _POLY,
                linear_alone=True,
                read=_read_poly,
                by_task=("poly.logits",),
            ),
        ),
        _poly,
        dimensions=4,
    ),
}
