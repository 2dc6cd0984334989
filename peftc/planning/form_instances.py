"""The sets of parameters that one edit has at one site, and which of them it shares with other sites."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from peftc.addressing.sites import Site
from peftc.forms import Args, Dims, Form
from peftc.planning.ir import FormInstance
from peftc.planning.lowering_context import LoweringContext, spot, width_of


@dataclass
class Instances:
    """Names them `adapter`, `adapter_2` in the order of the equations."""

    edit: str
    site: Site
    scope: LoweringContext
    tasks: tuple[str, ...] = ()
    made: list[FormInstance] = field(default_factory=list[FormInstance])
    keys: Counter[str] = field(default_factory=Counter[str])
    shared: dict[str, FormInstance] = field(default_factory=dict[str, FormInstance])

    def make(self, form: Form, args: Args, dims: Dims, target: str, owner: str | None) -> FormInstance:
        """A new set of parameters for the state `target`, or the one that `owner` (the name of a `shared`) has here."""
        if owner is not None and owner in self.shared:
            return self.shared[owner]
        self.keys[form.name] += 1
        number = self.keys[form.name]
        dims = replace(dims, runs=self.site.runs)
        plain = FormInstance(form.name if number == 1 else f"{form.name}_{number}", form, args, dims, tasks=self.tasks)
        instance = self._owned(plain, target, owner)
        if owner is not None:
            self.shared[owner] = instance
        self.made.append(instance)
        return instance

    def _owned(self, plain: FormInstance, target: str, shared: str | None) -> FormInstance:
        match plain.form.common(plain.args), shared:
            case None, None:
                return plain
            case "group", None:
                return self._grouped(plain, target)
            case scope, name:
                return self._member(replace(plain, owner=name or f"{self.edit}.{plain.key}"), scope is not None)

    def _member(self, made: FormInstance, numbered: bool) -> FormInstance:
        """Parameters of a `shared`, or of all sites of the edit: the same everywhere, unless the form makes different ones."""
        assert made.owner is not None
        members = self.scope.shared_by.get(made.owner, ())
        places = [(member.edit, member.path) for member in members]
        if not numbered or (self.edit, self.site.path) not in places:
            return made
        widest = (max(m.features[0] for m in members), max(m.features[1] for m in members))
        index = places.index((self.edit, self.site.path))
        spread = (sum(m.entries for m in members[:index]), sum(m.entries for m in members))
        spots = tuple(map(self.scope.spot, members))
        dims = replace(made.dims, sites=len(members), widest=widest, spread=spread, spots=spots, index=index)
        return replace(made, dims=dims, index=index)

    def _grouped(self, plain: FormInstance, target: str) -> FormInstance:
        """One set for the attention group of the site."""
        group, sites = self.scope.group_of(self.edit, self.site, target)
        features, index = (width_of(plain.dims.input), width_of(plain.dims.target)), list(sites).index(self.site.path)
        spots = tuple(spot(path, *features) for path in sites)
        depth = self.scope.depth(self.site)
        dims = replace(plain.dims, sites=len(sites), spots=spots, index=index, depth=depth)
        owner = f"{self.edit}.{plain.key}.{group}"
        return replace(plain, owner=owner, dims=dims, index=index)
