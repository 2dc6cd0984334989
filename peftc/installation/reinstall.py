"""Changes which specs a model has, all or nothing: what stays keeps its parameters, what comes gets
new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peftc.forms.tasked_module import Chosen
from peftc.installation.builder import InstallationBuilder
from peftc.installation.completeness import ORIGINALS, module_at
from peftc.installation.edited_classes import strip
from peftc.installation.journal import Journal, transaction
from peftc.installation.overlay import common_rows, true_parameter
from peftc.installation.record import Installation, InstalledSpec, installation_of
from peftc.installation.snapshot import Snapshot, TrainedParameters
from peftc.planning.planner import PlanResult
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.assembly import regions_of
from peftc.specialization.precompile import precompile

Step = Callable[[nn.Module], object]


def reinstall(
    model: nn.Module,
    specs: tuple[InstalledSpec, ...],
    planned: PlanResult,
    structure: ModelStructure,
    *,
    sample: Mapping[str, Any] | None,
    tasks: tuple[str, ...],
    requires_grad: Mapping[str, bool] | None = None,
    values: Mapping[str, Tensor] | None = None,
    finish: Step | None = None,
    journal: Journal | None = None,
) -> None:
    """Leaves the model with `specs`, planned together as `planned`, and with no other edits.

    The base is frozen by the first spec; later ones change no `requires_grad` but those of what
    they train.
    Args: as `CompiledModel.set_specs`. `finish` may be interrupted; it writes values of new
    parameters.
    """
    before = Snapshot(model)
    trained = TrainedParameters(before, planned)
    flags = dict(requires_grad or before.base_requires_grad)
    chosen = Chosen(tasks, before.choice)
    installation = Installation(specs, planned, [], flags, trained.originals, {}, chosen, sample)
    builder = InstallationBuilder(model, installation, before.forms, (edited.cls for edited in before.modules))
    with transaction(journal) as (own, deferral):
        own.steps += [before.attach, trained.undo, builder.undo]
        before.detach()
        with deferral.interruptible():
            builder.prepare(regions_of(planned.site_edits, structure))
        builder.apply()
        trained.set_requires_grad()
        with deferral.interruptible():
            warm(model, sample)
            if finish is not None:
                finish(model)
        write_base(model, values or {}, own)
        forget_task(model)


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
    """Whether the module at this place is the one whose parameter `train` named: it may have been
    replaced.
    """
    module = module_at(model, name.rpartition(".")[0])
    return module is not None and ORIGINALS in vars(module)


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


def forget_task(model: nn.Module) -> None:
    """Takes back `set_task` where the model no longer has the task."""
    task = installation_of(model).task
    default = task.variable.default
    if default.task is not None and default.task not in task.names:
        task.variable.default = replace(default, task=None)
