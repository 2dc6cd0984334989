"""The source of a model's own forward, to show beside what is generated from it."""

import inspect
import textwrap
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class OwnSource:
    """The name of a forward, and its lines; none where its source is not known."""

    name: str
    lines: list[str]


def own_source(cls: type[nn.Module]) -> OwnSource:
    forward = inspect.unwrap(cls.forward)
    name = f"{forward.__module__}.{forward.__qualname__}"
    try:
        return OwnSource(name, textwrap.dedent(inspect.getsource(forward)).splitlines())
    except (OSError, TypeError):
        return OwnSource(name, [])
