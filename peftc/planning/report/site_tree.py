"""The sites of a model as a tree: what an edit can name, in which module, of which shape, with how many parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.addressing.path_compression import index_ranges
from peftc.addressing.paths import Steps, show_site_steps, stack_steps
from peftc.addressing.sites import Site, SiteTable
from peftc.planning.report.repeated_networks import Families, Family
from peftc.planning.report.text import plain_text

Row = tuple[str, ...]  # site, module, shape, parameters, states


ORDER = ("x", "h", "res", "c", "q", "k", "v", "kv", "z", "w", "b")
NARROWEST = 8  # of the states, in characters
WIDEST = 24  # of the sites


def sites_text(table: SiteTable, width: int = 80) -> str:
    """The tree as plain text without colours."""
    return plain_text(render_sites(table, width), width)


def render_sites(table: SiteTable, width: int = 80) -> RenderableType:
    """Every site once for all the layers that are alike: `layer[0..11] × 12`. `width`: of a line, in characters."""
    header = Text.assemble((table.model_id, "bold"), f"  ({table.model_type}, {table.parameters:,} parameters)")
    rows = _Tree(table).rows()
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("site", "module", "shape"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("parameters", justify="right", no_wrap=True)
    grid.add_column("states", no_wrap=True, style="dim")
    module, states = _room(rows, width)
    for row in rows:
        cells = (_indented(row[0]), _wrapped(row[1], module, "."), *row[2:4], _wrapped(row[4], states, " "))
        grid.add_row(*map(Text, cells))
    return Group(header, Text(), grid, *_shared(table))


def _shared(table: SiteTable) -> list[RenderableType]:
    """What layers have in common: a line for each module that is in no other such module."""
    names = {name for group in table.shared_modules for name in group}
    outer = [group for group in table.shared_modules if not any(group[0].startswith(f"{name}.") for name in names)]
    return [Text(), *(Text(f"one module: {', '.join(group)}") for group in outer)] if outer else []


def _room(rows: Sequence[Row], width: int) -> tuple[int, int]:
    """Characters for modules and for states, after the columns that are never wrapped."""
    longest = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    longest[0] = min(longest[0], WIDEST)
    left = width - longest[0] - longest[2] - max(longest[3], len("parameters")) - 8
    module = max(NARROWEST, min(longest[1], left - min(longest[4], NARROWEST)))
    return module, max(NARROWEST, left - module)


def _indented(site: str) -> str:
    """The name of a site; a long list of layers goes on under its own beginning."""
    inner = site.lstrip()
    indent = " " * (len(site) - len(inner))
    return indent + _wrapped(inner, WIDEST - len(indent), " ").replace("\n", f"\n{indent}")


def _wrapped(text: str, width: int, separator: str) -> str:
    """Lines of at most `width` characters, broken after a separator where there is one."""
    lines = [""]
    for part in re.findall(rf"[^{separator}]*\{separator}|[^{separator}]+$", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(line.rstrip() for line in lines)


class _Tree:
    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.own = {m.name: sum(prod(shape) for shape in m.parameters.values()) for m in table.modules}

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        told: set[Steps] = set()
        layers = self._layers()
        stacks = list(dict.fromkeys(map(_stack, self.table.sites)))
        for site in sorted(self.table.sites, key=lambda site: stacks.index(_stack(site))):
            stack = _stack(site)
            if stack and stack not in told:
                told.add(stack)
                rows.append((show_site_steps(stack), "", "", "", ""))
            if _in_layer(site):
                rows += layers.pop(_layer(site), [])
            else:
                name = show_site_steps(site.steps[len(stack) :])
                rows.append(self._row(f"{'  ' if stack else ''}{name}", site, site.module))
        return rows

    def _layers(self) -> dict[Steps, list[Row]]:
        """The rows of each sort of layer, under the first layer of that sort."""
        members: dict[Steps, list[Site]] = {}
        for site in self.table.sites:
            if _in_layer(site):
                members.setdefault(_layer(site), []).append(site)
        alike: dict[object, list[Steps]] = {}
        for steps, sites in members.items():
            alike.setdefault((steps[:-1], *map(self._signature, sites)), []).append(steps)
        return {steps[0]: self._layer_rows(steps, members) for steps in alike.values()}

    def _signature(self, site: Site) -> object:
        states = tuple((name, state.shape) for name, state in site.states.items())
        return site.steps[len(_layer(site)) :], site.module.removeprefix(site.root), states, site.runs

    def _layer_rows(self, alike: Sequence[Steps], members: Mapping[Steps, Sequence[Site]]) -> list[Row]:
        first = members[alike[0]]
        numbers = index_ranges([index for steps in alike if (index := steps[-1][1]) is not None])
        name = f"  layer[{numbers}]" + (f" × {len(alike)}" if len(alike) > 1 else "")
        name += f" run {first[0].runs} times" if first[0].runs > 1 else ""
        rows: list[Row] = []
        families = Families(first, len(alike[0]))
        for site in first:
            steps = site.steps[len(alike[0]) :]
            if families.repeats(site):
                continue
            rows += [self._family_row(family, first) for family in families.new(site)]
            if not steps:
                each = self._below(site.module)
                rows.append(
                    (
                        name,
                        re.sub(r"\.\d+$", ".*", site.module) if len(alike) > 1 else site.module,
                        _shape(site),
                        f"{each:,}",
                        _states(site),
                    )
                )
                continue
            depth = len([step for step in steps if step[0] not in ("self", "cross")])
            rows.append(self._row(f"{'  ' * (depth + 1)}{_last(steps)}", site, _relative(site, first)))
        return rows

    def _family_row(self, family: Family, layer: Sequence[Site]) -> Row:
        """`experts[0..7] × 8` above what each of them has; parameters are those of all."""
        total = sum(self._parameters(site) for site in family.sites)
        indent = "  " * (len([step for step in family.steps if step[0] not in ("self", "cross")]) + 1)
        module = _relative(family.sites[0], layer) if len({site.module for site in family.sites}) == 1 else ""
        return f"{indent}{family.name}", module, "", f"{total:,}" if total else "", ""

    def _row(self, name: str, site: Site, module: str) -> Row:
        total = self._parameters(site)
        return name, module, _shape(site), f"{total:,}" if total else "", _states(site)

    def _parameters(self, site: Site) -> int:
        """Those of the site's own weight and bias, or of the sites below it."""
        sites = [
            one
            for one in self.table.sites
            if one.steps[: len(site.steps)] == site.steps and f"{one.root}.".startswith(f"{site.root}.")
        ]
        refs = {(ref, state.shape) for one in sites for state in one.states.values() if (ref := state.weight)}
        return sum(_size(shape) for _, shape in refs)

    def _below(self, module: str) -> int:
        return sum(total for name, total in self.own.items() if name == module or name.startswith(module + "."))


