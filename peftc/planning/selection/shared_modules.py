"""Merges the sites of one shared module, since an edit of one of them acts at all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from peftc.addressing.paths import stack_steps
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.messages import MAX_NAMES, first_names, for_sites
from peftc.syntax import ast

ALSO_THERE = "an edit here also acts there"
SiteKey = tuple[str, tuple[object, ...]]  # a module, and what of the module


class SharedModules:
    """Modules that are registered under several names."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.groups = {name: group for group in table.shared_modules for name in group}

    @cached_property
    def sites(self) -> Mapping[SiteKey, Site]:
        return {(site.module, _role(site)): site for site in reversed(self.table.sites) if site.module in self.groups}

    def merge(self, sites: Sequence[Site], selector: ast.Selector) -> list[Site]:
        """The sites with each module once: at its first name, with the others as `shared_with`.

        Raises: P211: a module is also used at sites that are not among these.
        """
        self._refuse_cross_layer_calls(sites, selector)
        if not any(site.module in self.groups for site in sites):
            return list(sites)
        selected = {(site.module, _role(site)): site for site in sites}
        errors = [error for site in sites if (error := self._incomplete(site, selected, selector)) is not None]
        if errors:
            raise PeftcError(for_sites(errors))
        merged: list[Site] = []
        for site in sites:
            first, *names = self.groups.get(site.module, (site.module,))
            if site.module == first:  # else it is one of the others of the first
                others = tuple(selected[name, _role(site)] for name in names)
                runs = site.runs + sum(other.runs for other in others)
                merged.append(replace(site, shared_with=others, runs=runs) if others else site)
        return merged

    def _refuse_cross_layer_calls(self, sites: Sequence[Site], selector: ast.Selector) -> None:
        """Raises: P211 if another layer calls the module of a site without registering it."""
        calls = dict(self.table.cross_layer_calls)
        for site in sites:
            if (layer := calls.get(site.module)) is not None and site.module not in self.groups:
                message = f"`{site.module}` of `{site.path}` is called by `{layer}`, too"
                help_ = "register the module in both layers: one set of parameters then acts at each"
                raise PeftcError(Diagnostic("P211", message, selector.span, label=ALSO_THERE, help=help_))

    def _incomplete(self, site: Site, selected: Mapping[SiteKey, Site], selector: ast.Selector) -> Diagnostic | None:
        """P211 if not all sites of a module are selected."""
        role = _role(site)
        missing = [name for name in self.groups.get(site.module, ()) if (name, role) not in selected]
        if not missing:
            return None
        paths = [other.path if (other := self.sites.get((name, role))) else f'"{name}"' for name in missing]
        message = f"`{site.path}` is one module with {first_names(paths)}"
        note = f"`{site.module}` is also {first_names(missing)}"
        help_ = "name all of them: one set of parameters acts at each"
        if len(paths) <= MAX_NAMES:
            help_ += f", `at {' | '.join((site.path, *paths))}`"
        return Diagnostic("P211", message, selector.span, label=ALSO_THERE, notes=(note,), help=help_)


def _role(site: Site) -> tuple[object, ...]:
    """What of its module a site is: part of the weight, or something that the module computes."""
    refs = (state.weight for state in site.states.values() if state.weight is not None)
    parts = sorted({(str(ref.rows), str(ref.stacked_slice)) for ref in refs if ref.module == site.module})
    below = site.steps[stack_steps([name for name, _ in site.steps]) + 1 :]
    if parts:
        return ("weight", *parts, below if site.calls > 1 else ())
    return ("module",) if site.steps[-1][0].startswith('"') else ("part", below)
