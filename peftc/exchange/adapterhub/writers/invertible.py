"""Writes invertible adapters for AdapterHub, into the configuration of its bottlenecks."""

from __future__ import annotations

from collections.abc import Sequence

from peftc.exchange.adapterhub.bottlenecks import ACTIVATIONS, is_bottleneck
from peftc.exchange.adapterhub.edit_parts import EditPart, Written, key
from peftc.exchange.adapterhub.invertible import FACTOR, FORM, HOLDER, KEY, NAMES, NICE
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.peft_format.config import PeftConfig

FORMS = frozenset({FORM})


def add_invertible(parts: Sequence[EditPart], written: Sequence[Written], places: HubPlaces) -> None:
    """Adds it to the first configuration of bottlenecks. Raises: P801."""
    for part in parts:
        if places.output_embeddings is not None:
            reason = "with a head for tokens the library also applies the inverse in some models, and not in others"
            raise part.no_form(reason)
        config = next((one for one in written if is_bottleneck(PeftConfig(one.config))), None)
        if config is None:
            raise part.no_form("the library has it beside bottlenecks")
        owner = places.prefix if places.prefix in places.modules else ""
        if part.site.path != places.embeddings(owner).path:
            raise part.no_form(f"the library has it at `{places.embeddings(owner).path}`")
        call = part.site_edit.instances[0]
        args = call.form.fill(call.args)
        if ACTIVATIONS[config.config["non_linearity"]] != args["act"]:
            raise part.no_form(
                f"its bottlenecks have the activation `{config.config['non_linearity']}`, and it the same"
            )
        config.config.update({KEY: NICE, FACTOR: args["reduction"]})
        config.tensors.update({key(owner, HOLDER, end): part.tensors[name] for end, name in NAMES.items()})
