"""The sets of parameters that one edit has at one site, and which of them it shares with other sites."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from peftc.forms import Args, Dims, Form
from peftc.planning.ir import Instance
from peftc.planning.scope import Scope
from peftc.tracing.sites import Site


@dataclass
class Instances:
    """Names them `adapter`, `adapter_2` in the order of the equations."""

    edit: str
    site: Site
    scope: Scope
    made: list[Instance] = field(default_factory=list[Instance])
    keys: Counter[str] = field(default_factory=Counter[str])
    shared: dict[str, Instance] = field(default_factory=dict[str, Instance])

    def make(self, form: Form, args: Args, dims: Dims, target: str, owner: str | None) -> Instance:
        """A new set of parameters for the state `target`, or the one that `owner` (the name of a `shared`) has here."""
        if owner is not None and owner in self.shared:
            return self.shared[owner]
        self.keys[form.name] += 1
        number = self.keys[form.name]
        plain = Instance(form.name if number == 1 else f"{form.name}_{number}", form, args, dims)
        instance = self._shared(plain, owner) if owner is not None else self._grouped(plain, target)
        self.made.append(instance)
        return instance

    def _shared(self, plain: Instance, owner: str) -> Instance:
        """Parameters of a `shared`: the same everywhere, unless the form makes different ones for its sites."""
        members = self.scope.shared_by.get(owner, ())
        here = (self.edit, self.site.path)
        made = replace(plain, owner=owner)
        if plain.form.grouped(plain.args) and here in members:
            dims = replace(plain.dims, sites=len(members))
            made = replace(made, dims=dims, index=members.index(here))
        self.shared[owner] = made
        return made

    def _grouped(self, plain: Instance, target: str) -> Instance:
        """One set for the attention group of the site, where the form asks for it."""
        if not plain.form.grouped(plain.args):
            return plain
        group, sites = self.scope.group_of(self.edit, self.site, target)
        dims = replace(plain.dims, sites=len(sites))
        owner = f"{self.edit}.{plain.key}.{group}"
        return replace(plain, owner=owner, dims=dims, index=list(sites).index(self.site.path))
