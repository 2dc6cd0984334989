"""Puts rewritten regions into a model, in place, all or nothing; and takes them out again, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule, build, build_owner, member
from peftc.model.fakes import fake_copy, fake_mode
from peftc.model.sample import sample_inputs
from peftc.planning import ir
from peftc.rewriting.anchors import contains
from peftc.rewriting.edits import Region, module_name
from peftc.rewriting.insert import CONTAINER
from peftc.rewriting.kind import Kind
from peftc.rewriting.regions import LayerRegions, module_region
from peftc.tracing.kinds import Anatomy
from peftc.tracing.sites import WeightRef

SHARED = "peftc_shared"  # the name under which modules that several sites share are registered, at the model's root
RECORD = "_peftc"


@dataclass
class Installation:
    """What was done to a model, enough to undo it. Kept in the model; copied and pickled with it."""

    spec: str  # the expanded spec, canonically printed
    plan: Any
    seed: int
    regions: list[tuple[str, Kind]]
    requires_grad: dict[str, bool]
    trained: dict[str, str]  # saved name -> name of a base parameter
    originals: dict[str, torch.Tensor]  # the values those had
    places: dict[str, str]  # saved name without the parameter -> dotted name of a form's module
    placed: list[ir.Placed] = field(default_factory=list[ir.Placed])


def installed(model: nn.Module) -> Installation:
    """The record of a compiled model. Raises P410 for any other."""
    record = getattr(model, "__dict__", {}).get(RECORD)
    if record is None:
        message = f"this {type(model).__name__} has not been compiled by peftc"
        raise PeftcError(Diagnostic("P410", message, help="peftc.compile(spec, model) first"))
    return record


def is_installed(model: object) -> bool:
    return RECORD in getattr(model, "__dict__", {})


def regions_of(placed: Iterable[ir.Placed], anatomy: Anatomy) -> list[Region]:
    """The regions that the edits touch, in model order."""
    layers = {n: k for s in anatomy.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
    by_root: dict[str, list[ir.Placed]] = {}
    for p in placed:
        inside = next((n for n in layers if contains(n, p.site.root)), p.site.root)
        by_root.setdefault(inside, []).append(p)
    memory: dict[Any, Any] = {}
    found: list[Region] = []
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
        else:
            found[region.module] = region
    return list(found.values())


class Surgery:
    """One installation in the making. Nothing of the model changes before `apply`."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.kinds: dict[tuple[Any, ...], Kind] = {}
        self.owners: dict[str, FormModule] = {}
        self.prepared: list[tuple[str, nn.Module, Kind, nn.Module]] = []
        self.places: dict[str, str] = {}

    def prepare(self, regions: list[Region]) -> None:
        """Makes classes and parameters."""
        for region in regions:
            module = self.model.get_submodule(region.module)
            if CONTAINER in vars(module)["_modules"] or hasattr(module, CONTAINER):
                taken = f"`{region.module}` already has something named `{CONTAINER}`"
                raise PeftcError(Diagnostic("P411", taken, help="peftc.remove(model) first"))
            kind = self.kind_of(region, module)
            self.prepared.append((region.module, module, kind, self.container(region, module)))

    def kind_of(self, region: Region, module: nn.Module) -> Kind:
        base = type(module)
        key = (base, region.inline, *(e.fingerprint for e in region.edits))
        if key not in self.kinds:
            self.kinds[key] = Kind(base, region.inline, tuple(region.edits), base.__name__)
        return self.kinds[key]

    def container(self, region: Region, module: nn.Module) -> nn.Module:
        """The region's own modules: `peftc.<edit>.<site>.<form>`."""
        root = nn.Module()
        for edit, placed in zip(region.edits, region.placed, strict=True):
            for instance in placed.instances:
                path = f"{edit.edit_name}.{edit.slug}.{instance.key}"
                add(root, path, self.form(placed, instance, module))
                name = f"{placed.edit}/{placed.site.path}/{instance.key}"
                if instance.owner is None:
                    self.places[name] = f"{region.module}.{CONTAINER}.{path}".lstrip(".")
        return root

    def form(self, placed: ir.Placed, instance: ir.Instance, module: nn.Module) -> FormModule:
        dtype, device = options(module, self.model)
        if instance.owner is None:
            made = build(instance, dtype=dtype, device=device)
            self.initialise(made, f"{placed.edit}/{placed.site.path}/{instance.key}", placed)
            return made
        if instance.owner not in self.owners:
            owner = build_owner(instance, dtype=dtype, device=device)
            self.initialise(owner, f"{placed.edit}/{instance.owner}", placed)
            self.owners[instance.owner] = owner
            self.places[f"{placed.edit}/{instance.owner}/{instance.key}"] = f"{SHARED}.{identifier(instance.owner)}"
        return member(self.owners[instance.owner], instance.index)

    def initialise(self, form: FormModule, name: str, placed: ir.Placed) -> None:
        """Initial values depend on the seed, the edit, the site and the parameter, and on nothing else."""

        def generator(parameter: str) -> torch.Generator:
            digest = hashlib.sha256(f"{self.seed}/{name}.{parameter}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        weights = {n: s.weight for n, s in placed.site.states.items() if s.weight is not None}
        form.initialise(generator, {n: weight_view(self.model, ref).detach() for n, ref in weights.items()})

    def apply(self, trained: Mapping[str, str], record: Callable[[Surgery], Installation]) -> None:
        """Changes the model; after an error it is as it was."""
        parameters = dict(self.model.named_parameters())
        before = {n: p.requires_grad for n, p in parameters.items()}
        try:
            for p in parameters.values():
                p.requires_grad_(False)
            for name in trained.values():
                parameters[name].requires_grad_(True)
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
        except BaseException:
            self.undo(before)
            raise

    def undo(self, requires_grad: Mapping[str, bool]) -> None:
        for _, module, kind, _ in self.prepared:
            restore(module, kind)
        clear(self.model)
        for name, p in self.model.named_parameters():
            p.requires_grad_(requires_grad[name])


def add(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(root.named_children()):
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def identifier(name: str) -> str:
    return module_name("".join(c if c.isalnum() else "_" for c in name))


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
    tensor = getattr(model.get_submodule(ref.module), ref.attribute)
    tensor = tensor.t() if ref.transposed else tensor
    return tensor if ref.rows is None else tensor[ref.rows.start : ref.rows.stop]


def restore(module: nn.Module, kind: Kind) -> None:
    if type(module) is kind.cls:
        module.__class__ = kind.base
    vars(module)["_modules"].pop(CONTAINER, None)


def clear(model: nn.Module) -> None:
    vars(model)["_modules"].pop(SHARED, None)
    vars(model).pop(RECORD, None)


def uninstall(model: nn.Module) -> nn.Module:
    """Restores classes, parameters and `requires_grad` as they were."""
    record = installed(model)
    for name, kind in record.regions:
        restore(model.get_submodule(name), kind)
    clear(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in record.originals.items():
            parameters[name].copy_(value)
    for name, flag in record.requires_grad.items():
        parameters[name].requires_grad_(flag)
        if not flag:
            parameters[name].grad = None
    return model


@contextmanager
def suspended(model: nn.Module) -> Generator[nn.Module]:
    """The base model, inside the block: no edit acts, trained base parameters have their first values."""
    record = installed(model)
    modules = [(model.get_submodule(name), kind) for name, kind in record.regions]
    swap_originals(model, record)
    try:
        for module, kind in modules:
            module.__class__ = kind.base
        yield model
    finally:
        for module, kind in modules:
            module.__class__ = kind.cls
        swap_originals(model, record)


def swap_originals(model: nn.Module, record: Installation) -> None:
    for name, value in list(record.originals.items()):
        parameter = model.get_parameter(name)
        record.originals[name] = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(value)


def warm(model: nn.Module, sample: Mapping[str, Any] | None = None) -> None:
    """Makes the common variants ahead of time, by running a copy without data: evaluation and training.

    A model whose own code looks at values cannot be run so: then variants are made when they first come up.
    """
    if not any(kind.inline for _, kind in installed(model).regions):
        return
    fake = fake_copy(model)
    inputs = sample_inputs(fake) if sample is None else sample
    try:
        for training in (False, True):
            fake.train(training)
            with fake_mode(fake), torch.no_grad():
                fake(**inputs)
    except (DataDependentOutputException, PeftcError) as error:
        if isinstance(error, PeftcError):
            raise
    except Exception as error:  # whatever the model's own code raises
        message = f"the edited {type(model).__name__} does not run: {type(error).__name__}"
        raise PeftcError(Diagnostic("P409", message, notes=(str(error).partition("\n")[0],))) from error
