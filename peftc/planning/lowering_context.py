"""What lowering knows beyond one edit at one site: the model, `shared` parameters, and who shares a group's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms import Dims, Form
from peftc.forms.registry import Spot
from peftc.forms.shapes import Shape, Tokens, Vector
from peftc.planning.ir import SiteEdit
from peftc.semantics.arguments import BoundArguments, bind
from peftc.syntax import ast


@dataclass(frozen=True)
class Shared:
    """`let NAME = shared(form(…))` outside an edit: one set of parameters wherever NAME is called."""

    let: ast.Let
    call: ast.Call
    uses: dict[int, tuple[ast.Call, ast.Call]] = field(
        default_factory=dict[int, tuple[ast.Call, ast.Call]], compare=False
    )

    def at(self, use: ast.Call) -> ast.Call:
        """The call of the form with the input it has at this use; the same object each time."""
        if id(use) not in self.uses:
            made = replace(self.call, args=use.args, kwargs=(*self.call.kwargs, *use.kwargs), span=use.span)
            self.uses[id(use)] = (use, made)
        return self.uses[id(use)][1]


class Member(NamedTuple):
    """A place of a shared set of parameters: the edit, the path of the site, the features it reads and writes there, and the
    entries of which some may be chosen, such as those of the weight or bias that it changes; the dotted name of its module.
    """

    edit: str
    path: str
    features: tuple[int, int]
    entries: int
    module: str = ""

    @property
    def spot(self) -> Spot:
        return spot(self.path, *self.features)


DEFAULT_TASK = "default"  # the task of edits `per task` where none are named


@dataclass
class LoweringContext:
    """One planning run. Bound arguments are kept, so that an equation is bound once and not at every site.

    `shared_by` lists the places of every shared set of parameters; it is complete after a first pass over all edits.
    """

    table: SiteTable
    tasks: tuple[str, ...] = (DEFAULT_TASK,)
    shared: Mapping[str, Shared] = field(default_factory=dict[str, Shared])
    shared_by: Mapping[str, Sequence[Member]] = field(default_factory=dict[str, Sequence[Member]])
    groups: Mapping[str, Mapping[tuple[str, str, Shape], Sequence[str]]] = field(default_factory=dict)
    bindings: dict[tuple[int, int], tuple[ast.Call, BoundArguments]] = field(default_factory=dict)
    owners: dict[str, tuple[Form, Shape, Shape | None]] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict[str, int])
    layers: dict[str, str] = field(default_factory=dict[str, str])  # their paths, by module

    def bound(self, call: ast.Call, form: Form) -> BoundArguments:
        key = (id(call), id(form))
        if key not in self.bindings:  # the call is kept too, so that its id stays its own
            self.bindings[key] = (call, bind(call, form))
        return self.bindings[key][1]

    def weight_of(self, module: str) -> tuple[int, ...]:
        """The stored size of a module's weight; empty where it has none."""
        info = next((one for one in self.table.modules if one.name == module), None)
        return info.parameters.get("weight", ()) if info else ()

    def group_of(self, edit: str, site: Site, state: str) -> tuple[str, Sequence[str]]:
        """The name of the attention group, and the sites of the edit in it whose state has the same shape."""
        shape = site.states[state].shape
        alike = {key: paths for key, paths in self.groups[edit].items() if key[:2] == (site.group, state)}
        name = site.group if len(alike) == 1 else f"{site.group}.{list(alike).index((site.group, state, shape)) + 1}"
        return name, alike[site.group, state, shape]

    def depth(self, site: Site) -> int:
        """How many layers there are in the stack of a site; 0 outside of layers."""
        stack = spot(site.path, 0, 0).layer.rpartition("[")[0]
        if stack not in self.depths:
            layers = (spot(other.path, 0, 0).layer for other in self.table.sites)
            self.depths[stack] = len({layer for layer in layers if stack and layer.rpartition("[")[0] == stack})
        return self.depths[stack]

    def spot(self, member: Member) -> Spot:
        """The place of a member, with the layer that its module is in."""
        if not self.layers:
            self.layers |= {site.module: site.path for site in self.table.sites if site.steps[-1][0] == "layer"}
        names = accumulate(member.module.split("."), lambda above, part: f"{above}.{part}")
        home = next((self.layers[name] for name in names if name in self.layers), member.module)
        return member.spot._replace(home=home)

    def agree(self, name: str, place: str, form: Form, dims: Dims, span: ast.Expr) -> None:
        """Raises: P305 where a shared set of parameters would need another shape than where it was used first in `place`."""
        found = (form, dims.target, dims.input)
        first = self.owners.setdefault(place, found)
        if first != found:
            before, now = ((shapes[2], shapes[1]) for shapes in (first, found))
            raise PeftcError(
                Diagnostic(
                    "P305",
                    f"`{name}` is shared by places of different shapes",
                    span.span,
                    label=f"here {_mapping(*now)}",
                    notes=(f"first used with {_mapping(*before)}",),
                    help="let each shape have its own `shared`",
                )
            )


LAYER = re.compile(r"(.*?\blayer\[\d+\])\.?(.*)")


def spot(path: str, d_in: int, d_out: int) -> Spot:
    """`decoder.layer[3].attn.cross` is `attn.cross` of `decoder.layer[3]`."""
    layer, part = found.groups() if (found := LAYER.fullmatch(path)) else ("", path)
    return Spot(layer, part, d_in, d_out)


def _mapping(source: Shape | None, target: Shape) -> str:
    return f"{target}" if source is None else f"{source} to {target}"


def groups_of(sites: Iterable[Site]) -> dict[tuple[str, str, Shape], list[str]]:
    """The sites of an edit by attention group, state and its shape."""
    found: dict[tuple[str, str, Shape], list[str]] = defaultdict(list)
    for site in sites:
        for state in site.states.values():
            found[site.group, state.name, state.shape].append(site.path)
    return dict(found)


def shared_members(places: Iterable[SiteEdit], lets: Container[str]) -> dict[str, list[Member]]:
    """The places, in order, of each set of parameters that a `shared` or the sites of an edit have in common; from a first
    pass. An attention group is known without one.
    """
    found: dict[str, list[Member]] = defaultdict(list)
    for placed in places:
        for one in placed.instances:
            if one.owner is not None and (one.owner in lets or one.form.common(one.args) == "edit"):
                features = (width_of(one.dims.input), width_of(one.dims.target))
                found[one.owner].append(
                    Member(
                        placed.edit,
                        placed.site.path,
                        features,
                        one.form.entries(one.args, one.dims),
                        placed.site.module,
                    )
                )
    return dict(found)


def width_of(shape: Shape | None) -> int:
    """The features of hidden states or of a bias; 0 for anything else."""
    return shape.d if isinstance(shape, Tokens | Vector) else 0
