"""The sites of a model as JSON data: one entry for those that differ in numbers alone."""

from __future__ import annotations

from typing import Any

from peftc.addressing.selection import Selection
from peftc.addressing.site_list import SiteList, site_list
from peftc.addressing.sites import Site, SiteTable
from peftc.planning.report.plan_sites import PlanSiteRange
from peftc.planning.report.site_ranges import ranges_of
from peftc.planning.representatives import Representatives

FORMAT = "2.0"


def sites_data(table: SiteTable, selection: Selection | None = None) -> dict[str, Any]:
    """The data that `peftc sites --json` prints. `selection`: of these sites; by default of all."""
    return {
        "format_version": FORMAT,
        "model": {
            "id": table.model_id,
            "type": table.model_type,
            "parameters": table.parameters,
            "fingerprint": table.fingerprint,
            "fingerprint_version": table.fingerprint_version,
        },
        "sites": [{**entry.model_dump(), "states": states} for entry, states in entries_of(table, selection)],
        "untraced": [{"module": one.module, "type": one.type, "reason": one.reason} for one in table.untraced],
        "warnings": list(table.warnings),
    }


def entries_of(table: SiteTable, selection: Selection | None = None) -> list[tuple[PlanSiteRange, dict[str, str]]]:
    """The ranges of sites with equal states, in the order of their first sites."""
    sites = site_list(table)
    blocks = [(number, block.template.items) for number, block in enumerate(sites.blocks)]
    items = {(number, i): frozenset(item.all_numbers) for number, own in blocks for i, item in enumerate(own)}
    every = Selection(sites, items, {}) if selection is None else selection
    representatives = Representatives(table, [every])
    groups: dict[tuple[tuple[str, str], ...], list[Site]] = {}
    for site in representatives.of(every):
        groups.setdefault(tuple((name, str(state.shape)) for name, state in site.states.items()), []).append(site)
    ranges = ((one, dict(states)) for states, group in groups.items() for one in ranges_of(representatives, group))
    return sorted(ranges, key=lambda pair: _order(pair[0], sites))


def _order(entry: PlanSiteRange, sites: SiteList) -> int:
    """The index of the first site of a range."""
    place = sites.find(entry.first_path)
    return -1 if place is None else sites.order(place)
