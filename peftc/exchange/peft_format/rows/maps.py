"""Types of PEFT whose matrices have a structure: circulants, rotations, projections, networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peftc.equations.primitives import ACTIVATIONS
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.types import (
    NoConfig,
    Numbers,
    PeftRow,
    PeftType,
    Size,
    Tensors,
    shown,
    whole,
)
from peftc.semantics.recipes import form_text

_DEEPEST = 8  # PEANuT

_C3A = form_text("c3a")
_ROAD = form_text("road")
_DEFT = form_text("deft")


def _c3a(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    return {"block": config.whole("block_size", 256, module, "block_size_pattern")}


def _turned(tensor: Tensor) -> Tensor:
    """The first rows of circulants as first columns, and back."""
    return tensor.flip(-1).roll(1, -1)


def _road(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    variant = config.one_of("variant", ("road_1", "road_2", "road_4"), "PEFT knows `road_1`, `road_2` and `road_4`")
    group = config.whole("group_size", 64)
    if group % 2:
        raise refusal("group_size", group, "it is even")
    number = variant.removeprefix("road_")
    return {"group": group, "variant": f", variant={number}" if number != "1" else ""}


def _road_config(args: Mapping[str, Any]) -> dict[str, Any]:
    return {"variant": f"road_{args['variant']}", "group_size": args["group"]}


def _deft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    rank = tensors["deft_P"].shape[-1]
    config.whole("r", 8)
    alpha = config.read("alpha", None)
    scale = config.number("alpha", 0) / rank if alpha else 1
    basis = config.one_of("decomposition_method", ("relu", "qr"), "PEFT knows `relu` and `qr`")
    if config.flag("para") == ("deft_R" in tensors):
        raise refusal("para", config.values.get("para"), "the tensors are of the other kind")
    options = f", scale={shown(scale)}" if scale != 1 else ""
    options += ", basis=qr" if basis == "qr" else ""
    return {"r": rank, "options": options + (", para=true" if "deft_R" not in tensors else "")}


def _signs(p: Tensor) -> Tensor:
    """Of the columns of PEFT's Q, beside those of the Gram-Schmidt process."""
    return torch.linalg.qr(p.float()).R.diagonal().sign()


def _with_signs(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    own = {f"deft.{end.removeprefix('deft_')}": tensor for end, tensor in tensors.items()}
    if "deft_R" in tensors and config.values.get("decomposition_method") == "qr":
        own["deft.R"] = _signs(tensors["deft_P"])[:, None].to(tensors["deft_R"].dtype) * tensors["deft_R"]
    return own


def _without_signs(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    tensors = {f"deft_{name.removeprefix('deft.')}": tensor for name, tensor in own.items()}
    if "deft_R" in tensors and args["deft"]["basis"] == "qr":
        tensors["deft_R"] = _signs(own["deft.P"])[:, None].to(own["deft.R"].dtype) * own["deft.R"]
    return tensors


def _deft_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = args["deft"]
    alpha = own["scale"] * own["r"]
    if own["scale"] != 1 and not float(alpha).is_integer():
        raise NoConfig(f"PEFT has a whole number for alpha, and the scale {own['scale']} of {own['r']} has none")
    keys = {"r": own["r"], "alpha": None if own["scale"] == 1 else whole(alpha)}
    return {**keys, "decomposition_method": own["basis"], "para": own["para"], "deft_dropout": 0.0, "bias": "none"}


def _peanut(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.number("depth", 0)  # the tensors tell
    act = config.one_of("act_fn", tuple(ACTIVATIONS), f"forms have {', '.join(ACTIVATIONS)}")
    options = f", act={act}" if act != "relu" else ""
    scale = config.number("scaling", 1.0)
    return {"r": config.whole("r", 32), "options": options + (f", scale={shown(scale)}" if scale != 1 else "")}


def _peanut_config(args: Mapping[str, Any], depth: int) -> dict[str, Any]:
    own = args[f"peanut_{depth}"]
    return {"r": own["r"], "depth": depth, "act_fn": own["act"], "scaling": float(own["scale"])}


def _peanut_row(depth: int) -> PeftRow:
    """A network of so many encoders, and as many decoders with residuals."""
    name, layers = f"peanut_{depth}", range(1, depth + 1)
    squares = "".join(f"    param {kind}{i}[r, r] = kaiming\n" for kind in "ED" for i in layers)
    inner = [
        *(f"let z{i} = act(E{i} @ z{i - 1})" for i in layers),
        *(f"let y{i} = act(D{i} @ {f'y{i - 1}' if i > 1 else f'z{depth}'}) + z{depth - i}" for i in layers),
    ]
    flat = form_text("peanut", "peanut_0").replace("peanut_0", name).replace("    param B", f"{squares}    param B")
    head, _, value = flat.rpartition("    f = ")
    last = f"y{depth}" if depth else "z0"
    text = "".join([head, *(f"    {line}\n" for line in inner), "    f = ", value.replace("z0", last)])
    ends = {"peanut_A.weight": "A", "peanut_B.weight": "B"}
    ends |= {f"peanut_encoders.{i - 1}.weight": f"E{i}" for i in layers}
    ends |= {f"peanut_decoders.{i - 1}.weight": f"D{i}" for i in layers}
    return PeftRow(
        {end: f"{name}.{own}" for end, own in ends.items()},
        f"w += {name}(w, r={{r}}{{options}})",
        text,
        config=lambda args: _peanut_config(args, depth),
        linear_alone=True,
    )


TYPES: Mapping[str, PeftType] = {
    "C3A": PeftType(
        (
            PeftRow(
                {"c3a_kernel": "c3a.c"},
                "h += c3a(x, block={block})",
                _C3A,
                config=lambda args: {"block_size": args["c3a"]["block"], "bias": "none"},
                linear_alone=True,
                read=lambda config, tensors, size: {"c3a.c": _turned(tensors["c3a_kernel"])},
                write=lambda own, args, size: {"c3a_kernel": _turned(own["c3a.c"])},
            ),
        ),
        _c3a,
        patterns={"block_size": "block_size_pattern"},
        dimensions=3,
    ),
    "ROAD": PeftType(
        (
            PeftRow(
                {"road_theta": "road.theta", "road_alpha": "road.alpha"},
                "h = road(h, group={group}{variant})",
                _ROAD,
                config=lambda args: _road_config(args["road"]),
                linear_alone=True,
            ),
        ),
        _road,
    ),
    "DEFT": PeftType(
        tuple(
            PeftRow(
                {end: f"deft.{end.removeprefix('deft_')}" for end in ends},
                "w = deft(w, r={r}{options})",
                _DEFT,
                config=_deft_config,
                read=_with_signs,
                write=_without_signs,
            )
            for ends in (("deft_P",), ("deft_P", "deft_R"))
        ),
        _deft,
        ("init_scale", "deft_dropout"),
        has_transposition=True,
    ),
    "PEANUT": PeftType(tuple(_peanut_row(depth) for depth in range(_DEEPEST + 1)), _peanut),
}
