"""Types of PEFT that change entries or rows of a weight, or of its spectrum, at chosen places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.types import NoConfig, Numbers, PeftRow, PeftType, Size, Tensors, shown, whole
from peftc.semantics.recipes import form_text

_SHIRA = form_text("shira")
_FOURIERFT = form_text("fourierft")
_SUPERTUNING = form_text("supertuning")


_RECOMPUTED = "PEFT finds the places again in the weights of the base, and its file does not have them"


def _shira(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("mask_type", "random_seed"):  # the file has the places
        config.read(key, None)
    return {"rank": config.whole("r", 32)}


def _read_shira(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    row, column = tensors["shira_indices"].to(torch.int64)
    return {"shira.values": tensors["shira_weight"], "shira.places": row * size[1] + column}


def _write_shira(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    places = own["shira.places"]
    indices = torch.stack([places // size[1], places % size[1]]).to(torch.int32)
    return {"shira_weight": own["shira.values"], "shira_indices": indices}


def _shira_config(args: Mapping[str, Any]) -> dict[str, Any]:
    return {"r": args["shira"]["r"], "mask_type": "random"}


def _fourierft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    n = config.whole("n_frequency", 1000, module, "n_frequency_pattern")
    return {"n": n, "scale": shown(config.number("scaling", 150.0)), "seed": int(config.number("random_loc_seed", 777))}


def drawn(count: int, size: Size, seed: int) -> Tensor:
    """Places as PEFT draws them."""
    return torch.randperm(size[0] * size[1], generator=torch.Generator().manual_seed(seed))[:count]


def _read_fourierft(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    spectrum, seed = tensors["fourierft_spectrum"], int(config.number("random_loc_seed", 777))
    return {"fourierft.spectrum": spectrum, "fourierft.places": drawn(len(spectrum), size, seed)}


def _write_fourierft(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    places, seed = own["fourierft.places"], args["fourierft"]["seed"]
    if not torch.equal(places, drawn(len(places), size, seed)):
        raise NoConfig(f"PEFT draws the places from a seed, and these are not those of {seed}")
    return {"fourierft_spectrum": own["fourierft.spectrum"]}


def _fourierft_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = args["fourierft"]
    keys = {"n_frequency": own["n"], "scaling": float(own["scale"]), "random_loc_seed": own["seed"]}
    return {**keys, "bias": "none"}


def _supertuning(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.read("select_top", True)  # the file has the places
    config.one_of("save_precomputed_indices", (True,), _RECOMPUTED)
    rank = config.whole("r", 1)
    alpha = config.number("lora_alpha", None) if config.read("lora_alpha", None) is not None else rank
    return {
        "density": repr(1 - config.number("sparsity", 0.9)),
        "rank": rank,
        "options": f", alpha={shown(alpha)}" if alpha != rank else "",
    }


def _read_supertuning(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    own = {_SUPERTUNING_ROW[end]: tensor for end, tensor in tensors.items()}
    return {**own, "supertuning.places": own["supertuning.places"].to(torch.int64)}


def _write_supertuning(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    density, count = args["supertuning"]["density"], len(own["supertuning.places"])
    if int(size[0] * size[1] * (1 - (1 - density))) != count:
        raise NoConfig(f"no `sparsity` of PEFT gives {count} of {size[0]} × {size[1]} entries")
    tensors = {end: own[name] for end, name in _SUPERTUNING_ROW.items() if name in own}
    return {**tensors, "supertuning_indices": own["supertuning.places"].to(torch.int32)}


def _supertuning_config(args: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {"sparsity": 1 - args["supertuning"]["density"], "select_top": True}
    if (lora := args.get("lowrank")) is not None:
        if lora["rslora"]:
            raise NoConfig("Super-Tuning has the scale alpha / r")
        keys |= {"r": lora["r"], "lora_alpha": whole(lora["alpha"] if lora["alpha"] is not None else lora["r"])}
    return {**keys, "save_precomputed_indices": True}


_SUPERTUNING_ROW = {
    "supertuning_values": "supertuning.values",
    "supertuning_indices": "supertuning.places",
    "supertuning_lora_A.weight": "lowrank.A",
    "supertuning_lora_B.weight": "lowrank.B",
}

TOKENS_FORM = """
# Rows of an embedding with trained values in their place.
# TrainableTokens of PEFT
form trainable_tokens(
    w,
    n,  # how many rows
    select = random,  # which rows: fisher, change, magnitude or random
) {
    require n <= rows(w)
    param values[n, cols(w)] = normal(0.02)
    fixed places[n] = selection(select)
    f = w - rows_at(w, places) + scatter(values, places, rows(w))
}
"""
DELTA = "trainable_tokens_delta"
VALUES, NUMBERS = "trainable_tokens.values", "trainable_tokens.places"


def _tokens(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    return {"n": len(token_indices(config))}


def token_indices(config: PeftConfig) -> list[int]:
    """Raises: P802 for what are no different numbers from 0 on."""
    value = config.read("token_indices", [])
    numbers = cast(Sequence[Any], value) if isinstance(value, list) else [None]
    if not numbers or any(type(one) is not int or one < 0 for one in numbers) or len(set(numbers)) < len(numbers):
        raise refusal("token_indices", value, "it is an array of different numbers of tokens")
    return list(numbers)


def _read_tokens(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    places = token_indices(config)
    if max(places) >= size[0]:
        raise refusal("token_indices", max(places), f"the embedding has {size[0]} rows")
    return {VALUES: tensors[DELTA], NUMBERS: torch.tensor(places)}


TYPES: Mapping[str, PeftType] = {
    "SHIRA": PeftType(
        (
            PeftRow(
                {"shira_weight": "shira.values", "shira_indices": "shira.places"},
                "w += shira(r={rank})",
                _SHIRA,
                config=_shira_config,
                linear_alone=True,
                read=_read_shira,
                write=_write_shira,
            ),
        ),
        _shira,
    ),
    "FOURIERFT": PeftType(
        (
            PeftRow(
                {"fourierft_spectrum": "fourierft.spectrum"},
                "w += fourierft(n={n}, scale={scale}, seed={seed})",
                _FOURIERFT,
                config=_fourierft_config,
                read=_read_fourierft,
                write=_write_fourierft,
                places="fourierft.places",
            ),
        ),
        _fourierft,
        patterns={"n_frequency": "n_frequency_pattern"},
        has_transposition=True,
    ),
    "SUPERTUNING": PeftType(
        tuple(
            PeftRow(
                {end: _SUPERTUNING_ROW[end] for end in list(_SUPERTUNING_ROW)[:count]},
                f"w += {equation}",
                _SUPERTUNING,
                config=_supertuning_config,
                linear_alone=True,
                read=_read_supertuning,
                write=_write_supertuning,
            )
            for count, equation in (
                (2, "supertuning(density={density})"),
                (4, "supertuning(density={density}) + lowrank(r={rank}{options})"),
            )
        ),
        _supertuning,
        ("lora_dropout",),
    ),
    "TRAINABLE_TOKENS": PeftType(
        (
            PeftRow(
                {DELTA: VALUES},
                "w = trainable_tokens(w, n={n})",
                TOKENS_FORM,
                config=lambda args: {},
                tied=("let tokens = shared(trainable_tokens(n={n}))", "w = tokens(w)"),
                read=_read_tokens,
            ),
        ),
        _tokens,
    ),
}
