"""Types of PEFT with random numbers: places of a vector, matrices of all modules, noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import PREFIX, damaged
from peftc.exchange.peft_format.targets import is_target
from peftc.exchange.peft_format.types import (
    Files,
    Numbers,
    PeftRow,
    PeftType,
    Size,
    Sizes,
    Tensors,
    dropout_text,
    shown,
)
from peftc.semantics.recipes import form_text

_UNILORA = form_text("unilora")

_PVERA = form_text("pvera")

_RANDLORA = form_text("randlora")

_THETA, _SCALES = "base_model.unilora_theta_d", "base_model.unilora_scales"
_ENDS = ("A", "B")


def _unilora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.number("proj_seed", 42)
    config.flag("save_indices")
    numbers = {"r": config.whole("r", 4), "n": config.whole("theta_d_length", 256)}
    return {**numbers, "dropout": dropout_text(config, "unilora_dropout")}


def _unpack_unilora(config: PeftConfig, tensors: Files, model: nn.Module) -> dict[str, Tensor]:
    """Places of each module, which PEFT draws for all at once, and a scale for each entry."""
    theta = tensors.get(_THETA)
    if theta is None or theta.ndim != 1:
        raise damaged(f"the adapter has no vector `{_THETA}`")
    if any(".unilora_indices_" in key for key in tensors):
        return _with_scales(tensors, theta)
    modules = _modules(config, model)
    rank, sizes = (
        config.whole("r", 4),
        [(module.weight.shape, isinstance(module, Conv1D)) for module in modules.values()],
    )
    shapes = [shape for (a, b), turned in sizes for shape in ((rank, a if turned else b), (b if turned else a, rank))]
    drawn = torch.from_numpy(_drawn(sum(map(math.prod, shapes)), len(theta), int(config.number("proj_seed", 42))))
    parts = drawn.split([math.prod(shape) for shape in shapes])
    keys = [f"{PREFIX}{name}.unilora_indices_{end}" for name in modules for end in _ENDS]
    indices = {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}
    counts = drawn.bincount(minlength=len(theta))
    scales = torch.where(counts > 0, counts.float().rsqrt(), 0.0)
    of_base = {module.weight.dtype for module in modules.values()}
    if len(of_base) == 1:  # PEFT has the scales in the dtype of the weights
        scales = scales.to(of_base.pop())
    return {**tensors, **indices, _SCALES: scales.to(theta.dtype)}


def _modules(config: PeftConfig, model: nn.Module) -> dict[str, Any]:
    for key in ("layers_to_transform", "layers_pattern"):
        if value := config.values.get(key):
            reason = "without `save_indices` the modules are known by `target_modules` alone"
            raise refusal(key, value, reason)
    names = model.named_modules()
    modules = {name: module for name, module in names if is_target(config, name, module, model)}
    if not modules or not all(isinstance(module, nn.Linear | Conv1D) for module in modules.values()):
        raise refusal("target_modules", config.values.get("target_modules"), "the base has no such Linears")
    return modules


def _drawn(count: int, n: int, seed: int) -> Any:
    """Numbers below n as PEFT draws them: each as often as another, or once more."""
    generator = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(n), count // n)
    if count % n:
        numbers = np.concatenate([numbers, generator.choice(n, size=count % n, replace=False)])
    generator.shuffle(numbers)
    return numbers


def _with_scales(tensors: Files, theta: Tensor) -> dict[str, Tensor]:
    """The scales of places as those of entries. Raises: P802 where an entry has several."""
    scales, own = torch.zeros_like(theta), {k: t for k, t in tensors.items() if ".unilora_scales_" not in k}
    pairs = [(t.flatten(), tensors.get(k.replace("_indices_", "_scales_"))) for k, t in own.items() if "_indices_" in k]
    for places, of_places in pairs:
        if of_places is None or of_places.numel() != len(places) or places.min() < 0 or places.max() >= len(theta):
            raise damaged("the adapter has places without a scale, or outside of the vector")
        scales[places] = of_places.flatten().to(theta.dtype)
    if not all(scales[places].equal(of_places.flatten().to(theta.dtype)) for places, of_places in pairs):  # pyright: ignore[reportOptionalMemberAccess]
        raise refusal("save_indices", True, "an entry of the vector has several scales")
    return {**own, _SCALES: scales}


def _read_unilora(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    return {"unilora.places": torch.cat([tensors[f"unilora_indices_{end}"].flatten() for end in _ENDS])}


def _write_unilora(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    rank, places = args["unilora"]["r"], own["unilora.places"]
    a, b = places.split([rank * size[1], size[0] * rank])
    return {"unilora_indices_A": a.view(rank, size[1]), "unilora_indices_B": b.view(size[0], rank)}


def _pack_unilora(config: dict[str, Any], tensors: Files, modules: Sequence[str]) -> dict[str, Tensor]:
    scales, own = tensors[_SCALES], {key: tensor for key, tensor in tensors.items() if key != _SCALES}
    indices = {key: tensor for key, tensor in own.items() if "_indices_" in key}
    return {**own, **{key.replace("_indices_", "_scales_"): scales[places] for key, places in indices.items()}}


def _unilora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    keys = {"r": args["r"], "theta_d_length": args["n"], "unilora_dropout": args["dropout"]}
    return {**keys, "save_indices": True, "bias": "none"}


def _pvera(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.number("projection_prng_key", 0)
    config.flag("save_projection")
    config.one_of("sample_at_inference", (False,), "it draws random numbers in each call, not only while training")
    return {"rank": config.whole("r", 256), "dropout": dropout_text(config, "pvera_dropout")}


def _pvera_draws(config: PeftConfig, sizes: Sizes) -> dict[str, Tensor]:
    """A and B as PEFT draws them from `projection_prng_key`, as large as the widest module."""
    rank, outs, ins = config.whole("r", 256), *zip(*sizes.values(), strict=True)
    generator = torch.Generator().manual_seed(int(config.number("projection_prng_key", 0)))
    shapes = {"base_model.pvera_A": (2 * rank, max(ins)), "base_model.pvera_B": (max(outs), rank)}
    return {n: nn.init.kaiming_uniform_(torch.empty(shape), generator=generator) for n, shape in shapes.items()}


def _pvera_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = {"r": args["r"], "pvera_dropout": args["dropout"], "save_projection": True, "projection_prng_key": 0}
    return {**own, "sample_at_inference": False, "bias": "none"}


_NOT_SAVED = "PEFT draws the matrices for all modules together, and its file does not have them"


def _randlora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.one_of("save_projection", (True,), _NOT_SAVED)
    for key in ("projection_prng_key", "sparse", "very_sparse"):  # the file has the matrices
        config.read(key, None)
    rank, alpha = config.whole("r", 32), config.number("randlora_alpha", 640)
    options = f", alpha={shown(alpha)}" if alpha != rank else ""
    return {"r": rank, "options": options + dropout_text(config, "randlora_dropout")}


TYPES: Mapping[str, PeftType] = {
    "UNILORA": PeftType(
        (
            PeftRow(
                {f"unilora_indices_{end}": "unilora.places" for end in _ENDS},
                "h += unilora(x, r={r}, n={n}{dropout})",
                _UNILORA,
                config=lambda args: _unilora_config(args["unilora"]),
                common={_THETA: "unilora.theta", _SCALES: "unilora.scales"},
                read=_read_unilora,
                write=_write_unilora,
            ),
        ),
        _unilora,
        ("init_theta_d_bound",),
        has_transposition=True,
        unpack=_unpack_unilora,
        pack=_pack_unilora,
    ),
    "PVERA": PeftType(
        (
            PeftRow(
                {"pvera_lambda_b": "pvera.b", "pvera_lambda_d": "pvera.d"},
                "h += pvera(x, r={rank}{dropout})",
                _PVERA,
                config=lambda args: _pvera_config(args["pvera"]),
                common={"base_model.pvera_A": "pvera.A", "base_model.pvera_B": "pvera.B"},
            ),
        ),
        _pvera,
        ("d_initial", "generator_seed"),
        common=_pvera_draws,
        has_transposition=True,
    ),
    "RANDLORA": PeftType(
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
    ),
}
