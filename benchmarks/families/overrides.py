"""What cannot be made small by the names of fields alone, with the reason of each.

A dotted name is a field of a configuration inside; `...` as a value takes the field away, so that its default is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Override:
    reason: str
    fields: Mapping[str, Any]


OVERRIDES: Mapping[str, Override] = {}


def overridden(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a shrunken configuration with those of its type's override."""
    override = OVERRIDES.get(model_type)
    for name, value in override.fields.items() if override else ():
        *path, last = name.split(".")
        inner = values
        for step in path:
            inner = inner.setdefault(step, {})
        if value is ...:
            inner.pop(last, None)
        else:
            inner[last] = value
    return values
