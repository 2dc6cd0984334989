"""Writes ReFT for AdapterHub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from peftc.exchange.adapterhub.bottlenecks import ACTIVATIONS
from peftc.exchange.adapterhub.edit_parts import EditPart, Written, key
from peftc.exchange.adapterhub.interventions import ARCHITECTURE, NAMES
from peftc.exchange.adapterhub.places import HubPlaces

FORMS = frozenset(NAMES)


def write_interventions(parts: Sequence[EditPart], places: HubPlaces) -> Written:
    """One configuration for all layers. Raises: P801."""
    config = _config(parts[0])
    for part in parts:
        if (own := _config(part)) != config:
            raise part.no_form(f"the library has one ReFT for all layers, here with {own}, elsewhere {config}")
    chosen = {part.site.path for part in parts}
    layers = [places.layer_number(site) for site in places.layers if site.path in chosen]
    config["layers"] = "all" if len(layers) == len(places.layers) else layers
    return Written(config, {name: tensor for part in parts for name, tensor in _tensors(part)})


def _config(part: EditPart) -> dict[str, Any]:
    sum_ = part.product()
    if part.site.steps[-1][0] != "layer" or len(part.site_edit.assigns) != 1 or sum_ is None:
        raise part.no_form("the library has `h += …` behind layers")
    name = next((one for one in sum_[0].calls if one in FORMS), "")
    if not name:
        raise part.no_form("the library multiplies ReFT by nothing")
    call = sum_[0].calls[name].instance
    args = call.form.fill(call.args)
    if not args["subtract"]:
        raise part.no_form("the library does not save that nothing is taken off, and reads DiReFT as NoReFT")
    if name == "reft" and args["orthogonal"]:
        raise part.no_form("the rows of R are orthonormal in another way in the library")
    act = next((theirs for theirs, ours in ACTIVATIONS.items() if ours == args.get("act", "none")), None)
    if act is None:
        raise part.no_form("the library has other activations")
    return {
        "architecture": ARCHITECTURE,
        "prefix_positions": args["first"] or 0,
        "suffix_positions": args["last"] or 0,
        "r": args["r"],
        "orthogonality": name == "loreft",
        "tied_weights": args.get("units", 1) == 1,
        "dropout": 0.0,
        "non_linearity": None if act == "linear" else act,
        "dtype": None,
        "output_reft": True,
    }


def _tensors(part: EditPart) -> Iterator[tuple[str, Tensor]]:
    owner = f"{part.site.module}.reft_layer"
    for form, names in NAMES.items():
        for ours, theirs in names.items() if form in part.forms else ():
            tensor = part.tensors[f"{form}.{ours}"]
            for number, unit in enumerate([tensor] if form == "reft" else tensor):
                yield key(owner, "refts", f"units.{number}.{theirs}"), unit
