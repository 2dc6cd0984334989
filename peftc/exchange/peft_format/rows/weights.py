"""Types of PEFT that change the weight of a Linear by more than one thin product."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.rows.kronecker import LOKR
from peftc.exchange.peft_format.rows.lora import rank_and_alpha
from peftc.exchange.peft_format.types import NoConfig, Numbers, PeftRow, PeftType, Tensors, dropout_text, shown
from peftc.semantics.recipes import form_text

_SERIES = (0, 18)  # of PEFT, since when the series of OFT is the present one
_LEAST_NORM = 1e-4  # to which PEFT raises the norms in DeLoRA

_HRA = form_text("hra")

_ORTHOGONAL_HRA = form_text("hra", "hra_orthogonal")
_DELORA = form_text("delora")
_MISS = form_text("miss")


def _loha(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    rank, alpha = config.rank(module), config.number("alpha", 8, module, "alpha_pattern")
    return {"r": rank, "alpha": shown(alpha)}


def _oft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.number("r", 0)
    config.number("oft_block_size", 0)  # the tensor tells
    terms = int(config.number("num_cayley_neumann_terms", 5))
    block = (1 + math.isqrt(1 + 8 * tensors["oft_R.weight"].shape[-1])) // 2
    series = config.read("use_cayley_neumann", True)
    release = re.match(r"(\d+)\.(\d+)", str(config.values.get("peft_version")))
    if series and (release is None or tuple(map(int, release.groups())) < _SERIES):
        reason = "before PEFT 0.18 the series of a rotation was another one; load it with PEFT, and save it again"
        raise refusal("peft_version", config.values.get("peft_version"), reason)
    return {"block": block, "neumann": f", neumann={terms}" if series else ""}


def _oft_config(args: Mapping[str, Any]) -> dict[str, Any]:
    terms = args["neumann"]
    series: dict[str, Any] = {"use_cayley_neumann": terms is not None, "num_cayley_neumann_terms": terms or 5}
    series["peft_version"] = ".".join(map(str, (*_SERIES, 0)))
    return {"r": 0, "oft_block_size": args["block"], "coft": False, "block_share": False, **series}


def _hra(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.flag("apply_GS")
    return {"r": config.whole("r", 8)}


def _hra_config(args: Mapping[str, Any]) -> dict[str, Any]:
    (name,) = args
    return {"r": args[name]["r"], "apply_GS": name == "hra_orthogonal", "bias": "none"}


def _hira(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    return {"r": config.whole("r", 32)}


def _hira_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = args["lowrank"]
    if own["alpha"] not in (None, own["r"]) or own["rslora"]:
        raise NoConfig("HiRA has no scale")
    return {"r": own["r"], "hira_dropout": 0.0}


def _delora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("delora_lambda", "lambda_pattern"):  # the first value of a tensor
        config.read(key, None)
    return {"r": config.rank(module)}


def _least_norm(tensors: Tensors) -> str | None:
    """PEFT divides by 0.0001 where a norm is below it."""
    norms = torch.cat([tensors["delora_A"].norm(dim=1), tensors["delora_B"].norm(dim=0)])
    small = norms[(norms > 0) & (norms < _LEAST_NORM)]
    return f"a row of A or a column of B has the norm {small.min():.3g}, below {_LEAST_NORM}" if len(small) else None


def _miss(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    kind = config.one_of("init_weights", (True, False, "mini"), "it multiplies blocks of the weight by the matrix")
    mini = f", mini={config.whole('mini_r', 1)}" if kind == "mini" else ""
    config.read("mini_r", 1)
    return {"r": config.whole("r", 64), "mini": mini, "dropout": dropout_text(config, "miss_dropout")}


def _miss_config(args: Mapping[str, Any]) -> dict[str, Any]:
    mini = args["mini"]
    kind = {"init_weights": True} if mini is None else {"init_weights": "mini", "mini_r": mini}
    return {"r": args["r"], "miss_dropout": args["dropout"], "bias": "none", **kind}


_DELORA_ROW = {"delora_A": "delora.A", "delora_B": "delora.B", "delora_lambda": "delora.scale"}

TYPES: Mapping[str, PeftType] = {
    "LOHA": PeftType(
        (
            PeftRow(
                {
                    "hada_w1_b": "hadamard.A",
                    "hada_w1_a": "hadamard.B",
                    "hada_w2_b": "hadamard.C",
                    "hada_w2_a": "hadamard.D",
                },
                "w += hadamard(r={r}, alpha={alpha})",
                config=lambda args: rank_and_alpha(args["hadamard"]),
                linear_alone=True,
            ),
        ),
        _loha,
        ("rank_dropout", "module_dropout", "use_effective_conv2d"),
        patterns={"r": "rank_pattern", "alpha": "alpha_pattern"},
    ),
    "LOKR": LOKR,
    "OFT": PeftType(
        (
            PeftRow(
                {"oft_R.weight": "orthogonal.Q"},
                "w = orthogonal(w, block={block}{neumann})",
                config=lambda args: _oft_config(args["orthogonal"]),
                linear_alone=True,
            ),
        ),
        _oft,
        ("module_dropout", "eps"),
    ),
    "HRA": PeftType(
        (
            PeftRow(
                {"hra_u": "hra_orthogonal.u"},
                "w = hra_orthogonal(w, r={r})",
                _ORTHOGONAL_HRA,
                config=_hra_config,
                linear_alone=True,
                fits=lambda config, tensors: config.flag("apply_GS"),
            ),
            PeftRow({"hra_u": "hra.u"}, "w = hra(w, r={r})", _HRA, config=_hra_config, linear_alone=True),
        ),
        _hra,
    ),
    "HIRA": PeftType(
        (
            PeftRow(
                {"hira_A": "lowrank.A", "hira_B": "lowrank.B"},
                "w += w * lowrank(r={r})",
                config=_hira_config,
            ),
        ),
        _hira,
        ("hira_dropout", "rank_pattern"),  # which PEFT does not read
        has_transposition=True,
    ),
    "DELORA": PeftType(
        (
            PeftRow(
                {**_DELORA_ROW, "delora_w_norm": "delora.norms"},
                "w = delora(w, r={r})",
                _DELORA,
                config=lambda args: {"r": args["delora"]["r"], "bias": "none"},
                linear_alone=True,
                check=_least_norm,
            ),
        ),
        _delora,
        ("module_dropout",),
        patterns={"r": "rank_pattern"},
    ),
    "MISS": PeftType(
        (
            PeftRow(
                {"miss_block": "miss.block"},
                "h += miss(x, r={r}{mini}{dropout})",
                _MISS,
                config=lambda args: _miss_config(args["miss"]),
                linear_alone=True,
            ),
        ),
        _miss,
    ),
}
