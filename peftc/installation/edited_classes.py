"""The classes of edited modules: the generated one in the place of a module's own, and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from peftc.concurrency.context import CHOICE
from peftc.installation.completeness import edited_modules
from peftc.installation.overlay import remove_overlays
from peftc.installation.record import RECORD, installation_of
from peftc.modules.instance_forward import rebind_forward, unpatched_class
from peftc.rewriting.container import CONTAINER, SHARED
from peftc.specialization.derived_classes import replace_base
from peftc.specialization.generated_class import GeneratedClass


def install_class(module: nn.Module, generated: GeneratedClass) -> None:
    """Replaces a module's own code, also where a hook of the instance calls it."""
    if generated.cls not in type(module).__mro__:
        module.__class__ = replace_base(type(module), unpatched_class(generated.base), generated.cls)
    rebind_forward(module, generated.cls.forward)


def restore_class(module: nn.Module, generated: GeneratedClass) -> None:
    if generated.cls in type(module).__mro__:
        module.__class__ = replace_base(type(module), generated.cls, unpatched_class(generated.base))
        rebind_forward(module, generated.base.forward)
    vars(module)["_modules"].pop(CONTAINER, None)
    vars(module).pop(CHOICE, None)


def clear(model: nn.Module) -> None:
    vars(model)["_modules"].pop(SHARED, None)
    vars(model).pop(RECORD, None)


def strip(model: nn.Module, requires_grad: Mapping[str, bool] | None = None) -> nn.Module:
    """The model without edits: its own classes, nothing added; all values stay, those that `train`
    changed too.

    `requires_grad`: of its parameters then, by name; without it as it was before the first spec.
    What needs none has no gradient.
    """
    flags = installation_of(model).requires_grad if requires_grad is None else requires_grad
    remove_overlays(model)
    for module in edited_modules(model, installation_of(model)):
        restore_class(module, cast(Any, module)._peftc_kind)
    clear(model)
    for name, parameter in model.named_parameters():
        flag = flags.get(name, parameter.requires_grad)
        set_requires_grad(parameter, flag)
        if not flag:
            parameter.grad = None
    return model


def set_requires_grad(parameter: torch.Tensor, flag: bool) -> None:
    """`requires_grad_`, also of parameters that an offload hook made inside of `inference_mode`."""
    if parameter.requires_grad != flag:
        with torch.inference_mode() if parameter.is_inference() else nullcontext():
            parameter.requires_grad_(flag)
