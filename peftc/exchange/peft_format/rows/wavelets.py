"""WaveFT of PEFT: few wavelet coefficients of the change of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from peftc.equations.transforms.filters import WAVELETS
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.rows.places import drawn
from peftc.exchange.peft_format.types import NoConfig, Numbers, PeftRow, PeftType, Size, Tensors, shown
from peftc.semantics.recipes import form_text

_WAVEFT = form_text("waveft")

_SEED, _SCALE = 777, 25.0  # of PEFT


def _waveft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("n_frequency", "n_frequency_pattern", "proportional_parameters"):
        config.read(key, None)  # the tensor tells
    families = ("db1", "haar", *WAVELETS)
    reason = f"PEFT's own filter is not that of the wavelet, or peftc has none; it has {', '.join(WAVELETS)}"
    family = config.one_of("wavelet_family", families, reason).replace("haar", "db1")
    family = family if config.read("use_idwt", True) else "none"
    options = f", family={family}" if family != "db1" else ""
    seed, scale = int(config.number("random_loc_seed", _SEED)), config.number("scaling", _SCALE)
    return {"n": len(tensors["waveft_spectrum"]), "scale": shown(scale), "seed": seed, "options": options}


def _read(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    spectrum, seed = tensors["waveft_spectrum"], int(config.number("random_loc_seed", _SEED))
    return {"waveft.spectrum": spectrum, "waveft.places": drawn(len(spectrum), size, seed)}


def _write(own: Tensors, args: Mapping[str, Any], size: Size) -> dict[str, Tensor]:
    places, seed = own["waveft.places"], args["waveft"]["seed"]
    if not places.equal(drawn(len(places), size, seed)):
        raise NoConfig(f"PEFT draws the places from a seed, and these are not those of {seed}")
    return {"waveft_spectrum": own["waveft.spectrum"]}


def _config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = args["waveft"]
    family = {
        "wavelet_family": "db1" if own["family"] == "none" else own["family"],
        "use_idwt": own["family"] != "none",
    }
    keys = {"n_frequency": own["n"], "scaling": float(own["scale"]), "random_loc_seed": own["seed"], **family}
    return {**keys, "proportional_parameters": False, "bias": "none"}


WAVEFT = PeftType(
    (
        PeftRow(
            {"waveft_spectrum": "waveft.spectrum"},
            "w += waveft(n={n}, scale={scale}{options}, seed={seed})",
            _WAVEFT,
            config=_config,
            places="waveft.places",
            read=_read,
            write=_write,
        ),
    ),
    _waveft,
    patterns={"n_frequency": "n_frequency_pattern"},
    has_transposition=True,
)
