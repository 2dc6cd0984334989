"""Applies the safe fixes of diagnostics to the text of a spec."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from peftc.diagnostics import Diagnostic, PeftcError, Replacement
from peftc.syntax.parser import parse_text

_MOST_ROUNDS = 10  # a fix may show further errors

Check = Callable[[str], Iterable[Diagnostic]]


class Fixed(NamedTuple):
    """A text after fixes.

    Attributes:
        text: the new text; the old one if the new one would not parse.
        number: how many diagnostics were fixed.
        unwritten: how many were not, because the new text would not parse.
    """

    text: str
    number: int
    unwritten: int = 0


def fix_text(text: str, path: str, check: Check) -> Fixed:
    """The text with all safe fixes, round by round. It parses, or it is as it was.

    Args: `check`: the diagnostics of a text.
    """
    new, number = text, 0
    for _ in range(_MOST_ROUNDS):
        fixes = [one for one in check(new) if is_fixable(one, path, new)]
        if not fixes:
            break
        chosen = _without_overlaps(fixes)
        number += len(chosen)
        new = replaced(new, [change for one in chosen if one.fix for change in one.fix.replacements])
    if new == text:
        return Fixed(text, 0)
    try:
        parse_text(new, path)
    except PeftcError:
        return Fixed(text, 0, number)
    return Fixed(new, number)


def is_fixable(diagnostic: Diagnostic, path: str, text: str) -> bool:
    """Whether a diagnostic has a safe fix of this very text."""
    source, fix = diagnostic.source, diagnostic.fix
    is_here = source is not None and (source.path, source.text) == (path, text)
    return is_here and fix is not None and fix.applicability == "safe"


def _without_overlaps(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    chosen: list[Diagnostic] = []
    taken: list[Replacement] = []
    for one in diagnostics:
        changes = one.fix.replacements if one.fix else ()
        if not any(a.span.start < b.span.end and b.span.start < a.span.end for a in changes for b in taken):
            chosen.append(one)
            taken += changes
    return chosen


def replaced(text: str, changes: Iterable[Replacement]) -> str:
    """A text with replacements, which do not overlap."""
    for change in sorted(set(changes), key=lambda change: change.span.start, reverse=True):
        text = text[: change.span.start] + change.text + text[change.span.end :]
    return text
