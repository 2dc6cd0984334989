"""The containers of regions that are like an earlier one: copies of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import NamedTuple

from torch import nn

from peftc.forms.module import FormModule
from peftc.planning import ir
from peftc.rewriting.edits import Container, container_of

Initialise = Callable[[FormModule, ir.FormInstance, str], object]  # of a form, by its saved name


class FormCopy(NamedTuple):
    """A function that makes forms of an instance. `draws`: they may have values to be drawn.
    `place`: where they are in the container.
    """

    key: str
    instance: ir.FormInstance
    copy: Callable[[], FormModule]
    draws: bool
    place: str


class FormCopies(NamedTuple):
    """The forms of an edit in a region, and the names of its two containers."""

    edit: str
    slug: str
    forms: tuple[FormCopy, ...]


def container_copy(
    edits: Iterable[tuple[FormCopies, str, Initialise | None]],
    place: str,
    forms: MutableMapping[str, FormModule],
    places: MutableMapping[str, str],
) -> Container:
    """The container of a region: `peftc.<edit>.<site>.<form>`.

    Args: `edits`: the forms of each edit, how their saved names begin, and what draws values, if a
    form has some. `place`: the name of the container. `forms`, `places`: get the new forms and
    their places, by saved name.
    """
    root: dict[str, dict[str, nn.Module]] = {}
    for (edit, slug, copies), start, initialise in edits:
        own: dict[str, nn.Module] = {}
        for key, instance, copy, draws, inside in copies:
            name = start + key
            if (form := forms.get(name)) is None:
                forms[name] = form = copy()
                places[name] = place + inside
                if draws and initialise is not None:
                    initialise(form, instance, name)
            own[key] = form
        if (sites := root.get(edit)) is None:
            sites = root[edit] = {}
        sites[slug] = container_of(own)
    return container_of({edit: container_of(sites) for edit, sites in root.items()})
