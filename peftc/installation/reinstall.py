"""Changes which specs a model has, all or nothing. What stays keeps its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.concurrency.context import Choice, ChoiceVar
from peftc.diagnostics import PeftcError, warn
from peftc.forms.module import FormModule
from peftc.installation.base_weights import refuse_quantised
from peftc.installation.builder import InstallationBuilder
from peftc.installation.compilations import Compilation
from peftc.installation.completeness import active_installation, module_at
from peftc.installation.edited_classes import (
    edited_parts,
    install_edits,
    remove_edits,
    set_requires_grad,
    strip,
    true_parameter,
)
from peftc.installation.journal import Journal, transaction
from peftc.installation.record import Installation, InstalledSpec, installation_of, is_installed, place_of_values
from peftc.modules.base_values import BASE_VALUES, common_rows, in_parts
from peftc.modules.offload import offloaded_error, offloaded_parameters
from peftc.modules.packed import repacking
from peftc.modules.sharded_tensors import is_sharded, require_gathered
from peftc.modules.walk import all_named_modules, named_modules, named_parameters
from peftc.planning.planner import PlanResult
from peftc.rewriting.edits import SHARED
from peftc.rewriting.legality.preconditions import missing_values
from peftc.rewriting.prompts import SEQUENCE
from peftc.specialization.precompile import precompile
from peftc.task_modules.tasked_module import Chosen

Step = Callable[[nn.Module], object]


class Snapshot:
    """Edits, flags and gradients of a model. `detach` removes the edits, `attach` restores all."""

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
        self.modules = edited_parts(model, self.record) if self.record else []
        self.shared = vars(model)["_modules"].get(SHARED)
        self.base_modules = None if self.record else all_named_modules(model)
        parameters = dict(named_parameters(self.base_modules or named_modules(model)))
        self.requires_grad = {name: p.requires_grad for name, p in parameters.items()}
        self.gradients = {name: grad for name, p in parameters.items() if (grad := p.grad) is not None}
        self.base_requires_grad = self.record.requires_grad if self.record else self.requires_grad
        self.attached_values = self.record.attached_values if self.record else {}
        added = {id(p) for own in (*self.forms.values(), *self.attached_values.values()) for p in own.parameters()}
        self.base_parameters = {n: p for n, p in parameters.items() if id(p) not in added} if added else parameters

    def detach(self) -> None:
        if self.record is not None:
            remove_edits(self.model, self.modules)

    def attach(self) -> None:
        for form, sequence in self.sequences:
            vars(form)[SEQUENCE] = sequence
        if self.record is not None:
            install_edits(self.model, self.record, self.modules, self.shared)
        for name, parameter in named_parameters(named_modules(self.model)):
            set_requires_grad(parameter, self.requires_grad[name])
            parameter.grad = self.gradients.get(name)


class TrainedParameters:
    """Parameters of the base that get or lose a gradient. Raises: P527, P566, P542 (quantised)."""

    def __init__(self, before: Snapshot, planned: PlanResult) -> None:
        self.first, self.parameters = before.record is None, before.base_parameters
        known = before.record.originals if before.record else {}
        names = list(planned.trained_parameters.values())
        self.new = [n for n in names if n not in known]
        self.dropped = [n for n in known if n not in names]
        of_adapters = list(dict.fromkeys(planned.adapter_parameters.values()))
        if meta := [n for n in (*self.new, *of_adapters) if self.parameters[n].is_meta]:
            why = "what `train` names is kept as it is before training"
            is_offloaded = offloaded_parameters(before.model).issuperset(meta)
            raise PeftcError(offloaded_error(meta, why) if is_offloaded else missing_values(meta, why))
        refuse_quantised(before.model, self.parameters, [*self.new, *of_adapters])
        if name := next((n for n in of_adapters if is_sharded(self.parameters[n])), None):
            raise PeftcError(in_parts(name))
        values = known | {n: self.parameters[n].detach().clone() for n in self.new}
        self.originals = {n: values[n] for n in names}

    def set_requires_grad(self) -> None:
        new = set(self.new)
        for name, parameter in self.parameters.items() if self.first else ():
            if parameter.requires_grad and name not in new:
                if parameter.is_inference():
                    set_requires_grad(parameter, False)
                else:
                    parameter.requires_grad_(False)
        for name in self.parameters.keys() & self.dropped:
            set_requires_grad(self.parameters[name], False)
        for name in self.new:
            set_requires_grad(self.parameters[name], True)

    @torch.no_grad()
    def undo(self) -> None:
        for name in self.new:
            self.parameters[name].copy_(self.originals[name])


def reinstall(
    model: nn.Module,
    specs: tuple[InstalledSpec, ...],
    compilation: Compilation,
    *,
    sample: Mapping[str, Any] | None,
    tasks: tuple[str, ...],
    requires_grad: Mapping[str, bool] | None = None,
    values: Mapping[str, Tensor] | None = None,
    finish: Step | None = None,
    draw: bool = True,
    journal: Journal | None = None,
) -> None:
    """Leaves the model with `specs`, planned together in `compilation`, and with no other edits.

    The first spec freezes the base. `finish` may be interrupted; it writes new parameters: all of
    them if they are not drawn.
    """
    before, planned = Snapshot(model), compilation.planned
    require_gathered(before.base_parameters.items())
    if (warning := repacking(before.base_modules or ())) is not None:
        warn(warning)
    trained = TrainedParameters(before, planned)
    flags = dict(requires_grad or before.base_requires_grad)
    chosen = Chosen(tasks, before.choice)
    adapters = Chosen(tuple(name for spec in specs for name in spec.adapters), before.choice, "adapter")
    values_of_adapters = attached_values(before, planned, specs)
    installation = Installation(
        specs, planned, [], flags, trained.originals, {}, chosen, adapters, values_of_adapters, sample
    )
    default = before.choice.default
    classes = (edited.cls for edited in before.modules)
    base = before.base_modules, None if before.base_modules is None else before.base_parameters.values()
    builder = InstallationBuilder(model, installation, before.forms, classes, compilation.classes, draw, *base)
    with transaction(journal) as (own, deferral):
        own.steps += [before.attach, trained.undo, builder.undo, partial(before.choice.set_default, default)]
        before.detach()
        before.choice.set_default(valid_choice(default, installation))
        with deferral.interruptible():
            builder.prepare(compilation.regions)
        builder.apply()
        trained.set_requires_grad()
        with deferral.interruptible():
            warm(model, sample)
            if finish is not None:
                finish(model)
        write_base(model, values or {}, own)


def attached_values(before: Snapshot, planned: PlanResult, specs: tuple[InstalledSpec, ...]) -> dict[str, nn.Module]:
    """What attached adapters have of parameters of the base, by `place_of_values`. New values are
    to be written.
    """
    adapters = {edit: spec.adapters for spec in specs for edit in spec.edits}
    modules: dict[str, nn.Module] = {}
    for saved, name in planned.adapter_parameters.items():
        place = place_of_values(saved)
        present = before.attached_values.get(place)
        known = {} if present is None else dict(present.named_parameters())
        modules[place] = nn.Module().train(before.model.training)
        for adapter in adapters[saved.partition("/")[0]]:
            value = known.get(adapter)
            value = nn.Parameter(torch.empty_like(before.base_parameters[name].detach())) if value is None else value
            modules[place].register_parameter(adapter, value)
    return modules


def valid_choice(choice: Choice, installation: Installation) -> Choice:
    """The choice outside of blocks, without a task or an adapter that the model no longer has."""
    task = choice.task if choice.task in installation.task.names else None
    adapter = choice.adapter if choice.adapter in installation.adapter.names else None
    return replace(choice, task=task, adapter=adapter, attached=installation.attached)


def uninstall(
    model: nn.Module,
    requires_grad: Mapping[str, bool] | None = None,
    values: Mapping[str, Tensor] | None = None,
    journal: Journal | None = None,
) -> nn.Module:
    """The model without edits, as `strip` leaves it. `values`, `journal`: as in `reinstall`."""
    before = Snapshot(model)
    with transaction(journal) as (own, _):
        own.steps.append(before.attach)
        trained = {name: value for name, value in (values or {}).items() if is_trained(model, name)}
        strip(model, requires_grad)
        write_base(model, trained, own)
    return model


def is_trained(model: nn.Module, name: str) -> bool:
    """Whether `train` named a parameter of the module at this place: it may have been replaced."""
    module = module_at(model, name.rpartition(".")[0])
    return module is not None and BASE_VALUES in vars(module)


@torch.no_grad()
def write_base(model: nn.Module, values: Mapping[str, Tensor], journal: Journal) -> None:
    """Gives parameters of the base their first values."""
    for name, value in values.items():
        parameter = true_parameter(model, name)
        rows = common_rows(parameter, value)
        journal.copy(parameter[rows], value[rows])


def warm(model: nn.Module, sample: Mapping[str, Any] | None = None) -> None:
    """Makes the variants of ordinary calls ahead of time."""
    if any(generated.inline for _, generated in installation_of(model).regions):
        precompile(model, sample)
