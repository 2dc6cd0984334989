"""The classes of edited modules: the generated one in the place of a module's own, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from peftc.concurrency.context import CHOICE
from peftc.installation.completeness import edited_modules
from peftc.installation.overlay import install_overlays, remove_overlays
from peftc.installation.record import RECORD, Installation, installation_of
from peftc.modules.instance_forward import rebind_forward, unpatched_class
from peftc.rewriting.edits import CONTAINER, SHARED
from peftc.specialization.derived_classes import replace_base
from peftc.specialization.generated_class import GeneratedClass


class EditedModule(NamedTuple):
    """A module, its generated class, and what holds the parameters of its edits."""

    module: nn.Module
    cls: GeneratedClass
    container: nn.Module

    def install(self, record: Installation) -> None:
        """Replaces the module's own code, also where a hook of the instance calls it."""
        module, generated = self.module, self.cls
        vars(module)[CHOICE] = record.choice
        if generated.cls not in type(module).__mro__:
            module.__class__ = replace_base(type(module), unpatched_class(generated.base), generated.cls)
        rebind_forward(module, generated.cls.forward)
        vars(module)["_modules"][CONTAINER] = self.container


def install_edits(
    model: nn.Module, record: Installation, modules: Iterable[EditedModule], shared: nn.Module | None
) -> None:
    """Puts edits into a model. `shared`: the forms that several sites share."""
    for edited in modules:
        edited.install(record)
    if shared is not None:
        vars(model)["_modules"][SHARED] = shared
    vars(model)[RECORD] = record
    install_overlays(model, record)


def remove_edits(model: nn.Module, modules: Iterable[EditedModule]) -> None:
    """Takes out what `install_edits` has put in, however far it has come."""
    remove_overlays(model)
    for edited in modules:
        restore_class(edited.module, edited.cls)
    vars(model)["_modules"].pop(SHARED, None)
    vars(model).pop(RECORD, None)


def restore_class(module: nn.Module, generated: GeneratedClass) -> None:
    if generated.cls in type(module).__mro__:
        module.__class__ = replace_base(type(module), generated.cls, unpatched_class(generated.base))
        rebind_forward(module, generated.base.forward)
    vars(module)["_modules"].pop(CONTAINER, None)
    vars(module).pop(CHOICE, None)


def strip(model: nn.Module, requires_grad: Mapping[str, bool] | None = None) -> nn.Module:
    """The model without edits: its own classes, nothing added; all values stay, those that `train`
    changed too.

    `requires_grad`: of its parameters then, by name; without it as it was before the first spec.
    What needs none has no gradient.
    """
    record = installation_of(model)
    flags = record.requires_grad if requires_grad is None else requires_grad
    remove_edits(model, edited_parts(model, record))
    for name, parameter in model.named_parameters():
        flag = flags.get(name, parameter.requires_grad)
        set_requires_grad(parameter, flag)
        if not flag:
            parameter.grad = None
    return model


def edited_parts(model: nn.Module, record: Installation) -> list[EditedModule]:
    """The modules of a model that have a generated class."""
    modules = [m for m in edited_modules(model, record) if hasattr(m, "_peftc_kind")]
    return [EditedModule(m, cast(Any, m)._peftc_kind, vars(m)["_modules"][CONTAINER]) for m in modules]


def set_requires_grad(parameter: torch.Tensor, flag: bool) -> None:
    """`requires_grad_`, also of parameters that an offload hook made inside of `inference_mode`."""
    if parameter.requires_grad != flag:
        with torch.inference_mode() if parameter.is_inference() else nullcontext():
            parameter.requires_grad_(flag)
