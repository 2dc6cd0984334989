"""Compresses lists of paths: `encoder.layer[0..11].attn.self.{q, v}` stands for 24 paths."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.|$)")


def index_ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0..2, 5`, in the notation of selectors."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in ranges)


def compress_paths(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Patterns, each with the number of its paths, in the order of their first path.

    Paths that differ in their first number become one pattern, `model.layers.{0..11}.fc1`; patterns
    with one parent become one, `….attn.self.{q, v}`.
    """
    patterns: dict[tuple[str, str], list[int]] = defaultdict(list)
    counts = Counter[tuple[str, str]]()
    for path in paths:
        match = _NUMBER.search(path)
        key = (path[: match.start()], path[match.end() :]) if match else (path, "")
        patterns[key] += [int(match.group())] if match else []
        counts[key] += 1
    return _merge_siblings([(_pattern(*key, numbers), counts[key]) for key, numbers in patterns.items()])


def _pattern(before: str, after: str, numbers: Sequence[int]) -> str:
    text = index_ranges(numbers)
    plain = not numbers or before.endswith("[") or text.isdigit()
    return f"{before}{text}{after}" if plain else f"{before}{{{text}}}{after}"


def _merge_siblings(patterns: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Merges patterns with one parent and count, unless the last word has brackets or quotes."""
    groups: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for text, count in patterns:
        parent, _, last = text.rpartition(".")
        alone = count == 1 or not parent or not last.replace("_", "").isalnum()
        groups[parent, count, text if alone else ""].append(last)
    return [
        (text or f"{parent}.{names[0]}", count)
        if text or len(names) == 1
        else (f"{parent}.{{{', '.join(names)}}}", count * len(names))
        for (parent, count, text), names in groups.items()
    ]
