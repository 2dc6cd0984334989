"""The sets of parameters that one edit has at one site, what they share with other sites, and their
counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from peftc.addressing.sites import Site
from peftc.forms import Args, Count, Dims, Form
from peftc.planning.ir import FormInstance, SiteEdit
from peftc.planning.lowering_context import LoweringContext, features_of, path_spot


@dataclass
class FormInstances:
    """Creates form instances, with keys `adapter`, `adapter_2` in the order of the equations."""

    edit: str
    site: Site
    context: LoweringContext
    tasks: tuple[str, ...] = ()
    instances: list[FormInstance] = field(default_factory=list[FormInstance])
    keys: Counter[str] = field(default_factory=Counter[str])
    shared: dict[str, FormInstance] = field(default_factory=dict[str, FormInstance])

    def create(self, form: Form, args: Args, dims: Dims, target: str, owner: str | None) -> FormInstance:
        """Parameters for the state `target`; those of `owner`, a `shared`, if they exist here."""
        if owner is not None and owner in self.shared:
            return self.shared[owner]
        self.keys[form.name] += 1
        number = self.keys[form.name]
        key = form.name if number == 1 else f"{form.name}_{number}"
        unshared = FormInstance(key, form, args, replace(dims, runs=self.site.runs), tasks=self.tasks)
        instance = self._with_owner(unshared, target, owner)
        if owner is not None:
            self.shared[owner] = instance
        self.instances.append(instance)
        return instance

    def _with_owner(self, instance: FormInstance, target: str, shared: str | None) -> FormInstance:
        common = instance.form.common(instance.args)
        if shared is None and common is None:
            return instance
        if shared is None and common == "group":
            return self._group_member(instance, target)
        owner = shared or f"{self.edit}.{instance.key}"
        sharers = self.context.sharers.get(owner, ())
        places = [(sharer.edit, sharer.path) for sharer in sharers]
        instance = replace(instance, owner=owner)
        if common is None or (self.edit, self.site.path) not in places:
            return instance
        index = places.index((self.edit, self.site.path))
        dims = replace(
            instance.dims,
            sites=len(sharers),
            widest=(max(s.features[0] for s in sharers), max(s.features[1] for s in sharers)),
            spread=(sum(s.entries for s in sharers[:index]), sum(s.entries for s in sharers)),
            spots=tuple(map(self.context.spot, sharers)),
            index=index,
        )
        return replace(instance, dims=dims, index=index)

    def _group_member(self, instance: FormInstance, target: str) -> FormInstance:
        group, paths = self.context.group_of(self.edit, self.site, target)
        features, index = features_of(instance.dims), list(paths).index(self.site.path)
        spots = tuple(path_spot(path, *features) for path in paths)
        dims = replace(instance.dims, sites=len(paths), spots=spots, index=index, depth=self.context.depth(self.site))
        return replace(instance, owner=f"{self.edit}.{instance.key}.{group}", dims=dims, index=index)


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
