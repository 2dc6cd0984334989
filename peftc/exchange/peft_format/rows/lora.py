"""Types of PEFT that add a product of thin matrices to what a Linear gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.types import (
    Numbers,
    PeftRow,
    PeftType,
    Sizes,
    Tensors,
    dropout_text,
    shown,
    whole,
)
from peftc.semantics.recipes import form_text

_LORA_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")  # which leave the base as it is

_ADALORA = """
# A decomposition of a change, of which some singular values were given up. The scale is that of the rank at first.
# Zhang et al. 2023, arXiv:2303.10512 (AdaLoRA)
form adalora(
    x,
    r,  # rank that is left
    of,  # rank at first
    alpha,  # numerator of the scale
    dropout = 0,  # probability of zeroing a feature while training
) {
    require r <= of
    param A[r, d(x)] = normal(0.02)
    param E[r, 1] = 0
    param B[d(out), r] = normal(0.02)
    f = alpha / (of + 0.00001) * B @ (E * A) @ dropout(x, dropout)
}
"""

_VERA = """
# VeRA with A and B that are saved. They are not trained.
# Kopiczko et al. 2024, arXiv:2310.11454, Eq. 2
form vera_of(
    x,
    r,  # rows of A; it may exceed the features
    dropout = 0,  # probability of zeroing a feature while training
) {
    param A[r, widest(x)] per edit = uniform(sqrt(6 / widest(x)))
    param B[widest(out), r] per edit = uniform(sqrt(6 / r))
    param d[r] = 0.1
    param b[d(out)] = 0
    f = b * corner(frozen(B), d(out), r) @ (d * corner(frozen(A), r, d(x)) @ dropout(x, dropout))
}
"""

_VBLORA = form_text("vblora")
_GRALORA = form_text("gralora")


def rank_and_alpha(args: Mapping[str, Any]) -> dict[str, Any]:
    return {"r": args["r"], "alpha": whole(args["alpha"] if args["alpha"] is not None else args["r"])}


def _lora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.one_of(
        "init_lora_weights", _LORA_INITS, "PEFT changes the weights of the base when it loads such an adapter"
    )
    rank = config.rank(module)
    alpha = config.number("lora_alpha", 8, module, "alpha_pattern")
    rslora = config.flag("use_rslora")
    if alpha <= 0:
        raise refusal("lora_alpha", alpha, "it is above 0")
    options = f", alpha={shown(alpha)}" if alpha != rank or rslora else ""
    options += ", rslora=true" if rslora else ""
    return {
        "r": rank,
        "options": options,
        "dropout": dropout_text(config, "lora_dropout"),
        "scale": shown(alpha / (math.sqrt(rank) if rslora else rank)),
    }


def _dora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = rank_and_alpha(args)
    lora = {"r": own["r"], "lora_alpha": own["alpha"], "use_rslora": args["rslora"], "use_dora": True}
    return {**lora, "lora_dropout": 0.0, "bias": "none"}


def _adalora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    """PEFT reads `init_r`, and never `r`; ranks that were given up are not in the tensors."""
    for key in ("r", "rank_pattern", "init_lora_weights", "use_rslora"):
        config.read(key, None)
    first, rank = config.whole("init_r", 12), tensors["lora_E"].shape[0]
    alpha = config.number("lora_alpha", 8)
    alpha = alpha if alpha > 0 else first
    weight = config.number("orth_reg_weight", 0.5)
    return {
        "r": rank,
        "first": first,
        "alpha": shown(alpha),
        "dropout": dropout_text(config, "lora_dropout"),
        "penalty": f", orthogonality={shown(weight)}" if weight != 0.5 else "",
    }


def _is_pruned(config: PeftConfig, tensors: Tensors) -> bool:
    return tensors["lora_E"].shape[0] != config.whole("init_r", 12)


def _adalora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = rank_and_alpha(args)
    schedule = {"tinit": args["warmup"], "tfinal": args["cooldown"], "deltaT": args["every"]}
    return {
        "init_r": args["r"],
        "target_r": args["target"] or args["r"],
        "lora_alpha": own["alpha"],
        "lora_dropout": args["dropout"],
        "orth_reg_weight": args["orthogonality"],
        "total_step": args["total"] or 1,
        **(schedule if args["target"] else {}),
        "beta1": args["beta1"],
        "beta2": args["beta2"],
    }


def _pruned_config(args: Mapping[str, Any]) -> dict[str, Any]:
    alpha, rate = whole(args["alpha"]), args["dropout"]
    return {"init_r": args["of"], "lora_alpha": alpha, "lora_dropout": rate, "total_step": 1, "target_r": args["of"]}


def _adalora_of_all(numbers: Mapping[str, dict[str, Any]], tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """`rank_pattern` says which ranks are left; the tensors have their values alone."""
    common = _ADALORA_TYPE.alike({m: {k: own[k] for k in _SCALE} for m, own in numbers.items()}, tensors)
    others = [{key: value for key, value in own.items() if key not in _SCALE} for own in numbers.values()]
    first, left = common["init_r"], {module: own["lora_E"].shape[0] for module, own in tensors.items()}
    pattern = {f"{module}.lora_E": [i < rank for i in range(first)] for module, rank in left.items() if rank != first}
    return {**others[0], **common, "rank_pattern": pattern or None}


def _vera(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.number("projection_prng_key", 0)
    config.flag("save_projection")
    return {"r": config.whole("r", 256), "dropout": dropout_text(config, "vera_dropout")}


def _vera_draws(config: PeftConfig, sizes: Sizes) -> dict[str, Tensor]:
    """A and B as PEFT draws them from `projection_prng_key`, as large as the widest module."""
    rank, outs, ins = config.whole("r", 256), *zip(*sizes.values(), strict=True)
    generator = torch.Generator().manual_seed(int(config.number("projection_prng_key", 0)))
    shapes = {"base_model.vera_A": (rank, max(ins)), "base_model.vera_B": (max(outs), rank)}
    bounds = {name: math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1])) for name, shape in shapes.items()}
    return {n: torch.empty(shape).uniform_(-bounds[n], bounds[n], generator=generator) for n, shape in shapes.items()}


def _vera_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = {"r": args["r"], "vera_dropout": args["dropout"], "save_projection": True, "projection_prng_key": 0}
    return {**own, "bias": "none"}


def _vblora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.flag("save_only_topk_weights")
    keys = {"r": ("r", 4), "vectors": ("num_vectors", 256), "length": ("vector_length", 256), "most": ("topk", 2)}
    own: Numbers = {name: config.whole(*key) for name, key in keys.items()}
    return {**own, "dropout": dropout_text(config, "vblora_dropout")}


def _vblora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = {"r": args["r"], "num_vectors": args["vectors"], "vector_length": args["length"], "topk": args["most"]}
    return {**own, "vblora_dropout": args["dropout"], "save_only_topk_weights": False, "bias": "none"}


def _gralora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    rank, alpha, hybrid = config.whole("r", 32), config.number("alpha", 64), int(config.number("hybrid_r", 0))
    if alpha <= 0:
        raise refusal("alpha", alpha, "it is above 0")
    return {
        "n": config.whole("gralora_k", 2),
        "r": rank,
        "hybrid": hybrid,
        "alpha": shown(alpha),
        "scale": shown(alpha / (rank + hybrid)),
        "dropout": dropout_text(config, "gralora_dropout"),
    }


def _gralora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = {**rank_and_alpha(args), "gralora_k": args["n"], "hybrid_r": 0}
    return {**own, "gralora_dropout": args["dropout"], "bias": "none"}


_OF_TRAINING = ("qalora_group_size", "loftq_config", "eva_config", "lora_ga_config")
_SCALE = ("init_r", "lora_alpha", "lora_dropout")
_A, _B, _PIECES = "lora_A.weight", "lora_B.weight", {"gralora_A": "gralora.A", "gralora_B": "gralora.B"}
_LORA_ROWS = (
    PeftRow({_A: "lora.A", _B: "lora.B"}, "h += lora(x, r={r}{options}{dropout})"),
    PeftRow(
        {_A: "lowrank.A", _B: "lowrank.B", "lora_magnitude_vector": "magnitude.m"},
        "w = magnitude(w + lowrank(r={r}{options}))",
        config=lambda args: _dora_config(args["lowrank"]),
    ),
    PeftRow(
        {_A: "lora.A", _B: "lora.B", "lora_B.bias": "vector.scale"},
        "h += {scale} * (lora(x, r={r}{dropout}) + vector(init=0))",
    ),
    PeftRow({"lora_embedding_A": "lora.A", "lora_embedding_B": "lora.B"}, "h += lora(x, r={r}{options})"),
)
_ADALORA_TYPE = PeftType(
    (
        PeftRow(
            {"lora_A": "adalora.A", "lora_E": "adalora.E", "lora_B": "adalora.B"},
            "h += adalora(x, r={r}, of={first}, alpha={alpha}{dropout})",
            _ADALORA,
            config=lambda args: _pruned_config(args["adalora"]),
            fits=_is_pruned,
        ),
        PeftRow(
            {"lora_A": "svd.Q", "lora_E": "svd.values", "lora_B": "svd.P"},
            "h += svd(x, r={r}, alpha={alpha}{dropout}{penalty})",
            config=lambda args: _adalora_config(args["svd"]),
            shapes={"lora_E": (-1, 1)},
        ),
    ),
    _adalora,
    (*_OF_TRAINING, "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "total_step", "orth_reg_weight"),
    settle=_adalora_of_all,
    is_lora=True,
    has_transposition=True,
)

TYPES: Mapping[str, PeftType] = {
    "LORA": PeftType(
        _LORA_ROWS,
        _lora,
        _OF_TRAINING,
        {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"},
        {"r": "rank_pattern", "lora_alpha": "alpha_pattern"},
        has_transposition=True,
    ),
    "ADALORA": _ADALORA_TYPE,
    "VERA": PeftType(
        tuple(
            PeftRow(
                {"vera_lambda_b": f"{name}.b", "vera_lambda_d": f"{name}.d"},
                f"h += {name}(x, r={{r}}{{dropout}})",
                form,
                config=lambda args: _vera_config(next(iter(args.values()))),
                common={"base_model.vera_A": f"{name}.A", "base_model.vera_B": f"{name}.B"},
            )
            for name, form in (("vera_of", _VERA), ("vera", ""))
        ),
        _vera,
        ("d_initial",),
        common=_vera_draws,
        is_lora=True,
        has_transposition=True,
    ),
    "VBLORA": PeftType(
        (
            PeftRow(
                {"vblora_logits_A": "vblora.A", "vblora_logits_B": "vblora.B"},
                "h += vblora(x, r={r}, vectors={vectors}, length={length}, most={most}{dropout})",
                _VBLORA,
                config=lambda args: _vblora_config(args["vblora"]),
                common={"base_model.vblora_vector_bank": "vblora.bank"},
            ),
        ),
        _vblora,
        ("init_vector_bank_bound", "init_logits_std"),
        has_transposition=True,
        dimensions=3,
    ),
    "GRALORA": PeftType(
        (
            PeftRow(
                _PIECES,
                "h += gralora(x, n={n}, r={r}, alpha={alpha}{dropout})",
                _GRALORA,
                config=lambda args: _gralora_config(args["gralora"]),
            ),
            PeftRow(
                {**_PIECES, "gralora_A_general.weight": "lora.A", "gralora_B_general.weight": "lora.B"},
                "h += {scale} * (gralora(x, n={n}, r={r}{dropout}) + lora(x, r={hybrid}{dropout}))",
                _GRALORA,
            ),
        ),
        _gralora,
        has_transposition=True,
        dimensions=3,
    ),
}
