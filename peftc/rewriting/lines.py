"""Lines of code that are not too long."""

from __future__ import annotations

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
