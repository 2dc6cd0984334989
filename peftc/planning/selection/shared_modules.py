"""Sites of one module: layers may have a part in common, and what is done to it in one of them is done in all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from peftc.addressing.paths import stack_steps
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.syntax import ast

Key = tuple[object, ...]
SHOWN = 4  # paths in a message, at most


class Sharing:
    """Which sites of a model are one module."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.groups = {name: group for group in table.shared_modules for name in group}

    @cached_property
    def sites(self) -> Mapping[tuple[str, Key], Site]:
        """The sites of the table that are parts of shared modules, by module and by what they are of it."""
        return {(site.module, role(site)): site for site in reversed(self.table.sites) if site.module in self.groups}

    def united(self, sites: Sequence[Site], selector: ast.Selector) -> list[Site]:
        """The sites with each module once: the first of its sites, with the others as `also`.

        Raises: P211 where a module is used at sites that are not among these.
        """
        self.refuse_guests(sites, selector)
        if not any(site.module in self.groups for site in sites):
            return list(sites)
        there = {(site.module, role(site)): site for site in sites}
        wrong = [said for site in sites if (said := self.partial(site, there, selector)) is not None]
        if wrong:
            more = (f"the same at {len(wrong) - 1} more site{'s' * (len(wrong) > 2)}",) if len(wrong) > 1 else ()
            raise PeftcError(replace(wrong[0], notes=(*wrong[0].notes, *more)))
        return [one for site in sites if (one := self.one(site, there)) is not None]

    def refuse_guests(self, sites: Sequence[Site], selector: ast.Selector) -> None:
        """Raises: P211 where code of another layer calls the module of a site through a reference of its own."""
        guests = dict(self.table.cross_layer_calls)
        for site in sites if guests else ():
            if (layer := guests.get(site.module)) is not None and site.module not in self.groups:
                message = f"`{site.module}` of `{site.path}` is called by `{layer}`, too"
                help_ = "register the module in both layers: one set of parameters then acts at each"
                raise PeftcError(
                    Diagnostic("P211", message, selector.span, label="what is done here is done there, too", help=help_)
                )

    def one(self, site: Site, there: Mapping[tuple[str, Key], Site]) -> Site | None:
        """The site with the others of its module; None where it is one of these others."""
        names = self.groups.get(site.module, (site.module,))
        if len(names) == 1 or site.module != names[0]:
            return site if len(names) == 1 else None
        others = tuple(there[name, role(site)] for name in names[1:])
        return replace(site, shared_with=others, runs=site.runs + sum(other.runs for other in others))

    def partial(self, site: Site, there: Mapping[tuple[str, Key], Site], selector: ast.Selector) -> Diagnostic | None:
        """P211 for a site whose module has others that are not named."""
        key = role(site)
        missing = [name for name in self.groups.get(site.module, ()) if (name, key) not in there]
        if not missing:
            return None
        paths = [found.path if (found := self.sites.get((name, key))) else f'"{name}"' for name in missing]
        every = " | ".join((site.path, *paths)) if len(paths) <= SHOWN else None
        return Diagnostic(
            "P211",
            f"`{site.path}` is one module with {shown(paths)}",
            selector.span,
            label="what is done here is done there, too",
            notes=(f"`{site.module}` is also {shown(missing)}",),
            help="name all of them: one set of parameters acts at each" + (f", `at {every}`" if every else ""),
        )


def shown(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return (
        join_names(names)
        if len(names) <= SHOWN
        else f"{', '.join(f'`{n}`' for n in names[:SHOWN])} and {len(names) - SHOWN} more"
    )


def role(site: Site) -> Key:
    """What a site is of its module: a part of its weight, or something else that it computes."""
    refs = (state.weight for state in site.states.values() if state.weight is not None)
    own = sorted({(str(ref.rows), str(ref.stacked_slice)) for ref in refs if ref.module == site.module})
    below = site.steps[stack_steps([name for name, _ in site.steps]) + 1 :]
    if own:
        return ("weight", *own, below if site.calls > 1 else ())
    return ("module",) if site.steps[-1][0].startswith('"') else ("part", below)


def uses(site: Site) -> Iterator[Site]:
    """A site and the others of the same module."""
    yield site
    yield from site.shared_with
