"""A model as it is, with specs or without, to go back to."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from peftc.concurrency.context import CHOICE, ChoiceVar
from peftc.diagnostics import PeftcError
from peftc.forms.module import FormModule
from peftc.installation.base_weights import refuse_quantised
from peftc.installation.completeness import active_installation, edited_modules, module_at
from peftc.installation.edited_classes import clear, install_class, restore_class, set_requires_grad
from peftc.installation.overlay import install_overlays, remove_overlays
from peftc.installation.record import RECORD, is_installed
from peftc.modules.offload import offloaded_error, offloaded_parameters
from peftc.planning.planner import PlanResult
from peftc.rewriting.container import CONTAINER, SHARED
from peftc.rewriting.legality.preconditions import missing_values
from peftc.rewriting.positions import SEQUENCE
from peftc.specialization.generated_class import GeneratedClass


class EditedState(NamedTuple):
    module: nn.Module
    cls: GeneratedClass
    container: nn.Module


class Snapshot:
    """The edits of a model, its flags and gradients. `detach` takes the edits out, `attach` puts
    all back.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.record = active_installation(model, complete=False) if is_installed(model) else None
        self.choice = self.record.choice if self.record else ChoiceVar()
        names = self.record.form_modules if self.record else {}
        named = [*names.items(), *((name, name) for name in names.values() if name.startswith(f"{SHARED}."))]
        modules = ((saved, module_at(model, name)) for saved, name in named)
        self.forms = {saved: cast(FormModule, form) for saved, form in modules if form is not None}
        inner = {id(m): m for form in self.forms.values() for m in form.modules()}.values()
        self.sequences = [(m, vars(m)[SEQUENCE]) for m in inner if SEQUENCE in vars(m)]  # the new edits replace them
        edited = edited_modules(model, self.record) if self.record else []
        self.modules = [
            EditedState(m, cast(Any, m)._peftc_kind, vars(m)["_modules"][CONTAINER])
            for m in edited
            if hasattr(m, "_peftc_kind")
        ]
        self.shared = vars(model)["_modules"].get(SHARED)
        self.requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        self.gradients = {name: p.grad for name, p in model.named_parameters()}
        self.base_requires_grad = self.record.requires_grad if self.record else self.requires_grad
        added = {id(p) for form in self.forms.values() for p in form.parameters()}
        self.base_parameters = {n: p for n, p in model.named_parameters() if id(p) not in added}

    def detach(self) -> None:
        remove_overlays(self.model)
        for edited in self.modules:
            restore_class(edited.module, edited.cls)
        if self.record is not None:
            clear(self.model)

    def attach(self) -> None:
        for edited in self.modules:
            vars(edited.module)[CHOICE] = self.choice
            install_class(edited.module, edited.cls)
            vars(edited.module)["_modules"][CONTAINER] = edited.container
        for form, sequence in self.sequences:
            vars(form)[SEQUENCE] = sequence
        if self.shared is not None:
            vars(self.model)["_modules"][SHARED] = self.shared
        if self.record is not None:
            vars(self.model)[RECORD] = self.record
            install_overlays(self.model, self.record)
        for name, parameter in self.model.named_parameters():
            set_requires_grad(parameter, self.requires_grad[name])
            parameter.grad = self.gradients[name]


class TrainedParameters:
    """Parameters of the base that get a gradient, and those that lose it.

    Raises: P527, P566 for a parameter without values, P542 for a quantised one.
    """

    def __init__(self, before: Snapshot, planned: PlanResult) -> None:
        self.first = before.record is None
        self.parameters = before.base_parameters
        known = before.record.originals if before.record else {}
        names = list(planned.trained_parameters.values())
        self.new = [n for n in names if n not in known]
        self.dropped = [n for n in known if n not in names]
        if meta := [n for n in self.new if self.parameters[n].is_meta]:
            why = "what `train` names is kept as it is before training"
            is_offloaded = offloaded_parameters(before.model).issuperset(meta)
            raise PeftcError(offloaded_error(meta, why) if is_offloaded else missing_values(meta, why))
        refuse_quantised(self.parameters, self.new)
        values = known | {n: self.parameters[n].detach().clone() for n in self.new}
        self.originals = {n: values[n] for n in names}

    def set_requires_grad(self) -> None:
        for name, parameter in self.parameters.items():
            if name in self.new:
                set_requires_grad(parameter, True)
            elif self.first or name in self.dropped:
                set_requires_grad(parameter, False)

    @torch.no_grad()
    def undo(self) -> None:
        for name in self.new:
            self.parameters[name].copy_(self.originals[name])