def _last(steps: Steps) -> str:
    """`attn.self`, `q`: the words that are new under the row above."""
    tail = steps[-2:] if len(steps) > 1 and steps[-1][0] in ("self", "cross") else steps[-1:]
    return show_site_steps(tail)


def _states(site: Site) -> str:
    return " ".join(sorted(site.states, key=lambda name: (*ORDER, name).index(name)))


def _in_layer(site: Site) -> bool:
    return any(name == "layer" for name, _ in site.steps[1:])


def _stack(site: Site) -> Steps:
    """The steps that say in which stack a site is."""
    return site.steps[: stack_steps([name for name, _ in site.steps])]


def _layer(site: Site) -> Steps:
    """The steps as far as the layer."""
    return site.steps[: len(_stack(site)) + 1]


def _relative(site: Site, layer: Sequence[Site]) -> str:
    """The site's module, from the module of the site above it on; empty where it is the layer itself."""
    above = [one.module for one in layer if one is not site and site.steps[: len(one.steps)] == one.steps]
    parents = [name for name in above if site.module.startswith(name + ".")]
    return "" if site.module == site.root else site.module[len(max(parents, key=len, default="")) + bool(parents) :]


def _shape(site: Site) -> str:
    """`4096 × 1024` of a weight (out × in), `16 × 64` of heads, `1024` features of a hidden state."""
    found = site.states.get("w") or site.states.get("h")
    sizes = vars(found.shape).values() if found else ()
    return " × ".join(str(size) for size in sizes if isinstance(size, int))


def _size(shape: object) -> int:
    return prod(vars(shape).values())
