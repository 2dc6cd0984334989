"""Many paths that differ in numbers or in their last word, as one line: `encoder.layer[0..11].attn.self.{q, v}` × 24."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.|$)")


def index_ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0..2, 5`, in the notation of selectors."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and out[-1][-1] == number - 1:
            out[-1].append(number)
        else:
            out.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in out)


@dataclass
class _Pattern:
    """`before` NUMBERS `after`: all the paths that differ in their first number alone."""

    before: str
    after: str
    numbers: list[int] = field(default_factory=list[int])
    count: int = 0

    def __str__(self) -> str:
        if not self.numbers:
            return self.before
        text = index_ranges(self.numbers)
        plain = self.before.endswith("[") or text.isdigit()
        return f"{self.before}{text}{self.after}" if plain else f"{self.before}{{{text}}}{self.after}"


def compress_paths(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Each pattern of paths with how many it stands for, in the order of their first.

    `model.layers.{0..11}.fc1` stands for twelve; patterns of one parent share a line: `….attn.self.{q, v}`.
    """
    patterns: dict[tuple[str, str], _Pattern] = {}
    for path in paths:
        found = _NUMBER.search(path)
        key = (path[: found.start()], path[found.end() :]) if found else (path, "")
        pattern = patterns.setdefault(key, _Pattern(*key))
        pattern.count += 1
        pattern.numbers += [int(found.group())] if found else []
    return _siblings([(str(pattern), pattern.count) for pattern in patterns.values()])


def _siblings(lines: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Lines with one parent and one count as one line; a word with brackets or quotes stays on its own."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for text, count in lines:
        parent, _, last = text.rpartition(".")
        alone = count == 1 or not parent or not last.replace("_", "").isalnum()
        groups.setdefault((parent, count, text if alone else ""), []).append(last)
    return [_line(parent, count, alone, names) for (parent, count, alone), names in groups.items()]


def _line(parent: str, count: int, alone: str, names: Sequence[str]) -> tuple[str, int]:
    if alone or len(names) == 1:
        return alone or f"{parent}.{names[0]}", count
    return f"{parent}.{{{', '.join(names)}}}", count * len(names)
