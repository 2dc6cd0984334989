"""The four numbers of an edit: trained, stored, changed, served. Never mixed; nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms import Count
from peftc.planning.ir import Instance, Placed


def owned(places: Iterable[Placed]) -> dict[object, Instance]:
    """Every set of parameters once: by its owner where several sites share it."""
    found: dict[object, Instance] = {}
    for placed in places:
        for instance in placed.instances:
            found.setdefault(instance.owner or (placed.edit, placed.site.path, instance.key), instance)
    return found


def count(instances: Iterable[Instance]) -> Count:
    """Parameters with a gradient while training, and in the saved adapter."""
    found = [instance.form.count(instance.args, instance.dims) for instance in instances]
    return Count(sum(one.trained for one in found), sum(one.stored for one in found))


def percent(value: int, base: int) -> str:
    """`6.747 %` of the base, cut and not rounded, so that a budget that is met never looks exceeded."""
    thousandths = 100_000 * value // base if base else 0
    return f"{thousandths // 1000}.{thousandths % 1000:03} %"
