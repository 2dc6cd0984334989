"""How a written path meets the canonical path of a site.

`layer[*].attn.q` covers `encoder.layer[0].attn.self.q` and `decoder.layer[0].attn.cross.q`: the written steps appear in
order, the last written step is the last of the site, and what was left out is a qualifier (the stack, `self`, `cross`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from peftc.addressing.sites import Site, SiteTable
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast

BRANCHES = frozenset({"self", "cross"})
NORM_OWNERS = frozenset({"attn", "ffn", "self", "cross", "q", "k"})

Steps = tuple[tuple[str, int | None], ...]


def show_site_steps(steps: Steps) -> str:
    """`(("layer", 3), ("attn", None))` as `layer[3].attn`."""
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def glob_pattern(text: str) -> re.Pattern[str]:
    """`*` and `?` stay within one segment of a module name; `**` spans segments."""
    parts = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*|\?)", text)))


def stack_steps(names: Sequence[str]) -> int:
    """How many steps of a site's path say in which stack it is: two of `text.decoder.layer.attn`, none of `head`."""
    return names.index("layer") if "layer" in names else max(len(names) - 1, 0)


def align(written: Sequence[str], names: Sequence[str], *, whole: bool = True) -> tuple[int, ...] | None:
    """For each written step the position of the site's step it names, or None where the path is of another site.

    With `whole=False` the written steps only have to be the beginning of the site's path.
    """
    norm = whole and bool(written) and written[-1] == "norm"

    stacked = stack_steps(names)

    def skippable(position: int) -> bool:
        name = names[position]
        if position < stacked:
            return True
        if name in BRANCHES:
            return position > 0 and names[position - 1] == "attn"
        return norm and name in NORM_OWNERS

    def rest(i: int, j: int) -> tuple[int, ...] | None:
        if i == len(written):
            if not whole:
                return ()
            return () if all(names[k] in BRANCHES and skippable(k) for k in range(j, len(names))) else None
        if j == len(names):
            return None
        if names[j] == written[i] and (tail := rest(i + 1, j + 1)) is not None:
            return (j, *tail)
        return rest(i, j + 1) if skippable(j) else None

    return rest(0, 0)


@dataclass(frozen=True)
class Family:
    """The steps of one name under one parent: `layer` under `encoder`."""

    parent: Steps
    name: str

    def __str__(self) -> str:
        return show_site_steps((*self.parent, (self.name, None)))


@dataclass(frozen=True)
class Match:
    """A site that a path names, and for each written step the position of the site's own step."""

    site: Site
    positions: tuple[int, ...]

    @property
    def reached(self) -> Steps:
        """The site's path as far as the written steps go."""
        return self.site.steps[: self.positions[-1] + 1]

    def family(self, written: int) -> Family:
        position = self.positions[written]
        return Family(self.site.steps[:position], self.site.steps[position][0])

    def index(self, written: int) -> int | None:
        return self.site.steps[self.positions[written]][1]


class Paths:
    """The sites of a model by their paths."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self._sizes: dict[Family, int] = defaultdict(int)
        self._alignments: dict[tuple[tuple[str, ...], bool], dict[tuple[str, ...], tuple[int, ...] | None]] = {}
        self._words = [tuple(name for name, _ in site.steps) for site in table.sites]
        for site in table.sites:
            for position, (name, index) in enumerate(site.steps):
                if index is not None:
                    family = Family(site.steps[:position], name)
                    self._sizes[family] = max(self._sizes[family], index + 1)

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """What stands before `layer` in the paths of sites: `encoder`, `text.decoder`."""
        found = [site.steps[:-1] for site in self.table.sites if site.steps[-1][0] == "layer"]
        return tuple(dict.fromkeys(show_site_steps(steps) for steps in found))

    def size(self, family: Family) -> int:
        """How many there are: 12 layers under `encoder`; 0 where the step has no index."""
        return self._sizes.get(family, 0)

    def matches(self, steps: Sequence[ast.Step], *, whole: bool = True) -> Iterator[Match]:
        """The sites a path names by its words alone, whatever its indices say."""
        if (choice := next((i for i in range(len(steps)) if selects_stack(steps, i)), None)) is not None:
            yield from self._chosen_stack(steps, choice, whole)
            return
        written = tuple(step.name for step in steps)
        known = self._alignments.setdefault((written, whole), {})
        for site, names in zip(self.table.sites, self._words, strict=True):
            if names not in known:
                known[names] = align(written, names, whole=whole)
            if (positions := known[names]) is not None:
                yield Match(site, positions)

    def _chosen_stack(self, steps: Sequence[ast.Step], at: int, whole: bool) -> Iterator[Match]:
        """`input.embed` is the first embedding in model order, `output.layer` the layers of the last stack that has any."""
        before, after = tuple(steps[:at]), tuple(steps[at + 1 :])
        last = -1 if steps[at].name == "output" else 0
        parents = [match.family(at).parent for match in self.matches((*before, after[0]), whole=False)]
        for match in self.matches((*before, *after), whole=whole):
            positions = match.positions
            if match.family(at).parent == parents[last]:
                yield Match(match.site, (*positions[: at + 1], *positions[at:]))

    def chosen(self, match: Match, steps: Sequence[ast.Step]) -> bool:
        """Whether the indices of the path let this site through."""
        return all(self._through(match, i, step.indices) for i, step in enumerate(steps) if step.indices is not None)

    def _through(self, match: Match, written: int, indices: tuple[ast.Index, ...]) -> bool:
        at = match.index(written)
        if at is None:
            return False
        size = self.size(match.family(written))
        return any(at in selected(index, size) for index in indices)


def selected(index: ast.Index, size: int) -> range:
    """The numbers below `size` that an index means; both ends included, negative from the end.

    >>> selected(ast.Index(-2, None), 12)
    range(10, 12)
    """
    start = 0 if index.start is None else index.start + size * (index.start < 0)
    stop = size - 1 if index.stop is None else index.stop + size * (index.stop < 0)
    return range(max(start, 0), min(stop, size - 1) + 1)


def fits(index: ast.Index, size: int) -> bool:
    """Whether every number that was written exists and the range is not empty."""
    written = [end for end in (index.start, index.stop) if end is not None]
    return all(-size <= end < size for end in written) and len(selected(index, size)) > 0


def families(matches: Iterable[Match], written: int) -> tuple[Family, ...]:
    """The distinct families that a written step stands for, in model order."""
    return tuple(dict.fromkeys(match.family(written) for match in matches))
