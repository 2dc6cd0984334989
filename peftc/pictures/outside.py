"""Edits outside of layers: at embeddings, norms and heads of stacks, and at modules by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from peftc.addressing.site_list import SiteList
from peftc.pictures.changes import Placement, add_changes
from peftc.pictures.graph import Panel
from peftc.pictures.layer import Sketch, Slot

Other = tuple[str, int, Placement]  # path, times, edit


def outside_panel(sites: SiteList, others: Sequence[Other]) -> Iterator[Panel]:
    """A panel for what is edited outside of layers: each place once, with how often it is there."""
    groups: dict[str, dict[str, list[Placement]]] = {}
    times: dict[str, dict[str, int]] = {}
    for path, count, placement in others:
        name = re.sub(r"(?<=[.\[\"])\d+(?=[.\]\"])", "*", path).strip('"')
        groups.setdefault(name, {}).setdefault(path, []).append(placement)
        times.setdefault(name, {})[path] = count
    for name, paths in groups.items():
        sketch = Sketch()
        start = sketch.build.add("stream", "x")
        source = sketch.on_spine(Slot(start))
        box = sketch.build.add("box", name, title=name)
        sketch.arrow(source, box, "spine")
        out = sketch.on_spine(Slot(box))
        sketch.slots |= {((), "x"): source, ((), "h"): out}
        sketch.boxes[()] = box
        end = sketch.build.add("stream", "h")
        sketch.arrow(out, end, "spine")
        add_changes(sketch, next(iter(paths.values())))
        yield Panel(name, sum(times[name].values()), sketch.finish())
