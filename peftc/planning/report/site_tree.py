"""The sites of a model as a tree, with their modules, shapes, parameters and states."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.addressing.paths import BRANCHES, index_ranges, stack_steps
from peftc.addressing.site_list import show_steps
from peftc.addressing.sites import Site, SiteTable, Steps
from peftc.forms.shapes import Shape

Row = tuple[str, str, str, str, str]  # site, module, shape, parameters, states

STATE_ORDER = ("x", "h", "res", "c", "q", "k", "v", "kv", "z", "w", "b")
MIN_STATES = 8  # characters
MAX_SITE, NARROW_SITE = 24, 16  # the second where there is no room for the first


@dataclass(frozen=True, eq=False)
class NetworkGroup:
    """Networks of one name that are no sites, such as experts, and have the same sites in them."""

    steps: Steps  # of the first network, in its layer
    numbers: tuple[int, ...]
    sites: tuple[Site, ...]  # of all networks

    @property
    def name(self) -> str:
        """`experts[0..7] × 8`, or `shared`."""
        word = self.steps[-1][0]
        return f"{word}[{index_ranges(self.numbers)}] × {len(self.numbers)}" if self.numbers else word


def network_groups(sites: Sequence[Site], depth: int) -> dict[Steps, NetworkGroup]:
    """The groups of the networks of a layer. `depth`: the number of steps of the layer's path."""
    site_steps = {site.steps[depth:] for site in sites}
    networks: dict[Steps, list[Site]] = defaultdict(list)
    for site in sites:
        parent = site.steps[depth:-1]
        if parent and parent not in site_steps and site.steps[-1][0] not in BRANCHES:
            networks[parent].append(site)
    alike: dict[object, list[Steps]] = defaultdict(list)
    for steps, inside in networks.items():
        signatures = ((site.steps[-1], _state_shapes(site)) for site in inside)
        alike[steps[:-1], steps[-1][0], steps[-1][1] is None, *signatures].append(steps)
    groups: dict[Steps, NetworkGroup] = {}
    for members in alike.values():
        numbers = tuple(index for steps in members if (index := steps[-1][1]) is not None)
        group = NetworkGroup(members[0], numbers, tuple(site for steps in members for site in networks[steps]))
        groups |= dict.fromkeys(members, group)
    return groups


def site_rows(table: SiteTable) -> list[Row]:
    """Every site, once for all layers that have the same sites. Blanks show how deep it is."""
    return _Tree(table).rows()


