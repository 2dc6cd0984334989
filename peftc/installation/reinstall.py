"""Changes which specs a model has, all or nothing: what stays keeps its parameters, what comes gets new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.concurrency.context import CHOICE
from peftc.concurrency.interrupts import Deferral
from peftc.diagnostics import PeftcError
from peftc.forms.module import FormModule
from peftc.installation.journal import Journal
from peftc.installation.overlay import cover, true_parameter, uncover
from peftc.installation.presence import ORIGINALS, active_installation, edited, module_at
from peftc.installation.record import RECORD, Installation, InstalledSpec, installation_of, is_installed
from peftc.installation.surgery import (
    Surgery,
    clear,
    install_class,
    no_values,
    refuse_quantised,
    require_grad,
    restore,
    strip,
    warm,
)
from peftc.modules.offload import offloaded_error, offloaded_parameters
from peftc.planning.planner import PlanResult
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.assembly import regions_of
from peftc.rewriting.container import CONTAINER, SHARED
from peftc.rewriting.positions import SEQUENCE
from peftc.specialization.generated_class import GeneratedClass

Step = Callable[[nn.Module], object]


def reinstall(
    model: nn.Module,
    specs: tuple[InstalledSpec, ...],
    planned: PlanResult,
    structure: ModelStructure,
    *,
    sample: Mapping[str, Any] | None = None,
    requires_grad: Mapping[str, bool] | None = None,
    tasks: tuple[str, ...] = (),
    finish: Step | None = None,
    values: Mapping[str, Tensor] | None = None,
    journal: Journal | None = None,
) -> nn.Module:
    """The model with `specs`, planned together as `planned`, and with no other edits; forms that it has already stay as they are.

    The base is frozen by the first spec; later ones change no `requires_grad` but those of what they train. Base parameters
    that are trained no longer keep their values here. `requires_grad`: what taking out everything restores, where it is
    not what the model had before the first spec. `tasks`: for which `per task` has parameters. `finish`: a
    step that may fail and be interrupted; it writes values of new parameters and of newly trained ones. `journal`: of a transaction that this is a part of, which may undo it. After an error, or an
    interrupt, the model is as it was.
    """
    before = _Before(model)
    surgery = Surgery(
        model,
        {edit: part.seed for part in specs for edit in part.edits},
        before.forms,
        (region.kind for region in before.regions),
        tasks,
    )
    trained = _Trained(before, planned)

    def record(done: Surgery) -> Installation:
        return Installation(
            specs=specs,
            planned=planned,
            regions=[(name, kind) for name, _, kind, _ in done.prepared],
            requires_grad=dict(requires_grad or before.first_flags),
            originals=trained.originals,
            form_modules=done.places,
            task=done.chosen,
            sample=sample,
        )

    def undo() -> None:
        surgery.undo()
        trained.undo()
        before.attach()

    with _Part(journal, undo) as part, Deferral() as deferral:
        try:
            before.detach()
            with deferral.interruptible():
                surgery.prepare(regions_of(planned.site_edits, structure))
            surgery.apply(record)
            trained.mark()
            with deferral.interruptible():
                warm(model, sample)
                if finish is not None:
                    finish(model)
            part.write(model, values or {})
            forget_task(model)
        except BaseException:
            part.undo()
            raise
    return model


def uninstall(
    model: nn.Module,
    requires_grad: Mapping[str, bool] | None = None,
    values: Mapping[str, Tensor] | None = None,
    journal: Journal | None = None,
) -> nn.Module:
    """The model without edits, as `strip` leaves it. `values`, `journal`: as in `reinstall`. After an error, or an interrupt,
    the model is as it was.
    """
    before = _Before(model)
    with _Part(journal, before.attach) as part, Deferral():
        try:
            present = {name: value for name, value in (values or {}).items() if trains(model, name)}
            strip(model, requires_grad)
            part.write(model, present)
        except BaseException:
            part.undo()
            raise
    return model


def forget_task(model: nn.Module) -> None:
    """Lets a model work for no task by default where it has lost the one of `set_task`."""
    task = installation_of(model).task
    default = task.variable.default
    if default.task is not None and default.task not in task.names:
        task.variable.default = replace(default, task=None)


def trains(model: nn.Module, name: str) -> bool:
    """Whether the module that has a parameter is the one whose parameter `train` named: it may have been replaced."""
    module = module_at(model, name.rpartition(".")[0])
    return module is not None and ORIGINALS in vars(module)


class _Part:
    """A change with values of the base that it writes: a transaction of its own, or a part of one with a journal. `back`: undoes the
    change, but not the values.
    """

    def __init__(self, journal: Journal | None, back: Callable[[], object]) -> None:
        self.own = Journal() if journal is None else None
        self.journal = journal or cast(Journal, self.own)
        self.start = len(self.journal.steps)
        self.journal.steps.append(back)

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *error: object) -> None:
        if self.own is not None:
            self.own.__exit__(*error)

    @torch.no_grad()
    def write(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        """Gives parameters of the base their values of before; an embedding may have got more rows since, or lost some."""
        for name, value in values.items():
            parameter = true_parameter(model, name)
            rows = slice(min(len(value), len(parameter))) if value.ndim else ...
            self.journal.copy(parameter[rows], value[rows])

    def undo(self) -> None:
        with Deferral():
            self.journal.undo(self.start)


class _Trained:
    """Parameters of the base that get a gradient, and those that lose it."""

    def __init__(self, before: _Before, found: PlanResult) -> None:
        self.first = before.record is None
        self.parameters = before.parameters
        known = before.record.originals if before.record else {}
        names = list(found.trained_parameters.values())
        self.new = [n for n in names if n not in known]
        self.dropped = [n for n in known if n not in names]
        if meta := [n for n in self.new if self.parameters[n].is_meta]:
            why = "what `train` names is kept as it is before training"
            elsewhere = offloaded_parameters(before.model).issuperset(meta)
            raise PeftcError(offloaded_error(meta, why) if elsewhere else no_values(meta, why))
        refuse_quantised(self.parameters, self.new)
        now = {n: self.parameters[n].detach().clone() for n in self.new}
        self.originals = {n: known[n] if n in known else now[n] for n in names}

    def mark(self) -> None:
        for name, parameter in self.parameters.items():
            if name in self.new:
                require_grad(parameter, True)
            elif self.first or name in self.dropped:
                require_grad(parameter, False)

    @torch.no_grad()
    def undo(self) -> None:
        for name in self.new:
            self.parameters[name].copy_(self.originals[name])


class _Before:
    """A model as it is, with specs or without, to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.record = active_installation(model, complete=False) if is_installed(model) else None
        places = self.record.form_modules if self.record else {}
        named = [*places.items(), *((place, place) for place in places.values() if place.startswith(f"{SHARED}."))]
        there = ((name, module_at(model, place)) for name, place in named)
        self.forms = {name: cast(FormModule, form) for name, form in there if form is not None}
        inner = {id(m): m for form in self.forms.values() for m in form.modules()}.values()
        self.told = [
            (m, vars(m)[SEQUENCE]) for m in inner if SEQUENCE in vars(m)
        ]  # of forms that stay in the new model
        here = edited(model, self.record) if self.record else []
        self.regions = [_Region(module) for module in here if hasattr(module, "_peftc_kind")]
        self.shared = vars(model)["_modules"].get(SHARED)
        self.flags = {name: p.requires_grad for name, p in model.named_parameters()}
        self.gradients = {name: p.grad for name, p in model.named_parameters()}
        self.first_flags = self.record.requires_grad if self.record else self.flags
        added = {id(p) for form in self.forms.values() for p in form.parameters()}
        self.parameters = {n: p for n, p in model.named_parameters() if id(p) not in added}  # of the base

    def detach(self) -> None:
        uncover(self.model)
        for region in self.regions:
            restore(region.module, region.kind)
        if self.record is not None:
            clear(self.model)

    def attach(self) -> None:
        for region in self.regions:
            vars(region.module)[CHOICE] = cast(Installation, self.record).choice
            install_class(region.module, region.kind)
            vars(region.module)["_modules"][CONTAINER] = region.container
        for form, sequence in self.told:
            vars(form)[SEQUENCE] = sequence
        if self.shared is not None:
            vars(self.model)["_modules"][SHARED] = self.shared
        if self.record is not None:
            vars(self.model)[RECORD] = self.record
            cover(self.model, self.record)
        for name, parameter in self.model.named_parameters():
            require_grad(parameter, self.flags[name])
            parameter.grad = self.gradients[name]


class _Region:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = module, cast(GeneratedClass, cast(Any, module)._peftc_kind)
        self.container = vars(module)["_modules"][CONTAINER]
