"""What lowering knows beyond one edit at one site: the model, and sets of parameters."""

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.equations.definition import TextForm
from peftc.equations.table import FORMS
from peftc.forms import Args, Count, Dims, Form
from peftc.forms.form import Spot
from peftc.forms.shapes import Ids, Shape, Tokens, Vector
from peftc.planning.ir import FormInstance, SiteEdit
from peftc.syntax import ast

NamedSize = tuple[str, tuple[int, ...]]
DEFAULT_TASK = "default"  # of edits `per task` where no tasks are named
_LAYER_PATH = re.compile(r"(.*?\blayer\[\d+\])\.?(.*)")


class Sharer(NamedTuple):
    """A site of an edit that shares a set of parameters."""

    edit: str
    path: str
    features: tuple[int, int]  # of its input and of the state that it writes
    entries: int  # from which a method may select, such as those of the weight that it changes
    module: str = ""
    shapes: tuple[Shape | None, ...] = ()  # of the state that it writes, and of its inputs


@dataclass
class LoweringContext:
    """One planning run. `sharers` is known after a first pass over all edits."""

    table: SiteTable
    tasks: tuple[str, ...] = (DEFAULT_TASK,)
    forms: Mapping[str, Form] = field(default_factory=lambda: FORMS)
    shared: Mapping[str, ast.Call] = field(default_factory=dict[str, ast.Call])  # `let NAME = shared(form(…))`
    sharers: Mapping[str, Sequence[Sharer]] = field(default_factory=dict[str, Sequence[Sharer]])  # by owner
    groups: Mapping[str, Mapping[tuple[str, str, Shape], Sequence[str]]] = field(default_factory=dict)  # by edit
    sizes: dict[str, tuple[NamedSize, ...]] = field(default_factory=dict[str, tuple[NamedSize, ...]])
    owners: dict[str, tuple[Form, Shape, Shape | None]] = field(default_factory=dict)
    arguments: dict[str, tuple[object, Args]] = field(default_factory=dict[str, tuple[object, Args]])  # by owner

    @cached_property
    def depths(self) -> Counter[str]:
        """How many layers each stack has; 0 outside layers."""
        layers = {path_spot(site.path, 0, 0).layer for site in self.table.sites}
        return Counter(layer.rpartition("[")[0] for layer in layers if layer)

    @cached_property
    def _layers(self) -> dict[str, str]:
        return {site.module: site.path for site in self.table.sites if site.steps[-1][0] == "layer"}

    def spot(self, sharer: Sharer) -> Spot:
        """A sharer's spot, with the layer that its module is in."""
        prefixes = accumulate(sharer.module.split("."), lambda parent, part: f"{parent}.{part}")
        home = next((self._layers[name] for name in prefixes if name in self._layers), sharer.module)
        return path_spot(sharer.path, *sharer.features)._replace(home=home, shapes=sharer.shapes)

    def check_common_sizes(self, owner: str, sizes: tuple[NamedSize, ...], span: Span) -> None:
        """Raises: P305 if common parameters of an equation need other sizes than at first."""
        first = self.sizes.setdefault(owner, sizes) if sizes else sizes
        if first != sizes:
            pairs = [pair for pair in zip(first, sizes, strict=True) if pair[0] != pair[1]]
            notes = tuple(
                f"`{name}` is {list(before)} first, and {list(here)} here" for (name, before), (_, here) in pairs
            )
            message = "sites of different sizes share parameters of these sizes"
            raise PeftcError(Diagnostic("P305", message, span, notes=notes, help="write an edit for each size"))

    def check_same_arguments(self, edit: str, instance: FormInstance, call: ast.Call) -> None:
        """Raises: P323 if sites with parameters, or a budget, in common have other arguments."""
        form, args = instance.form, instance.args
        limits = form.at(form.fill(args), instance.dims).budget if isinstance(form, TextForm) else None
        if instance.owner is None and limits is None:
            return
        others = form.value_arguments if instance.owner in self.shared else ()  # of each call of a `shared`
        own = {k: v for k, v in args.items() if k not in others} if instance.owner is not None else limits
        first, before = self.arguments.setdefault(instance.owner or f"{edit}.{instance.key}", (own, args))
        if own == first:
            return
        name, keyword = next((k.name, k) for k in call.kwargs if args.get(k.name) != before.get(k.name))
        what = "parameters" if instance.owner is not None else "a budget"
        message = f"`{name}` of `{form.name}` differs by layer, and the sites have {what} in common"
        notes = (f"it is {before[name]} first, and {args[name]} here",)
        help_ = "write one value, or an edit for each value"
        raise PeftcError(Diagnostic("P323", message, keyword.span, notes=notes, help=help_))

    def check_shared_shapes(self, name: str, owner: str, form: Form, dims: Dims, span: Span) -> None:
        """Raises: P305 if shared parameters need another shape than at their first use."""
        first = self.owners.setdefault(owner, (form, dims.target, dims.input))
        if first != (form, dims.target, dims.input):
            message = f"`{name}` is shared by places of different shapes"
            label, note = f"here {_mapping(dims.input, dims.target)}", f"first used with {_mapping(first[2], first[1])}"
            help_ = "let each shape have its own `shared`"
            raise PeftcError(Diagnostic("P305", message, span, label=label, notes=(note,), help=help_))


