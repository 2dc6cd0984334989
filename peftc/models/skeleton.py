"""Builds skeletons, models of fake tensors without memory for weights, and checks that they run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.configs import error_summary, paused_gc
from peftc.models.resolve import ModelSource
from peftc.models.sample import sample_inputs


def skeleton(source: ModelSource) -> nn.Module:
    """The model of `source` with fake tensors, in eval mode; call it inside `fake_mode(skeleton)`.

    A module is copied in at least float32: code that guards half precision reads values.
    Raises: P506 if the configuration's values do not fit together.
    """
    if source.module is not None:
        return fake_copy(source.module, widen=True, whole=True)
    assert source.model_class is not None
    assert source.config is not None
    try:
        # As in `from_pretrained`, the meta device skips initialisation, and weights are tied.
        with paused_gc(), torch.device("meta"):
            model = source.model_class(source.config).eval()
    except Exception as error:  # a model's __init__ raises whatever its own checks raise
        message = f"{source.model_class.__name__} cannot be built from the configuration of {source.id}"
        raise PeftcError(Diagnostic("P506", message, notes=(error_summary(error),))) from error
    if source.untied_head:
        # Some config classes force `tie_word_embeddings` to True. `from_pretrained` unties them if
        # the checkpoint holds two matrices; a skeleton has no checkpoint. Seen in: T5.
        head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
        if isinstance(head, nn.Module) and isinstance(weight, torch.Tensor) and head.weight is weight:
            head.weight = nn.Parameter(torch.empty_like(weight))
    return fake_copy(model)


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
        arguments = f"its forward takes {join_names(list(inspect.signature(fake.forward).parameters))}"
        notes = (error_summary(error), arguments)
        diagnostic = Diagnostic("P509", f"{source.id} does not run on the given sample", notes=notes)
        if sample is None:
            message = f"{source.id} does not run on the sample that was made from its configuration"
            diagnostic = Diagnostic("P507", message, notes=notes, help="give a sample: `sample={name: tensor}`")
        raise PeftcError(diagnostic) from error
