"""BOFT of PEFT: rotations of the inputs of a weight, block by block, between permutations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Size, Tensors
from peftc.semantics.recipes import form_text

_BOFT = form_text("boft")

_BUTTERFLY = form_text("boft", "butterfly")


def _boft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor"):
        config.number(key, 0)  # the tensor tells
    factors, _, block, _ = tensors["boft_R"].shape
    return {"block": block, "factors": factors}


def _boft_config(args: Mapping[str, Any]) -> dict[str, Any]:
    (own,) = args.values()
    size = {"boft_block_size": own["block"], "boft_block_num": 0, "boft_n_butterfly_factor": own.get("factors", 1)}
    return {**size, "boft_dropout": 0.0, "bias": "none"}


def _read(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    return {"butterfly.R": tensors["boft_R"].flatten(0, 1), "butterfly.s": tensors["boft_s"].flatten()}


def _write(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    (name,) = args
    factors = args[name].get("factors", 1)
    return {"boft_R": own[f"{name}.R"].unflatten(0, (factors, -1)), "boft_s": own[f"{name}.s"][:, None]}


BOFT = PeftType(
    (
        PeftRow(
            {"boft_R": "boft.R", "boft_s": "boft.s"},
            "w = boft(w, block={block})",
            _BOFT,
            config=_boft_config,
            linear_alone=True,
            fits=lambda config, tensors: tensors["boft_R"].shape[0] == 1,
            write=_write,
        ),
        PeftRow(
            {"boft_R": "butterfly.R", "boft_s": "butterfly.s"},
            "w = butterfly(w, block={block}, factors={factors})",
            _BUTTERFLY,
            config=_boft_config,
            linear_alone=True,
            read=_read,
            write=_write,
        ),
    ),
    _boft,
    ("boft_dropout",),
    dimensions=4,
)
