"""Builds skeletons: models of fake tensors, which take no memory for weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.tensors import fake_copy
from peftc.models.configs import error_summary
from peftc.models.resolve import ModelSource


def skeleton(source: ModelSource) -> nn.Module:
    """The model of `source` with fake tensors, in eval mode; call it inside `fake_mode(skeleton)`.

    A module that exists is copied in at least float32: code that guards half precision reads
    values.
    Raises: P506 if the configuration's values do not fit together.
    """
    if source.module is not None:
        return fake_copy(source.module, widen=True, whole=True)
    assert source.model_class is not None
    assert source.config is not None
    model = _on_meta(source.model_class, source.config, source.id)
    if source.untied_head:
        _untie_head(model)
    return fake_copy(model)


def _on_meta(cls: type[PreTrainedModel], config: PretrainedConfig, name: str) -> PreTrainedModel:
    # As in `from_pretrained`, building on the meta device skips initialisation and ties weights.
    try:
        with paused_gc(), torch.device("meta"):
            return cls(config).eval()
    except Exception as error:  # a model's __init__ raises whatever its own checks raise
        message = f"{cls.__name__} cannot be built from the configuration of {name}"
        raise PeftcError(Diagnostic("P506", message, notes=(error_summary(error),))) from error


def _untie_head(model: PreTrainedModel) -> None:
    # Some config classes force `tie_word_embeddings` to True. `from_pretrained` unties them if
    # the checkpoint holds two matrices; a skeleton has no checkpoint. Seen in: T5.
    head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
    if isinstance(head, nn.Module) and isinstance(weight, torch.Tensor) and head.weight is weight:
        head.weight = nn.Parameter(torch.empty_like(weight))
