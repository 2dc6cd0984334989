"""A model without weights: every module there, every tensor fake."""

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
    """The model of `source` with fake tensors, in eval mode; of a module in memory, a fake copy in at
    least float32: code that guards half precision looks at values, and a skeleton has none.

    `fake_mode(skeleton)` is the mode to call it in. Costs no memory for weights, and time by the number of modules.

    Raises: P506 where the configuration's values do not fit together.
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
    # Built on the meta device, as `from_pretrained` does: initialisation is skipped, tied weights are tied.
    try:
        with paused_gc(), torch.device("meta"):
            return cls(config).eval()
    except Exception as error:  # a model's __init__ raises whatever its own checks raise
        message = f"{cls.__name__} cannot be built from the configuration of {name}"
        raise PeftcError(Diagnostic("P506", message, notes=(error_summary(error),))) from error


def _untie_head(model: PreTrainedModel) -> None:
    # Some config classes set `tie_word_embeddings` to True whatever they were given. `from_pretrained` then finds two
    # different matrices in the checkpoint and leaves them apart; a skeleton has to be told.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weight = embedding.weight
    if isinstance(head, nn.Module) and isinstance(weight, torch.Tensor) and head.weight is weight:
        head.weight = nn.Parameter(torch.empty_like(weight))
