"""Puts rewritten regions into a model, in place, all or nothing; and takes them out again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from peftc.addressing.sites import WeightRef
from peftc.concurrency.context import CHOICE, ChoiceVar
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule, build, build_of_all, build_owner, member, seeded
from peftc.forms.sequence_module import Sequence
from peftc.forms.tasked_module import Chosen, Tasked
from peftc.installation.overlay import cover, uncover
from peftc.installation.presence import edited
from peftc.installation.record import RECORD, Installation, installation_of, is_installed
from peftc.modules.instance_forward import code_class, rebind_forward, unpatched_class
from peftc.modules.offload import execution_device, offloaded
from peftc.planning import ir
from peftc.rewriting.container import CONTAINER, SHARED, Container
from peftc.rewriting.edits import Region, RegionEdit, module_name
from peftc.rewriting.insert import layout
from peftc.rewriting.legality.preconditions import check_forwards, no_values, refuse_half
from peftc.rewriting.positions import SEQUENCE, picks
from peftc.runtime.parameters import dense, is_quantised, rows_of, stacked_slice
from peftc.specialization.derived_classes import replace_base
from peftc.specialization.generated_class import GeneratedClass
from peftc.specialization.precompile import precompile


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
        kinds: Iterable[GeneratedClass] = (),
        tasks: tuple[str, ...] = (),
    ) -> None:
        self.model, self.seeds, self.kept = model, seeds, kept or {}
        self.chosen = Chosen(tasks, installation_of(model).choice if is_installed(model) else ChoiceVar())
        self.kinds = {key_of(k.base, k.inline, k.edits, k.absent, k.entered): k for k in kinds}
        self.owners: dict[str, FormModule] = {}
        self.prepared: list[tuple[str, nn.Module, GeneratedClass, nn.Module]] = []
        self.places: dict[str, str] = {}
        self.forms: dict[str, FormModule] = {}  # by the name under which they are saved
        self.sequences: dict[tuple[str, str], Sequence] = {}  # by edit and site

    def prepare(self, regions: list[Region]) -> None:
        """Makes classes and parameters.

        Raises: P411 for a module with something called `peftc`, P527 for one without weights in a model that has some, P424,
        P426 and P427 for one whose code cannot be followed.
        """
        in_part = len({p.is_meta for p in self.model.parameters()}) > 1
        for region in regions:
            self.sequences |= dict.fromkeys(region.serves, Sequence())
        for region in regions:
            module = self.model.get_submodule(region.module)
            check_forwards(region, self.model)
            if in_part:
                refuse_half(region.module, module)
            if CONTAINER in vars(module)["_modules"] or hasattr(module, CONTAINER):
                taken = f"`{region.module}` already has something named `{CONTAINER}`"
                raise PeftcError(Diagnostic("P411", taken, help="rename it: edits are registered under this name"))
            kind = self.kind_of(region, module)
            self.prepared.append((region.module, module, kind, self.container(region, module)))

    def kind_of(self, region: Region, module: nn.Module) -> GeneratedClass:
        base = code_class(module)
        absent = absent_in(module) if region.inline else frozenset[str]()
        entered = tuple(code_class(module.get_submodule(name)) for name in sorted(region.inline) if name)
        key = key_of(base, region.inline, region.edits, absent, entered)
        if key not in self.kinds:
            self.kinds[key] = GeneratedClass(base, region.inline, tuple(region.edits), base.__name__, absent, entered)
        return self.kinds[key]

    def container(self, region: Region, module: nn.Module) -> nn.Module:
        """The region's own modules: `peftc.<edit>.<site>.<form>`."""
        root = Container()
        if region.serves:
            vars(root)[SEQUENCE] = self.sequences[region.serves[0]]
        for edit, placed in zip(region.edits, region.site_edits, strict=True):
            for instance in placed.instances:
                path = f"{edit.edit_name}.{edit.slug}.{instance.key}"
                name = f"{placed.edit}/{placed.owner_path}/{instance.key}"
                if name not in self.forms:
                    self.forms[name] = self.form(placed, instance, module)
                add(root, path, self.forms[name])
                if instance.has_site_parameters and name not in self.places:
                    self.places[name] = f"{region.module}.{CONTAINER}.{path}".lstrip(".")
        return root

    def form(self, placed: ir.SiteEdit, instance: ir.FormInstance, module: nn.Module) -> FormModule:
        name = f"{placed.edit}/{placed.owner_path}/{instance.key}"
        if not instance.tasks:
            return self.one_form(name, self.kept.get(name), placed, instance, module, None)
        old = self.kept.get(name)
        kept = dict(old.tasks.items()) if isinstance(old, Tasked) else {}
        forms = {
            task: self.one_form(
                f"{name}{tail}", cast(FormModule | None, kept.get(task)), placed, instance, module, task
            )
            for task, tail in instance.task_suffixes()
            if task is not None
        }
        made = Tasked(self.chosen, forms)
        if picks(instance):
            vars(made)[SEQUENCE] = self.sequences[placed.edit, placed.owner_path]
        return made

    def one_form(
        self,
        name: str,
        kept: FormModule | None,
        placed: ir.SiteEdit,
        instance: ir.FormInstance,
        module: nn.Module,
        task: str | None,
    ) -> FormModule:
        """The form of a site, or that of one task there."""
        named = instance.owner_of(task)
        owner = None if named is None else self.common(named, placed, instance, module)
        if owner is not None and not instance.has_site_parameters:
            self.tell(owner, placed, instance)
            return member(owner, instance.index)
        form = kept or self.made(build, name, placed, instance, module, placed.owner_path)
        self.tell(form, placed, instance)
        if owner is not None:
            form.join(owner, instance.index, task)
        return form

    def tell(self, form: FormModule, placed: ir.SiteEdit, instance: ir.FormInstance) -> None:
        """Lets a form that picks positions know the calls of its stack."""
        if picks(instance):
            vars(form)[SEQUENCE] = self.sequences[placed.edit, placed.owner_path]

    def common(self, owner: str, placed: ir.SiteEdit, instance: ir.FormInstance, module: nn.Module) -> FormModule:
        """What several sites have in common."""
        if owner not in self.owners:
            name = f"{placed.edit}/{owner}/{instance.key}"
            old = self.kept.get(f"{SHARED}.{identifier(owner)}")  # its edit may be gone, and another one be the first
            make = build_of_all if owner == instance.all_tasks_owner else build_owner
            self.owners[owner] = made = old or self.made(make, name, placed, instance, module, "")
            self.places[name] = f"{SHARED}.{identifier(owner)}"
            if instance.all_tasks_owner not in (None, owner):
                made.join(self.common(instance.all_tasks_owner, placed, instance, module), 0)
        return self.owners[owner]

    def made(
        self,
        make: Callable[..., FormModule],
        name: str,
        placed: ir.SiteEdit,
        instance: ir.FormInstance,
        module: nn.Module,
        place: str,
    ) -> FormModule:
        """A new form with its initial values."""
        dtype, device = self.options(module)
        form = make(instance, dtype=dtype, device=device)
        self.initialise(form, name, placed)
        form.fix(place)
        return form

    def options(self, module: nn.Module) -> tuple[torch.dtype, torch.device]:
        """The dtype and device of a module's floating parameters, or of the model's where it has none."""
        first = next(chain(module.parameters(), self.model.parameters()), None)
        floating = (p for p in chain(module.parameters(), self.model.parameters()) if p.is_floating_point())
        dtype = next((p.dtype for p in floating), None)
        if dtype is None or first is None:
            return torch.float32, torch.device("cpu")
        if not first.is_meta:
            return dtype, first.device
        return dtype, execution_device(module) or self.execution_device or first.device

    @cached_property
    def execution_device(self) -> torch.device | None:
        return execution_device(self.model)

    def initialise(self, form: FormModule, name: str, placed: ir.SiteEdit) -> None:
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
            vars(module)[CHOICE] = self.chosen.variable
            install_class(module, kind)
        vars(self.model)[RECORD] = made = record(self)
        cover(self.model, made)

    def undo(self) -> None:
        """Takes out what `apply` has put in, however far it has come."""
        uncover(self.model)
        for _, module, kind, _ in self.prepared:
            restore(module, kind)
        clear(self.model)


