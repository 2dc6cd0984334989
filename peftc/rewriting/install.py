"""Puts rewritten regions into a model, in place, all or nothing; and takes them out again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule, build, build_of_all, build_owner, member, seeded
from peftc.forms.sequence_module import Sequence
from peftc.forms.tasked_module import Chosen, Tasked
from peftc.planning import ir
from peftc.rewriting.anchors import contains, relative
from peftc.rewriting.container import CONTAINER, Container
from peftc.rewriting.edits import Region, RegionEdit, module_name
from peftc.rewriting.insert import layout
from peftc.rewriting.kind import Kind
from peftc.rewriting.positions import SEQUENCE, picks, position_regions
from peftc.rewriting.prompts import is_prompt, prompt_regions
from peftc.rewriting.record import RECORD, Installation, acting, installed
from peftc.rewriting.regions import LayerRegions, module_region
from peftc.rewriting.warm import prepare
from peftc.runtime import dense, is_quantised, rows_of, slab_of
from peftc.tracing.kinds import Anatomy
from peftc.tracing.sites import WeightRef

SHARED = "peftc_shared"  # the name under which modules that several sites share are registered, at the model's root


def regions_of(placed: Iterable[ir.Placed], anatomy: Anatomy) -> list[Region]:
    """The regions that the edits touch, in model order."""
    layers = {n: k for s in anatomy.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
    by_root: dict[str, list[ir.Placed]] = {}
    found: list[Region] = []
    placed = tuple(placed)
    found += position_regions(placed, anatomy)
    for p in placed:
        if is_prompt(p):
            found += prompt_regions(p, anatomy)
            continue
        inside = next((n for n in layers if contains(n, p.site.root)), None)
        called = inside is not None and layers[inside].calls(relative(p.site.root, inside))
        by_root.setdefault(inside if inside is not None and called else p.site.root, []).append(p)
    memory: dict[Any, Any] = {}
    for root, edits in by_root.items():
        if root in layers:
            found += LayerRegions(layers[root], root, memory).regions(edits)
        else:
            found.append(module_region(edits, anatomy.model.get_submodule(root)))
    return joined(found)


def joined(regions: list[Region]) -> list[Region]:
    """One region a module: a module can be reached by its place in a layer and by its name."""
    found: dict[str, Region] = {}
    for region in regions:
        if region.module in found:
            first = found[region.module]
            first.edits += region.edits
            first.placed += region.placed
            first.inline |= region.inline
            first.serves += region.serves
        else:
            found[region.module] = region
    return list(found.values())


class Surgery:
    """One installation in the making. Nothing of the model changes before `apply`.

    `seeds`: of the initial values, by edit. `kept`: forms that are there already, by the name under which they are saved, or
    the place of those that several sites share; `kinds`: generated classes that are there already. `tasks`: those that
    `per task` makes parameters for.
    """

    def __init__(
        self,
        model: nn.Module,
        seeds: Mapping[str, int],
        kept: Mapping[str, FormModule] | None = None,
        kinds: Iterable[Kind] = (),
        tasks: tuple[str, ...] = (),
    ) -> None:
        self.model, self.seeds, self.kept, self.chosen = model, seeds, kept or {}, Chosen(tasks)
        self.kinds = {key_of(k.base, k.inline, k.edits, k.absent): k for k in kinds}
        self.owners: dict[str, FormModule] = {}
        self.prepared: list[tuple[str, nn.Module, Kind, nn.Module]] = []
        self.places: dict[str, str] = {}
        self.sequences: dict[tuple[str, str], Sequence] = {}  # by edit and site

    def prepare(self, regions: list[Region]) -> None:
        """Makes classes and parameters.

        Raises: P411 for a module with something called `peftc`, P527 for one without weights in a model that has some.
        """
        in_part = len({p.is_meta for p in self.model.parameters()}) > 1
        for region in regions:
            self.sequences |= dict.fromkeys(region.serves, Sequence())
        for region in regions:
            module = self.model.get_submodule(region.module)
            if in_part:
                refuse_half(region.module, module)
            if CONTAINER in vars(module)["_modules"] or hasattr(module, CONTAINER):
                taken = f"`{region.module}` already has something named `{CONTAINER}`"
                raise PeftcError(Diagnostic("P411", taken, help="rename it: edits are registered under this name"))
            kind = self.kind_of(region, module)
            self.prepared.append((region.module, module, kind, self.container(region, module)))

    def kind_of(self, region: Region, module: nn.Module) -> Kind:
        base = type(module)
        absent = absent_in(module) if region.inline else frozenset[str]()
        key = key_of(base, region.inline, region.edits, absent)
        if key not in self.kinds:
            self.kinds[key] = Kind(base, region.inline, tuple(region.edits), base.__name__, absent)
        return self.kinds[key]

    def container(self, region: Region, module: nn.Module) -> nn.Module:
        """The region's own modules: `peftc.<edit>.<site>.<form>`."""
        root = Container()
        if region.serves:
            vars(root)[SEQUENCE] = self.sequences[region.serves[0]]
        for edit, placed in zip(region.edits, region.placed, strict=True):
            for instance in placed.instances:
                path = f"{edit.edit_name}.{edit.slug}.{instance.key}"
                add(root, path, self.form(placed, instance, module))
                name = f"{placed.edit}/{placed.site.path}/{instance.key}"
                if instance.owns:
                    self.places[name] = f"{region.module}.{CONTAINER}.{path}".lstrip(".")
        return root

    def form(self, placed: ir.Placed, instance: ir.Instance, module: nn.Module) -> FormModule:
        name = f"{placed.edit}/{placed.site.path}/{instance.key}"
        if not instance.tasks:
            return self.one_form(name, self.kept.get(name), placed, instance, module, None)
        old = self.kept.get(name)
        kept = dict(old.tasks.items()) if isinstance(old, Tasked) else {}
        forms = {
            task: self.one_form(
                f"{name}{tail}", cast(FormModule | None, kept.get(task)), placed, instance, module, task
            )
            for task, tail in instance.copies()
            if task is not None
        }
        made = Tasked(self.chosen, forms)
        if picks(instance):
            vars(made)[SEQUENCE] = self.sequences[placed.edit, placed.site.path]
        return made

    def one_form(
        self,
        name: str,
        kept: FormModule | None,
        placed: ir.Placed,
        instance: ir.Instance,
        module: nn.Module,
        task: str | None,
    ) -> FormModule:
        """The form of a site, or that of one task there."""
        named = instance.owner_of(task)
        owner = None if named is None else self.common(named, placed, instance, module)
        if owner is not None and not instance.owns:
            self.tell(owner, placed, instance)
            return member(owner, instance.index)
        form = kept or self.made(build, name, placed, instance, module, placed.site.path)
        self.tell(form, placed, instance)
        if owner is not None:
            form.join(owner, instance.index, task)
        return form

    def tell(self, form: FormModule, placed: ir.Placed, instance: ir.Instance) -> None:
        """Lets a form that picks positions know the calls of its stack."""
        if picks(instance):
            vars(form)[SEQUENCE] = self.sequences[placed.edit, placed.site.path]

    def common(self, owner: str, placed: ir.Placed, instance: ir.Instance, module: nn.Module) -> FormModule:
        """What several sites have in common."""
        if owner not in self.owners:
            name = f"{placed.edit}/{owner}/{instance.key}"
            old = self.kept.get(f"{SHARED}.{identifier(owner)}")  # its edit may be gone, and another one be the first
            make = build_of_all if owner == instance.of_all else build_owner
            self.owners[owner] = made = old or self.made(make, name, placed, instance, module, "")
            self.places[name] = f"{SHARED}.{identifier(owner)}"
            if instance.of_all not in (None, owner):
                made.join(self.common(instance.of_all, placed, instance, module), 0)
        return self.owners[owner]

    def made(
        self,
        make: Callable[..., FormModule],
        name: str,
        placed: ir.Placed,
        instance: ir.Instance,
        module: nn.Module,
        place: str,
    ) -> FormModule:
        """A new form with its initial values."""
        dtype, device = options(module, self.model)
        form = make(instance, dtype=dtype, device=device)
        self.initialise(form, name, placed)
        form.fix(place)
        return form

    def initialise(self, form: FormModule, name: str, placed: ir.Placed) -> None:
        """Initial values depend on the seed, the edit, the site and the parameter, and on nothing else."""
        seed = self.seeds[placed.edit]

        def generator(parameter: str) -> torch.Generator:
            return seeded(f"{seed}/{name}.{parameter}")

        weights = {n: s.weight for n, s in placed.site.states.items() if s.weight is not None}
        form.initialise(generator, _Readable(self.model, weights, name))

    def apply(self, record: Callable[[Surgery], Installation]) -> None:
        """Registers the parameters and exchanges the classes."""
        if self.owners:
            shared = nn.Module()
            for owner, module in self.owners.items():
                shared.add_module(identifier(owner), module)
            self.model.add_module(SHARED, shared)
        for _, module, kind, container in self.prepared:
            module.add_module(CONTAINER, container)
            container.train(module.training)
            module.__class__ = kind.cls
        vars(self.model)[RECORD] = record(self)

    def undo(self) -> None:
        """Takes out what `apply` has put in, however far it has come."""
        for _, module, kind, _ in self.prepared:
            restore(module, kind)
        clear(self.model)