def render_sites(table: SiteTable, width: int = 80) -> RenderableType:
    """Every site, once for all layers that have the same sites: `layer[0..11] × 12`."""
    header = Text.assemble((table.model_id, "bold"), f"  ({table.model_type}, {table.parameters:,} parameters)")
    rows = site_rows(table)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("site", "module", "shape"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("parameters", justify="right", no_wrap=True)
    grid.add_column("states", no_wrap=True, style="dim")
    site_width, shape_width, module_width, states_width = _widths(rows, width)
    for site, module, shape, parameters, states in rows:
        name = site.lstrip()
        indent = " " * (len(site) - len(name))
        site = indent + _wrap(name, site_width - len(indent), " ").replace("\n", f"\n{indent}")
        shape = _wrap(shape, shape_width, " ")
        module, states = _wrap(module, module_width, "."), _wrap(states, states_width, " ")
        grid.add_row(*map(Text, (site, module, shape, parameters, states)))
    # a line for each shared module that is in no other shared module
    names = {name for group in table.shared_modules for name in group}
    outer = [group for group in table.shared_modules if not any(group[0].startswith(f"{name}.") for name in names)]
    lines = [Text(), *(Text(f"one module: {', '.join(group)}") for group in outer)] if outer else []
    return Group(header, Text(), grid, *lines)


def _widths(rows: Sequence[Row], width: int) -> tuple[int, int, int, int]:
    """Of the columns site, shape, module and states. Numbers are never cut."""
    site, module, shape, parameters, states = (max((len(row[i]) for row in rows), default=0) for i in range(5))
    site, others = min(site, MAX_SITE), max(parameters, len("parameters")) + 8
    if site + shape + others + 2 * MIN_STATES > width:
        site = min(site, NARROW_SITE)
        words = (len(word) for row in rows for word in row[2].split(" × "))
        shape = max(len("shape"), *(n + 2 for n in words))  # a line for each size
    rest = width - site - shape - others
    module = max(MIN_STATES, min(module, rest - min(states, MIN_STATES)))
    return site, shape, module, max(MIN_STATES, rest - module)


def _wrap(text: str, width: int, separator: str) -> str:
    """Lines of at most `width` characters, broken after a separator if there is one."""
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
        self.sizes = {m.name: sum(prod(shape) for shape in m.parameters.values()) for m in table.modules}

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        seen: set[Steps] = set()
        layers = self._layers()
        stacks = list(dict.fromkeys(map(_stack, self.table.sites)))
        for site in sorted(self.table.sites, key=lambda site: stacks.index(_stack(site))):
            stack = _stack(site)
            if stack and stack not in seen:
                seen.add(stack)
                rows.append((show_steps(stack), "", "", "", ""))
            if _in_layer(site):
                rows += layers.pop(_layer(site), [])
            else:
                indent = "  " if stack else ""
                rows.append(self._row(f"{indent}{show_steps(site.steps[len(stack) :])}", site, site.module))
        return rows

    def _layers(self) -> dict[Steps, list[Row]]:
        """The rows of each group of layers with the same sites, by the group's first layer."""
        sites: dict[Steps, list[Site]] = defaultdict(list)
        for site in self.table.sites:
            if _in_layer(site):
                sites[_layer(site)].append(site)
        groups: dict[object, list[Steps]] = defaultdict(list)
        for steps, inside in sites.items():
            own = inside[0].parts or (inside[0].root,)
            parts = ((s.steps[len(steps) :], _module_in(own, s.module), _state_shapes(s), s.runs) for s in inside)
            groups[steps[:-1], *parts].append(steps)
        return {group[0]: self._layer_rows(group, sites[group[0]]) for group in groups.values()}

    def _layer_rows(self, group: Sequence[Steps], sites: Sequence[Site]) -> list[Row]:
        rows: list[Row] = []
        depth = len(group[0])
        networks, seen = network_groups(sites, depth), set[NetworkGroup]()
        for site in sites:
            steps = site.steps[depth:]
            if network := networks.get(steps[:-1]):
                if network.steps != steps[:-1]:
                    continue  # the sites of the first stand for all
                if network not in seen:
                    seen.add(network)
                    rows.append(self._network_row(network, sites))
            if steps:
                tail = steps[-2:] if len(steps) > 1 and steps[-1][0] in BRANCHES else steps[-1:]
                rows.append(self._row(f"{_indent(steps)}{show_steps(tail)}", site, _relative_module(site, sites)))
            else:
                rows.append(self._layer_row(group, site))
        return rows

    def _layer_row(self, group: Sequence[Steps], site: Site) -> Row:
        name = f"  layer[{index_ranges([index for steps in group if (index := steps[-1][1]) is not None])}]"
        name += f" × {len(group)}" if len(group) > 1 else ""
        name += f" run {site.runs} times" if site.runs > 1 else ""
        module = re.sub(r"\.\d+$", ".*", site.module) if len(group) > 1 else site.module
        own = tuple(f"{part}." for part in site.parts or (site.module,))
        below = (n for name, n in self.sizes.items() if f"{name}.".startswith(own))
        return name, module, _shape(site), f"{sum(below):,}", _states(site)

    def _network_row(self, network: NetworkGroup, layer: Sequence[Site]) -> Row:
        """`experts[0..7] × 8`, above the sites of the first; the parameters are those of all."""
        total = sum(self._parameters(site) for site in network.sites)
        one_module = len({site.module for site in network.sites}) == 1
        module = _relative_module(network.sites[0], layer) if one_module else ""
        return f"{_indent(network.steps)}{network.name}", module, "", f"{total:,}" if total else "", ""

    def _row(self, name: str, site: Site, module: str) -> Row:
        total = self._parameters(site)
        return name, module, _shape(site), f"{total:,}" if total else "", _states(site)

    def _parameters(self, site: Site) -> int:
        """The parameters of the site and of those below it."""
        below = (other for other in self.table.sites if other.steps[: len(site.steps)] == site.steps)
        inside = (other for other in below if not site.root or f"{other.root}.".startswith(f"{site.root}."))
        refs = {(ref, state.shape) for other in inside for state in other.states.values() if (ref := state.weight)}
        return sum(prod(_sizes(shape)) for _, shape in refs)


def _module_in(layer: Sequence[str], module: str) -> tuple[int, str]:
    """A module by its name in one of those that make up a layer."""
    name = next((part for part in layer if f"{module}.".startswith(f"{part}.".lstrip("."))), "")
    return list(layer).index(name) if name in layer else -1, module[len(name) :]


def _state_shapes(site: Site) -> object:
    return tuple((name, state.shape) for name, state in site.states.items())


def _indent(steps: Steps) -> str:
    return "  " * (1 + sum(name not in BRANCHES for name, _ in steps))


def _states(site: Site) -> str:
    return " ".join(sorted(site.states, key=lambda name: (*STATE_ORDER, name).index(name)))


def _in_layer(site: Site) -> bool:
    return any(name == "layer" for name, _ in site.steps[1:])


def _stack(site: Site) -> Steps:
    return site.steps[: stack_steps([name for name, _ in site.steps])]


def _layer(site: Site) -> Steps:
    return site.steps[: len(_stack(site)) + 1]


def _relative_module(site: Site, layer: Sequence[Site]) -> str:
    """The site's module, relative to that of the site above it; empty for the layer itself."""
    above = [other.module for other in layer if other is not site and site.steps[: len(other.steps)] == other.steps]
    parents = [name for name in above if site.module.startswith(name + ".")]
    return "" if site.module == site.root else site.module[len(max(parents, key=len, default="")) + bool(parents) :]


def _shape(site: Site) -> str:
    """`4096 × 1024` of a weight (out × in), `16 × 64` of heads, `1024` of a hidden state."""
    state = site.states.get("w") or site.states.get("h")
    sizes = _sizes(state.shape) if state else ()
    return " × ".join(str(size) for size in sizes if isinstance(size, int))


def _sizes(shape: Shape) -> list[Any]:
    return [getattr(shape, one.name) for one in fields(shape)]
