"""Matches the paths of selectors with the canonical paths of sites, and shortens lists of paths.

`layer[*].attn.q` matches `encoder.layer[0].attn.self.q` and `decoder.layer[0].attn.cross.q`: the
written steps appear in order, and the last written step is the last of the site. Steps that may be
left out are qualifiers: the stack, `self` and `cross`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from peftc.addressing.sites import Site, SiteTable, Steps
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast

BRANCHES = frozenset({"self", "cross"})
NORM_OWNERS = frozenset({"attn", "ffn", "self", "cross", "q", "k"})
_PATHS = "_paths"  # where a table keeps them
_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.|$)")


def show_site_steps(steps: Steps) -> str:
    """`(("layer", 3), ("attn", None))` as `layer[3].attn`."""
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def glob_pattern(text: str) -> re.Pattern[str]:
    """`*` and `?` stay within one segment of a module name; `**` spans segments."""
    parts = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*|\?)", text)))


def stack_steps(names: Sequence[str]) -> int:
    """How many leading steps name the stack: two in `text.decoder.layer.attn`, none in `head`."""
    return names.index("layer") if "layer" in names else max(len(names) - 1, 0)


def align(written: Sequence[str], names: Sequence[str], *, whole: bool = True) -> tuple[int, ...] | None:
    """The position in `names` of each written step, or None. `whole`: False matches beginnings."""
    norm = whole and bool(written) and written[-1] == "norm"
    stack = stack_steps(names)

    def optional(position: int) -> bool:
        if position < stack:
            return True
        if names[position] in BRANCHES:
            return position > 0 and names[position - 1] == "attn"
        return norm and names[position] in NORM_OWNERS

    def match(i: int, j: int) -> tuple[int, ...] | None:
        if i == len(written):
            complete = not whole or all(names[k] in BRANCHES and optional(k) for k in range(j, len(names)))
            return () if complete else None
        if j == len(names):
            return None
        if names[j] == written[i] and (tail := match(i + 1, j + 1)) is not None:
            return (j, *tail)
        return match(i, j + 1) if optional(j) else None

    return match(0, 0)


@dataclass(frozen=True)
class StepList:
    """The numbered steps of one name under one parent: `layer` under `encoder`."""

    parent: Steps
    name: str

    def __str__(self) -> str:
        return show_site_steps((*self.parent, (self.name, None)))


@dataclass(frozen=True)
class Match:
    """A site that a path names; `positions[i]` is the site's step for written step i."""

    site: Site
    positions: tuple[int, ...]

    @property
    def prefix(self) -> Steps:
        """The site's steps up to the last written one."""
        return self.site.steps[: self.positions[-1] + 1]

    def step_list(self, written: int) -> StepList:
        position = self.positions[written]
        return StepList(self.site.steps[:position], self.site.steps[position][0])

    def index(self, written: int) -> int | None:
        return self.site.steps[self.positions[written]][1]


def paths_of(table: SiteTable) -> SitePaths:
    """The paths of a table's sites, which are indexed once."""
    paths: SitePaths | None = vars(table).get(_PATHS)
    if paths is None:
        paths = vars(table)[_PATHS] = SitePaths(table)
    return paths


class SitePaths:
    """The sites of a model, looked up by paths of selectors."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self._sizes: dict[tuple[Steps, str], int] = {}  # of each step list
        self._alignments: dict[tuple[tuple[str, ...], bool], dict[tuple[str, ...], tuple[int, ...] | None]] = {}
        self._names = [tuple(name for name, _ in site.steps) for site in table.sites]
        for site in table.sites:
            for position, (name, index) in enumerate(site.steps):
                if index is not None:
                    key = (site.steps[:position], name)
                    self._sizes[key] = max(self._sizes.get(key, 0), index + 1)

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """The stacks that have layers: `encoder`, `text.decoder`."""
        parents = [site.steps[:-1] for site in self.table.sites if site.steps[-1][0] == "layer"]
        return tuple(dict.fromkeys(show_site_steps(steps) for steps in parents))

    def size(self, steps: StepList) -> int:
        """The number of steps in a list; 0 where the step has no index."""
        return self._sizes.get((steps.parent, steps.name), 0)

    def matches(self, steps: Sequence[ast.Step], *, whole: bool = True) -> Iterator[Match]:
        """The sites that a path names if its indices are ignored."""
        if (choice := next((i for i in range(len(steps)) if selects_stack(steps, i)), None)) is not None:
            yield from self._end_matches(steps, choice, whole)
            return
        written = tuple(step.name for step in steps)
        known = self._alignments.setdefault((written, whole), {})
        for site, names in zip(self.table.sites, self._names, strict=True):
            if names not in known:
                known[names] = align(written, names, whole=whole)
            if (positions := known[names]) is not None:
                yield Match(site, positions)

    def _end_matches(self, steps: Sequence[ast.Step], choice: int, whole: bool) -> Iterator[Match]:
        """Matches where step `choice` is `input`, the first stack, or `output`, the last."""
        before, after = tuple(steps[:choice]), tuple(steps[choice + 1 :])
        end = -1 if steps[choice].name == "output" else 0
        parents = [match.step_list(choice).parent for match in self.matches((*before, after[0]), whole=False)]
        for match in self.matches((*before, *after), whole=whole):
            if match.step_list(choice).parent == parents[end]:
                positions = match.positions
                yield Match(match.site, (*positions[: choice + 1], *positions[choice:]))

    def has_indices(self, match: Match, steps: Sequence[ast.Step]) -> bool:
        """Whether the site's indices are among those that the path selects."""

        def selected(i: int, indices: Iterable[ast.Index]) -> bool:
            size = self.size(match.step_list(i))
            return any(match.index(i) in index_range(index, size) for index in indices)

        return all(selected(i, step.indices) for i, step in enumerate(steps) if step.indices is not None)


def index_range(index: ast.Index, size: int) -> range:
    """The numbers below `size` that an index selects; both ends included, negative from the end.

    >>> index_range(ast.Index(-2, None), 12)
    range(10, 12)
    """
    start = 0 if index.start is None else index.start + size * (index.start < 0)
    stop = size - 1 if index.stop is None else index.stop + size * (index.stop < 0)
    return range(max(start, 0), min(stop, size - 1) + 1)


def in_range(index: ast.Index, size: int) -> bool:
    """Whether both ends of an index exist and the range is not empty."""
    ends = [end for end in (index.start, index.stop) if end is not None]
    return all(-size <= end < size for end in ends) and len(index_range(index, size)) > 0


def step_lists(matches: Iterable[Match], written: int) -> tuple[StepList, ...]:
    """The distinct lists that a written step stands for, in model order."""
    return tuple(dict.fromkeys(match.step_list(written) for match in matches))


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
