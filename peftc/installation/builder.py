"""Makes what an installation puts into a model: generated classes, containers, forms."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from peftc.addressing.renaming import LayerName, inner_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.module import EquationModule as EquationModule  # imported before a model is compiled
from peftc.forms.member_module import Member
from peftc.forms.module import FormModule, build, build_of_all, build_owner, seeded
from peftc.forms.sequence_module import Sequence
from peftc.installation.base_weights import BaseWeights
from peftc.installation.edited_classes import EditedModule, install_edits, remove_edits
from peftc.installation.record import Installation
from peftc.modules.instance_forward import FORWARD, code_class
from peftc.modules.offload import HOOK, execution_device, onload_device
from peftc.modules.walk import Named, all_named_modules, all_parameters, submodule
from peftc.observation.layer_keys import distinctive_members
from peftc.observation.reachable_code import reachable_code
from peftc.planning import ir
from peftc.rewriting.edits import CONTAINER, SHARED, Region, empty_container, module_name
from peftc.rewriting.form_copies import FormCopies, FormCopy, container_copy
from peftc.rewriting.legality.preconditions import check_forwards, check_loaded, check_parents
from peftc.rewriting.prompts import CACHE_NAME, SEQUENCE
from peftc.rewriting.region_list import RegionList
from peftc.sharding.layouts import note_edits
from peftc.specialization.generated_class import ClassKey, GeneratedClass, class_key, names_pattern
from peftc.task_modules.tasked_module import Tasked

Options = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class FormSite:
    """One form of an edit at one site."""

    site_edit: ir.SiteEdit
    instance: ir.FormInstance
    module: nn.Module  # of the region

    @property
    def saved_name(self) -> str:
        return saved_name(self.site_edit, self.instance)


class RegionKind(NamedTuple):
    """What regions have in common that have the same edits, at modules of one class.

    `cls`: their generated class; None if modules may have classes of their own. `edits`: what their
    containers hold; None if these differ in more than names.
    """

    cls: GeneratedClass | None
    edits: tuple[FormCopies, ...] | None


class AlikeRegion(NamedTuple):
    """What a region of a layer shares with those of other layers that differ in names alone. Their
    modules have a parameter `first`. Names are without that of the layer. `is_plain`: whether only
    tables of a module can hide its container. `edits`: the forms of each edit, its name, and the
    path that owns their parameters.
    """

    module: type[nn.Module]
    first: str
    dtype: torch.dtype
    device: torch.device
    is_plain: bool
    cls: GeneratedClass
    name: str
    parent: str
    edits: tuple[tuple[FormCopies, str, str], ...]


class InstallationBuilder:
    """Builds one installation. Nothing of the model changes before `apply`.

    `present`: forms that the model has already, by saved name, or by dotted name if shared.
    `classes`: those that the model has already; `shared_classes`: those that equal models share.
    `draw`: whether new parameters get initial values; without it they are written before they are
    read. `modules`: those of the model by all of their names, and `parameters`, if known.
    """

    def __init__(
        self,
        model: nn.Module,
        installation: Installation,
        present: Mapping[str, FormModule],
        classes: Iterable[GeneratedClass],
        shared_classes: dict[ClassKey, GeneratedClass],
        draw: bool = True,
        modules: Named | None = None,
        parameters: Iterable[Tensor] | None = None,
    ) -> None:
        self.model, self.installation, self.present, self.draw = model, installation, present, draw
        self.every = all_named_modules(model) if modules is None else modules
        self.parameters = all_parameters(self.every) if parameters is None else parameters
        unpatched = [c for c in classes if c.code == tuple(map(reachable_code, (c.base, *c.entered)))]
        self.classes = {class_key(c.base, c.inline, c.members, c.entered, c.edits): c for c in unpatched}
        self.shared_classes = shared_classes
        self.copiers: dict[object, Callable[[], FormModule] | None] = {}
        self.kinds: dict[object, RegionKind] = {}
        self.alike: dict[int, AlikeRegion] = {}  # by `id` of the region, which its list keeps
        self.patterns: dict[object, GeneratedClass] = {}  # by class and `names_pattern`
        self.plain_classes: dict[type[nn.Module], bool] = {}
        self.seeds = {edit: spec.seed for spec in installation.specs for edit in spec.edits}
        self.modules: list[EditedModule] = []
        self.forms: dict[str, FormModule] = {}  # by saved name
        self.shared: dict[str, FormModule] = {}  # by owner
        self.sequences: dict[tuple[str, str], Sequence] = {}  # by edit and site

    def prepare(self, regions: RegionList) -> None:
        """Makes classes and parameters. Raises: P411, P424, P426, P427, P527."""
        partly_loaded = len({p.is_meta for p in self.parameters}) > 1
        modules, checked = dict(self.every), set[str]()
        for template in {id(block.template): block.template for block in regions.blocks}.values():
            for region in template.regions:
                self.sequences |= dict.fromkeys(region.position_sites, Sequence())
        for block in regions.blocks:
            layer = None if partly_loaded or block.renaming is None else block.layer
            for region in block.template.regions:
                alike = None if layer is None else self.alike.get(id(region))
                if alike is not None and layer is not None and self.add_alike(alike, layer, modules, checked):
                    continue
                own = block.named(region)
                module = modules[own.module]
                check_forwards(own, modules, checked)
                if partly_loaded:
                    check_loaded(own.module, module)
                if CONTAINER in vars(module)["_modules"] or self.hides_container(module):
                    message = f"`{own.module}` already has something named `{CONTAINER}`"
                    help_ = "rename it: edits are registered under this name"
                    raise PeftcError(Diagnostic("P411", message, help=help_))
                self.add(own.module, *self.edited_module(own, module, region is own and block.layer))

    def add(self, name: str, module: nn.Module, cls: GeneratedClass, container: nn.Module) -> None:
        self.modules.append(EditedModule(module, cls, container))
        self.installation.regions.append((name, cls))

    def add_alike(
        self, alike: AlikeRegion, layer: LayerName, modules: Mapping[str, nn.Module], checked: set[str]
    ) -> bool:
        """Adds what an alike region has got, in another layer; False if its module is not alike."""
        name = layer.module + alike.name
        module = modules[name]
        own = vars(module)
        first = own["_parameters"].get(alike.first)
        if type(module) is not alike.module or first is None or first.dtype is not alike.dtype:
            return False
        if FORWARD in own or HOOK in own or CONTAINER in own["_modules"] or first.device != alike.device:
            return False
        if not alike.is_plain and hasattr(module, CONTAINER):
            return False
        if CONTAINER in own or CONTAINER in own["_parameters"] or CONTAINER in own["_buffers"]:
            return False
        if (parent := layer.module + alike.parent) not in checked:
            check_parents(parent, modules, checked)
        edits = [(copies, f"{edit}/{layer.path}{path}/", None) for copies, edit, path in alike.edits]
        container = container_copy(edits, f"{name}.{CONTAINER}", self.forms, self.installation.form_modules)
        self.add(name, module, alike.cls, container)
        return True

    def hides_container(self, module: nn.Module) -> bool:
        """Whether a module has an attribute of the container's name."""
        cls, own = type(module), vars(module)
        if cls not in self.plain_classes:
            self.plain_classes[cls] = cls.__getattr__ is nn.Module.__getattr__ and not hasattr(cls, CONTAINER)
        if self.plain_classes[cls]:
            return CONTAINER in own or CONTAINER in own["_parameters"] or CONTAINER in own["_buffers"]
        return hasattr(module, CONTAINER)

    def edited_module(
        self, region: Region, module: nn.Module, layer: LayerName | Literal[False] | None
    ) -> EditedModule:
        """The class and the container of a region, like those of an earlier region of its kind.
        `layer`: of a region whose like other layers have.
        """
        options = self.options(module)
        parts = chain(region.edits, (site_edit.instances for site_edit in region.site_edits))
        key = (type(module), options, region.inline, *map(id, parts))  # the compilation keeps the parts
        kind = self.kinds.get(key)
        cls = None if kind is None or FORWARD in vars(module) else kind.cls
        cls = cls or self.generated_class(region, module)
        if kind is not None and kind.edits is not None and not region.position_sites:
            container = self.container_copy(region, module, kind.edits)
        else:
            container = self.container(region, module)
        if kind is None:
            is_fixed = not region.inline and FORWARD not in vars(module)
            kind = self.kinds[key] = RegionKind(cls if is_fixed else None, self.form_copies(region, options))
        if layer and (alike := self.alike_region(region, module, kind, layer, options)) is not None:
            self.alike[id(region)] = alike
        return EditedModule(module, cls, container)

    def alike_region(
        self, region: Region, module: nn.Module, kind: RegionKind, layer: LayerName, options: Options
    ) -> AlikeRegion | None:
        """None where other layers need more than names of their own."""
        first = next(iter(vars(module)["_parameters"]), None)
        if first is None or kind.cls is None or kind.edits is None or self.is_dispatched:
            return None
        if any(form.draws for edit in kind.edits for form in edit.forms):
            return None
        name = inner_name(region.module, layer.module)
        paths = [inner_name(site_edit.owner_path, layer.path) for site_edit in region.site_edits]
        if name is None or None in paths:
            return None
        edits = zip(kind.edits, (site_edit.edit for site_edit in region.site_edits), map(str, paths), strict=True)
        is_plain = self.plain_classes.get(type(module), False)
        parent = name.rpartition(".")[0]
        return AlikeRegion(type(module), first, *options, is_plain, kind.cls, name, parent, tuple(edits))

    def generated_class(self, region: Region, module: nn.Module) -> GeneratedClass:
        """One for all regions of a structure; without variants, also for other models."""
        base = code_class(module)
        members = distinctive_members(module, CONTAINER) if region.inline else frozenset[str]()
        entered = tuple(code_class(submodule(module, name)) for name in sorted(region.inline) if name)
        key = class_key(base, region.inline, members, entered, region.edits)
        classes = self.classes if region.inline or key in self.classes else self.shared_classes
        if key not in classes:
            edits = tuple(region.edits)
            pattern = None if region.inline else (base, *names_pattern(edits))
            like = self.patterns.get(pattern)
            classes[key] = GeneratedClass(base, region.inline, edits, base.__name__, members, entered, like=like)
            if pattern is not None:
                self.patterns.setdefault(pattern, classes[key])
        return classes[key]

    def container(self, region: Region, module: nn.Module) -> nn.Module:
        """The region's own modules: `peftc.<edit>.<site>.<form>`."""
        root = empty_container()
        if region.position_sites:
            vars(root)[SEQUENCE] = self.sequences[region.position_sites[0]]
        for edit, site_edit in zip(region.edits, region.site_edits, strict=True):
            for instance in site_edit.instances:
                at = FormSite(site_edit, instance, module)
                name = at.saved_name
                if name not in self.forms:
                    self.forms[name] = self.form(at, name)
                root.child(edit.edit_name).child(edit.slug).add(instance.key, self.forms[name])
                if instance.has_site_parameters and name not in self.installation.form_modules:
                    place = f"{region.module}.{CONTAINER}.{edit.edit_name}.{edit.slug}.{instance.key}".lstrip(".")
                    self.installation.form_modules[name] = place
        return root

    def form_copies(self, region: Region, options: Options) -> tuple[FormCopies, ...] | None:
        """The forms of a region whose container exists; None if one has more than its own site."""
        edits: list[FormCopies] = []
        for edit, site_edit in zip(region.edits, region.site_edits, strict=True):
            forms: list[FormCopy] = []
            for one in site_edit.instances:
                copy = self.copiers.get((build, id(one), *options))
                if self.present or copy is None or one.owner is not None or one.tasks or one.selects_positions:
                    return None
                sets_values = self.forms[saved_name(site_edit, one)].sets_values()
                draws = options[1].type != "meta" or sets_values
                forms.append(FormCopy(one.key, one, copy, draws, f".{edit.edit_name}.{edit.slug}.{one.key}"))
            edits.append(FormCopies(edit.edit_name, edit.slug, tuple(forms)))
        return tuple(edits) if len({edit[:2] for edit in edits}) == len(edits) else None

    def container_copy(self, region: Region, module: nn.Module, edits: Iterable[FormCopies]) -> nn.Module:
        """As `container`, of a region whose kind is known."""
        pairs = zip(edits, region.site_edits, strict=True)
        copies = [(one, f"{p.edit}/{p.owner_path}/", partial(self.set_copy_values, p, module)) for one, p in pairs]
        place = f"{region.module}.{CONTAINER}".lstrip(".")
        return container_copy(copies, place, self.forms, self.installation.form_modules)

    def set_copy_values(
        self, site_edit: ir.SiteEdit, module: nn.Module, form: FormModule, instance: ir.FormInstance, name: str
    ) -> None:
        self.set_values(form, FormSite(site_edit, instance, module), name, site_edit.owner_path)

    # Forms ----------------------------------------------------------------------------------------

    def form(self, at: FormSite, name: str) -> FormModule:
        present = self.present.get(name)
        if not at.instance.tasks:
            return self.form_of_task(at, None, name, present)
        tasks = dict(present.tasks.items()) if isinstance(present, Tasked) else {}
        forms = {
            task: self.form_of_task(at, task, name + suffix, cast(FormModule | None, tasks.get(task)))
            for task, suffix in at.instance.task_suffixes()
            if task is not None
        }
        record = self.installation
        tasked = Tasked(record.adapter if at.instance.are_adapters else record.task, forms)
        self.attach_sequence(tasked, at)
        return tasked

    def form_of_task(self, at: FormSite, task: str | None, name: str, present: FormModule | None) -> FormModule:
        """The form of a site, or that of one task there."""
        owner_name = at.instance.owner_of(task)
        owner = None if owner_name is None else self.shared_form(owner_name, at)
        if owner is not None and not at.instance.has_site_parameters:
            self.attach_sequence(owner, at)
            form = Member(owner, at.instance.index, at.instance.form.fill(at.instance.args))
        else:
            form = present or self.new_form(build, name, at, at.site_edit.owner_path)
            if owner is not None:
                form.join(owner, at.instance.index, task)
        self.attach_sequence(form, at, name)
        return form

    def attach_sequence(self, form: FormModule, at: FormSite, name: str = "") -> None:
        """Shows a form that selects positions the calls of its stack."""
        if at.instance.selects_positions:
            vars(form)[SEQUENCE] = self.sequences[at.site_edit.edit, at.site_edit.owner_path]
            vars(form)[CACHE_NAME] = name or at.saved_name

    def shared_form(self, owner: str, at: FormSite) -> FormModule:
        """The parameters that several sites share."""
        if owner not in self.shared:
            name = f"{at.site_edit.edit}/{owner}/{at.instance.key}"
            all_tasks = at.instance.all_tasks_owner
            make = build_of_all if owner == all_tasks else build_owner
            # Where its first edit is gone, another one has become the first.
            form = self.present.get(shared_name(owner)) or self.new_form(make, name, at, "")
            self.shared[owner] = form
            self.installation.form_modules[name] = shared_name(owner)
            if all_tasks not in (None, owner):
                form.join(self.shared_form(all_tasks, at), 0)
        return self.shared[owner]

    def new_form(self, make: Callable[..., FormModule], name: str, at: FormSite, place: str) -> FormModule:
        """A form. Its initial values depend on seed, edit, site and parameter alone."""
        dtype, device = self.options(at.module)
        key = make, id(at.instance), dtype, device  # the plan keeps the instance
        copy = self.copiers.get(key)
        form = make(at.instance, dtype=dtype, device=device) if copy is None else copy()
        if key not in self.copiers:
            self.copiers[key] = form.copier()
        self.set_values(form, at, name, place)
        return form

    def set_values(self, form: FormModule, at: FormSite, name: str, place: str) -> None:
        if self.draw or form.sets_values():
            base, seed = BaseWeights(self.model, at.site_edit.site, name), self.seeds[at.site_edit.edit]
            form.initialise(lambda parameter: seeded(f"{seed}/{name}.{parameter}"), base)
        form.fix(place)

    def options(self, module: nn.Module) -> Options:
        """The dtype and device of a module's floating-point parameters, else of the model's."""
        first = next(iter(vars(module)["_parameters"].values()), None)  # mostly a weight
        dtype = None if first is None else first.dtype
        if dtype is None or not dtype.is_floating_point:
            parameters = chain(module.parameters(), self.model.parameters())
            first = next(parameters, None)
            typed = (p.dtype for p in chain([first], parameters) if p is not None and p.is_floating_point())
            dtype = next(typed, None)
        if first is None or dtype is None:
            return torch.float32, torch.device("cpu")
        if not first.is_meta or not self.is_dispatched:
            return dtype, self.onload_device or first.device
        return dtype, execution_device(module) or execution_device(self.model) or first.device

    @cached_property
    def is_dispatched(self) -> bool:
        return any(HOOK in module.__dict__ for _, module in self.every)

    @cached_property
    def onload_device(self) -> torch.device | None:
        return onload_device(module for _, module in self.every)

    # Changing the model ---------------------------------------------------------------------------

    def apply(self) -> None:
        """Registers the parameters and exchanges the classes."""
        shared = nn.Module()
        for owner, form in self.shared.items():
            shared.add_module(shared_name(owner).rpartition(".")[2], form)
        shared.train(self.model.training)
        for edited in self.modules:
            if self.present or not edited.module.training:
                edited.container.train(edited.module.training)
        base_modules = [module for _, module in self.every]
        install_edits(self.model, self.installation, self.modules, shared if self.shared else None, base_modules)
        note_edits(self.model)

    def undo(self) -> None:
        remove_edits(self.model, self.modules)


def saved_name(site_edit: ir.SiteEdit, instance: ir.FormInstance) -> str:
    return f"{site_edit.edit}/{site_edit.owner_path}/{instance.key}"


def shared_name(owner: str) -> str:
    """The dotted name of the form that several sites share."""
    return f"{SHARED}.{module_name(''.join(c if c.isalnum() else '_' for c in owner))}"
