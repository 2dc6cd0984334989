"""Parts of messages that several stages of planning share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import join_names

MAX_NAMES = 4


def plural(number: int, noun: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    if len(names) <= MAX_NAMES:
        return join_names(names)
    return f"{', '.join(f'`{name}`' for name in names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"


def for_sites(diagnostics: Iterable[Diagnostic], of: str = "") -> Diagnostic:
    """One message for what is wrong at many sites: the first, with how many more there are."""
    first, *others = diagnostics
    note = f"the same at {plural(len(others), 'more site')}{of}"
    return replace(first, notes=(*first.notes, note)) if others else first
