"""Matches the paths of selectors with the canonical paths of sites, and shortens lists of paths.

`layer[*].attn.q` matches `encoder.layer[0].attn.self.q` and `decoder.layer[0].attn.cross.q`: the
written steps appear in order, and the last written step is the last of the site. Steps that may be
left out are qualifiers: the stack, `self` and `cross`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

from peftc.addressing.site_list import Block, Place, show_steps, site_list
from peftc.addressing.sites import Site, SiteTable, Steps
from peftc.syntax import ast
from peftc.syntax.walk import selects_stack

BRANCHES = frozenset({"self", "cross"})
NORM_OWNERS = frozenset({"attn", "ffn", "self", "cross", "q", "k"})
_PATHS = "_paths"  # where a table keeps them
_PARTS = re.compile(r"(\*\*|\*|\?|\[[^\[\].]+\])")  # of a pattern on module names
_WILDCARDS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.|$)")


def glob_pattern(text: str) -> re.Pattern[str]:
    """`*`, `?` and `[qv]` stay within one segment of a module name; `**` spans segments."""
    return re.compile("".join(map(_expression, _PARTS.split(text))))


def _expression(part: str) -> str:
    """The regular expression of a part of a pattern.

    `[q-v]` is any of the characters from q to v, `[!qv]` any but q and v.
    """
    if part in _WILDCARDS:
        return _WILDCARDS[part]
    if not _PARTS.fullmatch(part):
        return re.escape(part)
    others = part[1] == "!" and len(part) > 3
    characters = re.sub(r"[\\^&|~]", r"\\\g<0>", part[2:-1] if others else part[1:-1])
    with suppress(re.error):  # of a range that ends before it begins
        return re.compile(f"[^.{characters}]" if others else f"[{characters}]").pattern
    return re.escape(part)


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
        return show_steps((*self.parent, (self.name, None)))


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


@dataclass(frozen=True)
class ItemMatch:
    """What a path names in the layers of one kind: an item of their template, in these blocks."""

    blocks: Sequence[int]
    item: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class LayerLists:
    """`SitePaths.indices` of the layers of one kind: for all of their sites."""

    blocks: Sequence[int]
    lists: Sequence[tuple[StepList, Sequence[int], Collection[int]]]


def paths_of(table: SiteTable) -> SitePaths:
    """The paths of a table's sites, which are indexed once."""
    paths: SitePaths | None = vars(table).get(_PATHS)
    if paths is None:
        paths = vars(table)[_PATHS] = SitePaths(table)
    return paths