def refuse_half(name: str, module: nn.Module) -> None:
    """Raises: P527 for a module without weights; the model has some."""
    meta = [f"{name}.{n}".lstrip(".") for n, p in module.named_parameters() if p.is_meta]
    if meta:
        raise PeftcError(no_values(meta, "other parameters of the model have values: it is loaded in part"))


def key_of(
    base: type[nn.Module], inline: frozenset[str], edits: Iterable[RegionEdit], absent: frozenset[str]
) -> tuple[Any, ...]:
    """What two regions share exactly if they can share a generated class."""
    return (base, inline, absent, *(e.fingerprint for e in edits))


def absent_in(module: nn.Module) -> frozenset[str]:
    """The children, parameters and attributes that other modules of the class may have, and this one has not."""
    held = ((name, vars(m) | vars(m)["_modules"] | vars(m)["_parameters"]) for name, m in module.named_modules())
    return frozenset(f"{name}.{part}".lstrip(".") for name, parts in held for part, v in parts.items() if v is None)


def add(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(root.named_children()):
            root.add_module(parent, Container())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def identifier(name: str) -> str:
    return module_name("".join(c if c.isalnum() else "_" for c in name))


class _Readable(Mapping[str, torch.Tensor]):
    """Weights of the base that initial values may depend on; read where a form asks."""

    def __init__(self, model: nn.Module, weights: Mapping[str, WeightRef], form: str) -> None:
        self.model, self.weights, self.form = model, weights, form

    def __getitem__(self, key: str) -> torch.Tensor:
        found = weight_view(self.model, self.weights[key]).detach()
        if found.is_meta:
            raise PeftcError(no_values([f"{key} of {self.form}"], "the initial values are computed from it"))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def no_values(names: Collection[str], why: str) -> Diagnostic:
    """P527: tensors of the base that are needed and only have shapes."""
    said = f"`{next(iter(names))}` and {len(names) - 1} more have" if len(names) > 1 else f"`{next(iter(names))}` has"
    help_ = "load the weights of the model first; planning needs none"
    return Diagnostic("P527", f"{said} no values, only a shape", notes=(why,), help=help_)


def refuse_quantised(parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Raises: P542 for those of these names that are stored in few bits: no step of training can change them."""
    for name in names:
        if is_quantised(parameters[name]) or not parameters[name].is_floating_point():
            kind = type(parameters[name].data).__name__ if is_quantised(parameters[name]) else parameters[name].dtype
            help_ = "change it by an edit, such as `h += lora(x, r=8)`, and leave it as it is"
            raise PeftcError(Diagnostic("P542", f"`{name}` is quantised ({kind}) and cannot be trained", help=help_))


def options(module: nn.Module, model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of a module's floating parameters, or of the model's where it has none."""
    first = next(chain(module.parameters(), model.parameters()), None)
    floating = (p for p in chain(module.parameters(), model.parameters()) if p.is_floating_point())
    dtype = next((p.dtype for p in floating), None)
    if dtype is None or first is None:
        return torch.float32, torch.device("cpu")
    return dtype, first.device


def weight_view(model: nn.Module, ref: WeightRef) -> torch.Tensor:
    """A parameter as nn.Linear stores it: (out, in), the rows of the site alone."""
    return view_of(dense(getattr(model.get_submodule(ref.module), ref.attribute)), ref)


def view_of(tensor: torch.Tensor, ref: WeightRef) -> torch.Tensor:
    """The same of a tensor that is stored as that parameter, such as its gradient."""
    if ref.slab is not None:
        tensor = slab_of(tensor, ref.slab.count, ref.slab.index)
    tensor = tensor.t() if ref.transposed else tensor
    if ref.rows is None:
        return tensor
    one = ref.rows.count == 1
    return tensor[ref.rows.start : ref.rows.stop] if one else rows_of(tensor, 0, *layout(ref.rows, tensor.shape[0]))


def restore(module: nn.Module, kind: Kind) -> None:
    if type(module) is kind.cls:
        module.__class__ = kind.base
    vars(module)["_modules"].pop(CONTAINER, None)


def clear(model: nn.Module) -> None:
    vars(model)["_modules"].pop(SHARED, None)
    vars(model).pop(RECORD, None)


def strip(model: nn.Module, requires_grad: Mapping[str, bool]) -> nn.Module:
    """The model without edits: its own classes, nothing added; all values stay, those that `train` changed too."""
    for name, kind in installed(model).regions:
        module = model.get_submodule(name)
        vars(module)["_modules"].pop(CONTAINER, None)
        module.__class__ = kind.base
    clear(model)
    for name, parameter in model.named_parameters():
        flag = requires_grad.get(name, parameter.requires_grad)
        parameter.requires_grad_(flag)
        if not flag:
            parameter.grad = None
    return model


def uninstall(model: nn.Module) -> nn.Module:
    """Restores classes, parameters and `requires_grad` as they were."""
    record = acting(model)
    strip(model, record.requires_grad)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in record.originals.items():
            put_back(parameters[name], value)
    return model


def put_back(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter its value of before; an embedding may have got more rows since, or lost some."""
    rows = slice(min(len(value), len(parameter))) if value.ndim else ...
    parameter[rows].copy_(value[rows])


def warm(model: nn.Module, sample: Mapping[str, Any] | None = None) -> None:
    """Makes the variants of ordinary calls ahead of time."""
    if any(kind.inline for _, kind in installed(model).regions):
        prepare(model, sample)
