"""Takes edits out of a compiled model and keeps the others, with the parameters they have; all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from torch import nn

from peftc.forms.module import FormModule, member
from peftc.planning import ir
from peftc.planning.plan import Planned
from peftc.rewriting.insert import CONTAINER
from peftc.rewriting.install import (
    RECORD,
    SHARED,
    Installation,
    Surgery,
    clear,
    identifier,
    installed,
    regions_of,
    restore,
    warm,
)
from peftc.rewriting.kind import Kind
from peftc.tracing.kinds import Anatomy


def reinstall(
    model: nn.Module, spec: str, found: Planned, anatomy: Anatomy, requires_grad: Mapping[str, bool]
) -> nn.Module:
    """Changes a compiled model into what compiling `spec`, some of its edits, would make, with the parameters it has.

    Base parameters that `found` trains keep their value, and their first one for `remove`; `requires_grad` is what `remove`
    restores. After an error the model is as it was.
    """
    before = _Before(model)
    surgery = _Again(model, before.record)
    try:
        before.detach()
        surgery.prepare(regions_of(found.placed, anatomy))

        def record(done: Surgery) -> Installation:
            return replace(
                before.record,
                spec=spec,
                plan=found.plan,
                regions=[(name, kind) for name, _, kind, _ in done.prepared],
                requires_grad=dict(requires_grad),
                trained=dict(found.trained),
                originals={name: before.record.originals[name] for name in found.trained.values()},
                places=done.places,
                placed=list(found.placed),
            )

        surgery.apply(found.trained, record)
        warm(model)
    except BaseException:
        before.attach()
        raise
    return model


def strip(model: nn.Module, requires_grad: Mapping[str, bool]) -> nn.Module:
    """The model without edits: its own classes, nothing added; all values stay, those that `train` changed too."""
    record = installed(model)
    for name, kind in record.regions:
        restore(model.get_submodule(name), kind)
    clear(model)
    for name, parameter in model.named_parameters():
        flag = requires_grad.get(name, parameter.requires_grad)
        parameter.requires_grad_(flag)
        if not flag:
            parameter.grad = None
    return model


class _Again(Surgery):
    """An installation of edits whose modules are there already."""

    def __init__(self, model: nn.Module, old: Installation) -> None:
        super().__init__(model, old.seed)
        self.old = {name: cast(FormModule, model.get_submodule(place)) for name, place in old.places.items()}
        shared = dict(getattr(model, SHARED).named_children()) if SHARED in dict(model.named_children()) else {}
        self.shared = cast(Mapping[str, FormModule], shared)

    def form(self, placed: ir.Placed, instance: ir.Instance, module: nn.Module) -> FormModule:
        if instance.owner is None:
            return self.old[f"{placed.edit}/{placed.site.path}/{instance.key}"]
        if instance.owner not in self.owners:
            self.owners[instance.owner] = self.shared[identifier(instance.owner)]
            self.places[f"{placed.edit}/{instance.owner}/{instance.key}"] = f"{SHARED}.{identifier(instance.owner)}"
        return member(self.owners[instance.owner], instance.index)


class _Before:
    """A compiled model as it is, to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.record = model, installed(model)
        self.regions = [_Region(model.get_submodule(name), kind) for name, kind in self.record.regions]
        self.shared = vars(model)["_modules"].get(SHARED)
        self.flags = {name: p.requires_grad for name, p in model.named_parameters()}

    def detach(self) -> None:
        for region in self.regions:
            restore(region.module, region.kind)
        clear(self.model)

    def attach(self) -> None:
        undo(self.model, [(name, kind) for name, kind in vars(self.model).get(RECORD, self.record).regions])
        for region in self.regions:
            region.module.__class__ = region.cls
            vars(region.module)["_modules"][CONTAINER] = region.container
        if self.shared is not None:
            vars(self.model)["_modules"][SHARED] = self.shared
        vars(self.model)[RECORD] = self.record
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.flags[name])


class _Region:
    def __init__(self, module: nn.Module, kind: Kind) -> None:
        self.module, self.kind = module, kind
        self.cls, self.container = type(module), vars(module)["_modules"][CONTAINER]


def undo(model: nn.Module, regions: Iterable[tuple[str, Kind]]) -> None:
    """Takes regions out again, however far their installation has come."""
    for name, kind in regions:
        restore(model.get_submodule(name), kind)
    clear(model)
