"""The file of the catalogue, as JSON: a shell that completes an id waits for no more than this."""

import json
from importlib import resources
from typing import Any


def read_catalogue() -> dict[str, dict[str, Any]]:
    """The entries by id, in the order of the file."""
    text = resources.files("peftc.models").joinpath("catalogue.json").read_text(encoding="utf-8")
    return json.loads(text)["models"]


def catalogue_ids() -> list[str]:
    """All ids, with the other id of an entry behind its own."""
    return [name for key, entry in read_catalogue().items() for name in (key, entry.get("also")) if name]
