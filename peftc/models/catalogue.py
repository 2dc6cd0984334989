"""Configurations of well-known checkpoints: planning needs neither network nor weights."""

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from peftc.models.catalogue_file import read_catalogue

Head = str  # the task of an auto class of transformers, such as "causal-lm"; "base" is `AutoModel`


class Entry(BaseModel):
    """One checkpoint. `parameters`: the published total for `head`. `also`: another id."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    head: Head
    parameters: int
    config: Mapping[str, Any]
    also: str | None = None
    note: str | None = None


@cache
def catalogue() -> Mapping[str, Entry]:
    """The entries by id, in the order of the file."""
    return TypeAdapter(dict[str, Entry]).validate_python(read_catalogue())


def find(model_id: str) -> Entry | None:
    """The entry of an id, also under its other id."""
    entries = catalogue()
    return entries.get(model_id) or next((e for e in entries.values() if e.also == model_id), None)


def nearest_ids(model_id: str) -> list[str]:
    """At most three similar ids, nearest first. The organisation before `/` may be missing."""
    ids: dict[str, str] = {}
    for known in catalogue():
        ids.setdefault(known.lower(), known)
        ids.setdefault(known.lower().rpartition("/")[2], known)
    spellings = (model_id.lower(), model_id.lower().rpartition("/")[2])
    matches = [ids[m] for s in spellings for m in difflib.get_close_matches(s, ids, n=3, cutoff=0.7)]
    return list(dict.fromkeys(matches))[:3]
