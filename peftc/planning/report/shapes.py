"""The shapes of an edit in words: what each of its forms reads and writes."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.planning.ir import FormInstance, SiteEdit


def mappings(places: Iterable[SiteEdit]) -> list[str]:
    """`adapter: […, 1024] -> […, 1024]`, each once, in the order of the sites."""
    return list(dict.fromkeys(_mapping(instance) for placed in places for instance in placed.instances))


def _mapping(instance: FormInstance) -> str:
    dims = instance.dims
    source = "" if dims.input is None else f"{dims.input} -> "
    result = instance.form.shape(instance.args, dims)
    shared = f", shared by {dims.sites} sites" if instance.owner is not None and dims.sites > 1 else ""
    return f"{instance.form.name}: {source}{result}{shared}"