def path_spot(path: str, d_in: int, d_out: int) -> Spot:
    """`decoder.layer[3].attn.cross` is `attn.cross` of `decoder.layer[3]`."""
    match = _LAYER_PATH.fullmatch(path)
    layer, part = match.groups() if match else ("", path)
    return Spot(layer, part, d_in, d_out)


def _mapping(source: Shape | None, target: Shape) -> str:
    return f"{target}" if source is None else f"{source} to {target}"


def groups_of(sites: Iterable[Site]) -> dict[tuple[str, str, Shape], list[str]]:
    """The paths of an edit's sites by attention group, state and the state's shape."""
    groups: dict[tuple[str, str, Shape], list[str]] = defaultdict(list)
    for site in sites:
        for state in site.states.values():
            groups[site.group, state.name, state.shape].append(site.path)
    return dict(groups)


def sharers_of(site_edits: Iterable[SiteEdit], shared: Container[str]) -> dict[str, list[Sharer]]:
    """The sharers of each owner, in order, except those of attention groups."""
    sharers: dict[str, list[Sharer]] = defaultdict(list)
    for site_edit in site_edits:
        site = site_edit.site
        for instance in site_edit.instances:
            form, args, dims = instance.form, instance.args, instance.dims
            if instance.owner is not None and (instance.owner in shared or form.common(args) == "edit"):
                entries, shapes = form.entries(args, dims), (dims.target, dims.input, dims.second)
                sharer = Sharer(site_edit.edit, site.path, features_of(dims), entries, site.module, shapes)
                sharers[instance.owner].append(sharer)
    return dict(sharers)


def features_of(dims: Dims) -> tuple[int, int]:
    """The features of input and target; 0 for what is neither hidden states nor a bias."""
    d_in, d_out = (s.d if isinstance(s, Tokens | Vector) else 0 for s in (dims.input, dims.target))
    return dims.input.count if isinstance(dims.input, Ids) else d_in, d_out


@dataclass
class FormInstances:
    """Creates form instances, with keys `adapter`, `adapter_2` in the order of the equations."""

    edit: str
    site: Site
    context: LoweringContext
    tasks: tuple[str, ...] = ()
    are_adapters: bool = False
    instances: list[FormInstance] = field(default_factory=list[FormInstance])
    keys: Counter[str] = field(default_factory=Counter[str])

    def create(self, form: Form, args: Args, dims: Dims, target: str, owner: str | None) -> FormInstance:
        """Parameters for the state `target`; those of `owner`, a `shared`, if they exist here."""
        present = (one for one in self.instances if one.owner == owner and one.args == args)
        if owner is not None and (instance := next(present, None)) is not None:
            return instance
        self.keys[form.name] += 1
        number = self.keys[form.name]
        key = form.name if number == 1 else f"{form.name}_{number}"
        runs = self.site.runs * (self.site.calls if self.site.is_of_every_call else 1)
        dims = replace(dims, runs=runs)
        unshared = FormInstance(key, form, args, dims, tasks=self.tasks, are_adapters=self.are_adapters)
        instance = self._with_owner(unshared, target, owner)
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
        """Shares with the edit's sites in the attention group whose state has this shape."""
        groups, key = self.context.groups[self.edit], (self.site.group, target, self.site.states[target].shape)
        shapes, paths = [other for other in groups if other[:2] == key[:2]], list(groups[key])
        group = self.site.group if len(shapes) == 1 else f"{self.site.group}.{shapes.index(key) + 1}"
        features, index = features_of(instance.dims), paths.index(self.site.path)
        spots = tuple(path_spot(path, *features) for path in paths)
        depth = self.context.depths[path_spot(self.site.path, 0, 0).layer.rpartition("[")[0]]
        dims = replace(instance.dims, sites=len(paths), spots=spots, index=index, depth=depth)
        return replace(instance, owner=f"{self.edit}.{instance.key}.{group}", dims=dims, index=index)


def count_parameters(site_edits: Iterable[SiteEdit]) -> Count:
    """Parameters with a gradient, and in the saved adapter. What sites share counts once."""
    counts: dict[object, tuple[int, Count]] = {}
    for site_edit in site_edits:
        for instance in site_edit.instances:
            if instance.has_site_parameters:
                count = instance.form.count(instance.args, instance.dims)
                for task, _ in instance.task_suffixes():
                    key = (site_edit.edit, site_edit.site.path, instance.key, task)
                    counts.setdefault(key, (site_edit.count, count))
            for owner in instance.owners():
                counts.setdefault(owner, (1, instance.common_count(owner)))
    trained = sum(times * count.trained for times, count in counts.values())
    return Count(trained, sum(times * count.stored for times, count in counts.values()))
