"""The four counts of an edit: trained, stored, changed, served. Nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms import Count
from peftc.planning.ir import SiteEdit


def count_parameters(site_edits: Iterable[SiteEdit]) -> Count:
    """Parameters with a gradient, and in the saved adapter. What sites share counts once."""
    counts: dict[object, Count] = {}
    for site_edit in site_edits:
        for instance in site_edit.instances:
            if instance.has_site_parameters:
                count = instance.form.count(instance.args, instance.dims)
                for task, _ in instance.task_suffixes():
                    counts.setdefault((site_edit.edit, site_edit.site.path, instance.key, task), count)
            for owner in instance.owners():
                counts.setdefault(owner, instance.common_count(owner))
    return Count(sum(count.trained for count in counts.values()), sum(count.stored for count in counts.values()))


def percent(value: int, base: int) -> str:
    """`6.747 %` of the base, rounded down, so that a budget that is met never looks exceeded."""
    thousandths = 100_000 * value // base if base else 0
    return f"{thousandths // 1000}.{thousandths % 1000:03} %"
