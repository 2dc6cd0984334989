"""Well-known checkpoints by their configuration values, so that planning needs neither network nor weights.

The catalogue is data (`catalogue.json`): values of checkpoints, no knowledge about architectures.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Head = Literal["base", "causal-lm", "seq2seq-lm"]


class Entry(BaseModel):
    """One checkpoint. `parameters` is the published total for `head`, tied weights counted once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    head: Head
    parameters: int
    config: Mapping[str, Any]
    also: str | None = None  # another id of the same checkpoint
    note: str | None = None


class _Catalogue(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    models: dict[str, Entry]


@cache
def catalogue() -> Mapping[str, Entry]:
    """Every id of the catalogue, in the order of the file."""
    text = resources.files("peftc.models").joinpath("catalogue.json").read_text(encoding="utf-8")
    return _Catalogue.model_validate(json.loads(text)).models


def find(model_id: str) -> Entry | None:
    """The entry of an id, also under its other name (with and without the organisation)."""
    entries = catalogue()
    return entries.get(model_id) or next((e for e in entries.values() if e.also == model_id), None)


def near(model_id: str, limit: int = 3) -> list[str]:
    """Ids that `model_id` may have been meant for, nearest first; the organisation before the slash may be missing."""
    wanted = model_id.lower()
    names: dict[str, str] = {}
    for known in catalogue():
        names.setdefault(known.lower(), known)
        names.setdefault(known.lower().rpartition("/")[2], known)
    candidates = [wanted, wanted.rpartition("/")[2]]
    found = [names[n] for c in candidates for n in difflib.get_close_matches(c, names, n=limit, cutoff=0.7)]
    return list(dict.fromkeys(found))[:limit]
