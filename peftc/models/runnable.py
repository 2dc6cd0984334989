"""Finds out why a model could not be traced: whether it runs at all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_mode
from peftc.models.configs import error_summary
from peftc.models.resolve import ModelSource
from peftc.models.sample import sample_inputs
from peftc.models.skeleton import skeleton


def check_sample(sample: object) -> None:
    """Raises: P545 if a sample is not the keyword arguments of a forward."""
    if sample is not None and not (isinstance(sample, Mapping) and all(isinstance(k, str) for k in sample)):  # pyright: ignore[reportUnknownVariableType]
        message = f"a sample is a dictionary of the forward's arguments, not a {type(sample).__name__}"
        raise PeftcError(Diagnostic("P545", message, help='write `sample={"name": tensor}`'))


def check_runs(source: ModelSource, sample: Mapping[str, Any] | None) -> None:
    """Raises: P507 if the model does not run on inputs made for it; P509 if not on `sample`."""
    try:
        fake = skeleton(source).eval()
    except PeftcError:
        raise
    except Exception as error:  # whatever copying an attribute of a module raises
        message = f"{source.id} cannot be analysed: the analysis runs on a copy without data, and copying it fails"
        raise PeftcError(Diagnostic("P509", message, notes=(error_summary(error),))) from error
    try:
        inputs = sample_inputs(fake) if sample is None else sample
        with fake_mode(fake), fake_data_answers(), torch.no_grad():
            fake(**inputs)
    except PeftcError:
        return
    except Exception as error:  # whatever the model's own code raises
        raise PeftcError(_does_not_run(source, fake, sample, error)) from error


def _does_not_run(
    source: ModelSource, model: nn.Module, sample: Mapping[str, Any] | None, error: Exception
) -> Diagnostic:
    arguments = f"its forward takes {join_names(list(inspect.signature(model.forward).parameters))}"
    notes = (error_summary(error), arguments)
    if sample is None:
        message = f"{source.id} does not run on the sample that was made from its configuration"
        return Diagnostic("P507", message, notes=notes, help="give a sample: `sample={name: tensor}`")
    return Diagnostic("P509", f"{source.id} does not run on the given sample", notes=notes)
