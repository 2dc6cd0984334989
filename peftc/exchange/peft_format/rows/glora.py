"""GLoRA of PEFT: a weight and a bias that change by parts of several kinds."""

from __future__ import annotations

from itertools import product

from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors
from peftc.semantics.recipes import form_text

_OF_WEIGHT = form_text("glora_kinds", "glora")
_IMAGE = form_text("glora_kinds", "glora_image")
_SHIFT = form_text("glora_kinds", "glora_shift")

# Tensors of each kind: their ends in PEFT, and ours.
_KINDS = {"lora": {".Xd": "d", ".Xu": "u"}, "vector": {".X": ""}, "constant": {".X": ""}, "none": dict[str, str]()}


def _row(kind: str, image: str, shift: str) -> PeftRow:
    """The equations and tensors of a module with parts of these kinds."""
    parts = {
        "glora": (kind, "AB", "glora(w, r={rank}", _OF_WEIGHT),
        "glora_image": (image, "C", "glora_image(w, r={rank}", _IMAGE),
        "glora_shift": (shift, "DE", "glora_shift(b", _SHIFT),
    }
    present = {name: part for name, part in parts.items() if part[0] != "none"}
    tensors = {
        f"glora_{letter}{end}": f"{name}.{letter}{ours}"
        for name, (own, letters, _, _) in present.items()
        for letter in letters
        for end, ours in _KINDS[own].items()
    }
    calls = {name: f"{call}, kind={own})" for name, (own, _, call, _) in present.items()}
    of_bias = " + ".join(call for name, call in calls.items() if name != "glora")
    texts = [f"b += {of_bias}"] if of_bias else []  # first: it reads the weight of the base
    texts += [f"w += {calls['glora']}"] if "glora" in calls else []
    forms = "".join(form for *_, form in present.values())
    return PeftRow(tensors, " ".join(texts), forms, fits=lambda config, _: _fits(config, kind, shift))


def _fits(config: PeftConfig, kind: str, shift: str) -> bool:
    """Whether the kinds are those of the configuration: tensors do not tell all of them."""
    keys = (("config_A_B", "lora", kind), ("config_D_E", "constant", shift))
    return all(own == "none" or own == config.read(key, default) for key, default, own in keys)


def _numbers(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("config_A_B", "config_C", "config_D_E"):  # the row is of these
        config.read(key, None)
    return {"rank": config.whole("r", 8)}


GLORA = PeftType(
    tuple(
        _row(*kinds)
        for kinds in product(
            ("lora", "vector", "constant", "none"), ("lora", "vector", "none"), ("vector", "constant", "none")
        )
        if kinds != ("none", "none", "none")
    ),
    _numbers,
    zeros=".zeros",
)
