"""The four numbers of an edit: trained, stored, changed, served. Never mixed; nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms import Count
from peftc.planning.ir import SiteEdit


def count(places: Iterable[SiteEdit]) -> Count:
    """Parameters with a gradient while training, and in the saved adapter: what several sites share is counted once."""
    found: dict[object, Count] = {}
    for placed in places:
        for one in placed.instances:
            for task, _ in one.task_suffixes() if one.has_site_parameters else ():
                found.setdefault((placed.edit, placed.site.path, one.key, task), one.form.count(one.args, one.dims))
            for owner in one.owners():
                found.setdefault(owner, one.common_count(owner))
    return Count(sum(one.trained for one in found.values()), sum(one.stored for one in found.values()))


def percent(value: int, base: int) -> str:
    """`6.747 %` of the base, cut and not rounded, so that a budget that is met never looks exceeded."""
    thousandths = 100_000 * value // base if base else 0
    return f"{thousandths // 1000}.{thousandths % 1000:03} %"