class SitePaths:
    """The sites of a model, looked up by paths of selectors."""

    def __init__(self, table: SiteTable) -> None:
        self.table, self.sites = table, site_list(table)
        self._matches: dict[tuple[tuple[str, ...], bool], list[ItemMatch]] = {}
        self._layer_lists: dict[int, LayerLists] = {}  # by `id` of the template

    @cached_property
    def attentions(self) -> tuple[Steps, ...]:
        """The steps of each attention that is `self` or `cross`."""
        return tuple(
            self.steps(number, i)
            for number, block in enumerate(self.sites.blocks)
            for i, item in enumerate(block.template.items)
            if item.site.steps[-1][0] in BRANCHES
        )

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """The stacks that have layers: `encoder`, `text.decoder`."""
        items = (site.steps for block in self.sites.blocks for site in self._layer_sites(block))
        return tuple(dict.fromkeys(show_steps(steps[:-1]) for steps in items))

    def _layer_sites(self, block: Block) -> Iterator[Site]:
        return (item.site for item in block.template.items if item.site.steps[-1][0] == "layer")

    @cached_property
    def _sizes(self) -> dict[object, int]:
        """The size of each step list: of those in layers once for each kind."""
        sizes: dict[object, int] = defaultdict(int)
        for block in self.sites.blocks:
            if block.layer is not None and (index := block.layer.steps[-1][1]) is not None:
                key = None, block.layer.steps[:-1], block.layer.steps[-1][0]
                sizes[key] = max(sizes[key], index + 1)
        for numbers in self.sites.templates.values():
            template = self.sites.blocks[numbers[0]].template
            depth, kind = (0, None) if template.layer is None else (len(template.layer.steps), id(template))
            for item in template.items:
                for position, (name, index) in enumerate(item.site.steps[depth:], depth):
                    key = kind, item.site.steps[depth:position], name
                    if item.numbers is not None and position == item.numbers.position:
                        sizes[key] = max(sizes[key], item.numbers.count)
                    elif index is not None:
                        sizes[key] = max(sizes[key], index + 1)
        return sizes

    def size(self, steps: StepList) -> int:
        """The number of steps in a list; 0 where the step has no index."""
        return self._sizes.get(self._list_key(steps), 0)

    def _list_key(self, steps: StepList) -> object:
        """The same for lists of layers of one kind."""
        for depth, (name, index) in enumerate(steps.parent, 1):
            if name == "layer" and index is not None:
                number = self.sites.layers.get(show_steps(steps.parent[:depth]))
                if number is not None:
                    return id(self.sites.blocks[number].template), steps.parent[depth:], steps.name
        return None, steps.parent, steps.name

    def matches(self, steps: Sequence[ast.Step], *, whole: bool = True) -> Iterator[Match]:
        """The sites that a path names if its indices are ignored, one by one."""
        positions: dict[tuple[int, int], tuple[int, ...]] = {}
        for match in self.item_matches(steps, whole=whole):
            positions |= {(block, match.item): match.positions for block in match.blocks}
        for number in dict.fromkeys(sorted(block for block, _ in positions)):
            template = self.sites.blocks[number].template
            for group in template.groups:
                members = [item for item in group if (number, item) in positions]
                for network in template.items[group[0]].all_numbers if members else ():
                    for item in members:
                        yield Match(self.sites.at(Place(number, item, network)), positions[number, item])

    def item_matches(self, steps: Sequence[ast.Step], *, whole: bool = True) -> Iterator[ItemMatch]:
        """The sites that a path names if its indices are ignored, once for each kind of layer."""
        if (choice := next((i for i in range(len(steps)) if selects_stack(steps, i)), None)) is not None:
            yield from self._end_matches(steps, choice, whole)
            return
        written = tuple(step.name for step in steps)
        if (written, whole) not in self._matches:
            self._matches[written, whole] = list(self._aligned(written, whole))
        yield from self._matches[written, whole]

    def _aligned(self, written: tuple[str, ...], whole: bool) -> Iterator[ItemMatch]:
        known: dict[tuple[str, ...], tuple[int, ...] | None] = {}
        for numbers in self.sites.templates.values():
            for i, item in enumerate(self.sites.blocks[numbers[0]].template.items):
                names = tuple(name for name, _ in item.site.steps)
                if names not in known:
                    known[names] = align(written, names, whole=whole)
                if (positions := known[names]) is not None:
                    yield ItemMatch(numbers, i, positions)

    def _end_matches(self, steps: Sequence[ast.Step], choice: int, whole: bool) -> Iterator[ItemMatch]:
        """Matches where step `choice` is `input`, the first stack, or `output`, the last."""
        before, after = tuple(steps[:choice]), tuple(steps[choice + 1 :])

        def parent(match: ItemMatch, block: int) -> Steps:
            return self.steps(block, match.item)[: match.positions[choice]]

        every = list(self.item_matches((*before, after[0]), whole=False))
        ends = [(block, match.item, parent(match, block)) for match in every for block in match.blocks]
        end = (max if steps[choice].name == "output" else min)(ends, default=None, key=lambda one: one[:2])
        for match in self.item_matches((*before, *after), whole=whole):
            if blocks := [block for block in match.blocks if end is not None and parent(match, block) == end[2]]:
                positions = match.positions
                yield ItemMatch(blocks, match.item, (*positions[: choice + 1], *positions[choice:]))

    def steps(self, block: int, item: int) -> Steps:
        """The steps of a site in a block; of several networks, of the first."""
        template, layer = self.sites.blocks[block].template, self.sites.blocks[block].layer
        steps = template.items[item].site.steps
        return steps if layer is None else (*layer.steps, *steps[len(layer.steps) :])

    def step_list(self, match: ItemMatch, block: int, written: int) -> StepList:
        """The list of a written step in a block."""
        steps, position = self.steps(block, match.item), match.positions[written]
        return StepList(steps[:position], steps[position][0])

    def indices(self, match: ItemMatch, written: int) -> Iterator[tuple[StepList, Sequence[int], Collection[int]]]:
        """For a written step: each of its lists, the blocks in which it is the list, and the
        numbers there, of layers that of each block. Lists in layers of one kind are alike: the
        first stands for them all.
        """
        template, position = self.sites.blocks[match.blocks[0]].template, match.positions[written]
        numbers = template.items[match.item].numbers
        if self.is_of_layer(match, written):
            of_kind = self._layer_lists.get(id(template))
            if of_kind is None or of_kind.blocks is not match.blocks:
                of_kind = LayerLists(match.blocks, list(self._lists_of_layers(match, position)))
            if self.sites.templates[id(template)] is match.blocks:
                self._layer_lists[id(template)] = of_kind
            yield from of_kind.lists
            return
        lists = self.step_list(match, match.blocks[0], written)
        if numbers is not None and position == numbers.position:
            yield lists, match.blocks, range(numbers.count)
        else:
            index = template.items[match.item].site.steps[position][1]
            yield lists, match.blocks, () if index is None else (index,)

    def _lists_of_layers(
        self, match: ItemMatch, position: int
    ) -> Iterator[tuple[StepList, Sequence[int], Collection[int]]]:
        groups: dict[object, tuple[list[int], list[int]]] = {}
        for block in match.blocks:
            steps = layer.steps if (layer := self.sites.blocks[block].layer) else self.steps(block, match.item)
            name, index = steps[position]
            blocks, indices = groups.setdefault((steps[:position], name, index is None), ([], []))
            blocks.append(block)
            indices += () if index is None else (index,)
        for blocks, indices in groups.values():
            steps = self.steps(blocks[0], match.item)
            yield StepList(steps[:position], steps[position][0]), blocks, indices

    def is_of_layer(self, match: ItemMatch, written: int) -> bool:
        """Whether a written step is that of the layer."""
        layer = self.sites.blocks[match.blocks[0]].template.layer
        return layer is not None and match.positions[written] == len(layer.steps) - 1

    def selected(self, match: ItemMatch, steps: Sequence[ast.Step]) -> tuple[Sequence[int], frozenset[int]]:
        """The blocks, and the numbers of networks, that the indices of a path select."""
        template = self.sites.blocks[match.blocks[0]].template
        item, blocks = template.items[match.item], list(match.blocks)
        networks = set(item.all_numbers)
        for i, step in enumerate(steps):
            if step.indices is None:
                continue
            is_network = item.numbers is not None and match.positions[i] == item.numbers.position
            remaining = set[int]()
            for lists, own, numbers in self.indices(match, i):
                size = self.size(lists)
                named = {number for index in step.indices for number in index_range(index, size)}
                if self.is_of_layer(match, i):
                    of_blocks = zip(own, numbers, strict=False)  # () where layers have no number
                    remaining.update([block for block, number in of_blocks if number in named])
                    continue
                chosen = named.intersection(numbers)
                networks &= chosen if is_network else networks
                remaining.update(own if chosen else ())
            blocks = [block for block in blocks if block in remaining]
        return blocks, frozenset(networks)

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


def index_ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0..2, 5`, in the notation of selectors."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in ranges)


def compress_paths(paths: Sequence[str], counts: Iterable[int] = repeat(1)) -> list[tuple[str, int]]:
    """Patterns, each with the number of its paths, in the order of their first path.

    `counts`: how many paths each one stands for.

    Paths that differ in their first number become one pattern, `model.layers.{0..11}.fc1`; patterns
    with one parent become one, `….attn.self.{q, v}`.
    """
    patterns: dict[tuple[str, str], list[int]] = defaultdict(list)
    totals = Counter[tuple[str, str]]()
    for path, count in zip(paths, counts, strict=False):
        match = _NUMBER.search(path)
        key = (path[: match.start()], path[match.end() :]) if match else (path, "")
        patterns[key] += [int(match.group())] if match else []
        totals[key] += count
    return _merge_siblings([(_pattern(*key, numbers), totals[key]) for key, numbers in patterns.items()])


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