def key_of(
    base: type[nn.Module],
    inline: frozenset[str],
    edits: Iterable[RegionEdit],
    absent: frozenset[str],
    entered: tuple[type[nn.Module], ...],
) -> tuple[Any, ...]:
    """What two regions share exactly if they can share a generated class."""
    return (base, inline, absent, entered, *(e.fingerprint for e in edits))


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


def refuse_quantised(parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Raises: P542 for those of these names that are stored in few bits: no step of training can change them."""
    for name in names:
        if is_quantised(parameters[name]) or not parameters[name].is_floating_point():
            kind = type(parameters[name].data).__name__ if is_quantised(parameters[name]) else parameters[name].dtype
            help_ = "change it by an edit, such as `h += lora(x, r=8)`, and leave it as it is"
            raise PeftcError(Diagnostic("P542", f"`{name}` is quantised ({kind}) and cannot be trained", help=help_))


def weight_view(model: nn.Module, ref: WeightRef) -> torch.Tensor:
    """A parameter as nn.Linear stores it: (out, in), the rows of the site alone."""
    module = model.get_submodule(ref.module)
    stored: torch.Tensor = getattr(module, ref.attribute)
    value = offloaded(module, ref.attribute) if stored.is_meta else None
    return view_of(dense(stored if value is None else value), ref)


def view_of(tensor: torch.Tensor, ref: WeightRef) -> torch.Tensor:
    """The same of a tensor that is stored as that parameter, such as its gradient."""
    if ref.stacked_slice is not None:
        tensor = stacked_slice(tensor, ref.stacked_slice.count, ref.stacked_slice.index)
    tensor = tensor.t() if ref.transposed else tensor
    if ref.rows is None:
        return tensor
    one = ref.rows.count == 1
    return tensor[ref.rows.start : ref.rows.stop] if one else rows_of(tensor, 0, *layout(ref.rows, tensor.shape[0]))


def install_class(module: nn.Module, kind: GeneratedClass) -> None:
    """The edited code in the place of a module's own, also where a hook of the instance calls it."""
    if kind.cls not in type(module).__mro__:
        module.__class__ = replace_base(type(module), unpatched_class(kind.base), kind.cls)
    rebind_forward(module, kind.cls.forward)


def restore(module: nn.Module, kind: GeneratedClass) -> None:
    if kind.cls in type(module).__mro__:
        module.__class__ = replace_base(type(module), kind.cls, unpatched_class(kind.base))
        rebind_forward(module, kind.base.forward)
    vars(module)["_modules"].pop(CONTAINER, None)
    vars(module).pop(CHOICE, None)


def clear(model: nn.Module) -> None:
    vars(model)["_modules"].pop(SHARED, None)
    vars(model).pop(RECORD, None)


def require_grad(parameter: torch.Tensor, flag: bool) -> None:
    """`requires_grad_`, of parameters too that a hook has made inside of `inference_mode`, as those are that are offloaded."""
    if parameter.requires_grad != flag:
        with torch.inference_mode() if parameter.is_inference() else nullcontext():
            parameter.requires_grad_(flag)


def strip(model: nn.Module, requires_grad: Mapping[str, bool] | None = None) -> nn.Module:
    """The model without edits: its own classes, nothing added; all values stay, those that `train` changed too.

    `requires_grad`: of its parameters then, by name; without it as it was before the first spec. What needs none has no gradient.
    """
    flags = installation_of(model).requires_grad if requires_grad is None else requires_grad
    uncover(model)
    for module in edited(model, installation_of(model)):
        restore(module, cast(Any, module)._peftc_kind)
    clear(model)
    for name, parameter in model.named_parameters():
        flag = flags.get(name, parameter.requires_grad)
        require_grad(parameter, flag)
        if not flag:
            parameter.grad = None
    return model


def warm(model: nn.Module, sample: Mapping[str, Any] | None = None) -> None:
    """Makes the variants of ordinary calls ahead of time."""
    if any(kind.inline for _, kind in installation_of(model).regions):
        precompile(model, sample)
