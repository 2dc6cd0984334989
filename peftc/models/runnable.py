"""Whether a model runs at all, asked when it could not be traced."""

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
from peftc.models.configs import first_line
from peftc.models.resolve import ModelSource
from peftc.models.sample import sample_inputs
from peftc.models.skeleton import skeleton


def checked(sample: object) -> None:
    """Raises: P545 where a sample is not the keyword arguments of a forward."""
    if sample is not None and not (isinstance(sample, Mapping) and all(isinstance(k, str) for k in sample)):  # pyright: ignore[reportUnknownVariableType]
        message = f"a sample is a dictionary of the forward's arguments, not a {type(sample).__name__}"
        raise PeftcError(Diagnostic("P545", message, help='write `sample={"name": tensor}`'))


def refuse_what_does_not_run(source: ModelSource, sample: Mapping[str, Any] | None) -> None:
    """Raises: P507 where the model does not run on inputs made for it, P509 where it does not run on its sample or cannot be
    copied. Returns where it does run.
    """
    try:
        fake = skeleton(source).eval()
    except PeftcError:
        raise
    except Exception as error:  # whatever copying an attribute of a module raises
        message = f"{source.id} cannot be copied without its data, which is how it is looked at"
        raise PeftcError(Diagnostic("P509", message, notes=(first_line(error),))) from error
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
    takes = f"its forward takes {join_names(list(inspect.signature(model.forward).parameters))}"
    if sample is None:
        message = f"no sample input on which {source.id} runs can be made from its configuration"
        return Diagnostic("P507", message, notes=(first_line(error), takes), help="give one: `sample={name: tensor}`")
    message = f"{source.id} does not run on the sample that was given"
    return Diagnostic("P509", message, notes=(first_line(error), takes))
