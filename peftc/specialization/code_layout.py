"""Lines of code: long calls, and choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

WIDTH = 110


def wrapped(line: str) -> list[str]:
    """A long call with one argument a line."""
    if len(line) <= WIDTH or not line.endswith(")"):
        return [line]
    opening, depth = -1, 0
    for i in range(len(line) - 1, -1, -1):
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(line[i], 0)
        if depth == 0:
            opening = i
            break
    parts, depth, start = list[str](), 0, opening + 1
    for i in range(opening + 1, len(line) - 1):
        depth += {")": -1, "]": -1, "}": -1, "(": 1, "[": 1, "{": 1}.get(line[i], 0)
        if line[i] == "," and depth == 0:
            parts.append(line[start:i].strip())
            start = i + 1
    parts.append(line[start:-1].strip())
    return [line[: opening + 1], *(f"    {p}," for p in parts), ")"]


def decided(choices: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """The lines that run the statement of a choice whose conditions hold. Conditions that begin alike are asked once."""
    lines: list[str] = []
    while choices:
        first = choices[0][0]
        if not first:
            return [*lines, choices[0][1]]
        group = [c for c in choices if c[0][:1] == first[:1]]
        columns = zip(*(conditions for conditions, _ in group), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        inner = decided([(conditions[shared:], statement) for conditions, statement in group])
        head = [f"if {first[0]}:"] if shared == 1 else all_of("if ", first[:shared], ":")
        lines += [*head, *(f"    {line}" for line in inner)]
        choices = [c for c in choices if c[0][:1] != first[:1]]
    return lines


def all_of(before: str, conditions: Iterable[str], after: str = "") -> list[str]:
    """The lines of a statement about all of some conditions."""
    first, *others = [*conditions] or ["True"]
    return [f"{before}(", f"    {first}", *(f"    and {c}" for c in others), f"){after}"]
