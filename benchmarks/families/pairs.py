"""All model types: the auto mappings of the installed transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAPPINGS: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio-classification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}


@dataclass(frozen=True)
class Pair:
    """A model type in one auto mapping. `model` is the first class that the mapping names for
    it.
    """

    mapping: str
    type: str
    model: str

    @property
    def key(self) -> str:
        return f"{self.mapping}/{self.type}"

    @property
    def config_class(self) -> type[PretrainedConfig]:
        return CONFIG_MAPPING[self.type]

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.model)


def pairs() -> Iterator[Pair]:
    """Every (mapping, model type), in the order of the mappings."""
    for mapping in MAPPINGS:
        for model_type in MAPPINGS[mapping]:
            yield pair_of(mapping, model_type)


def pair_of(mapping: str, model_type: str) -> Pair:
    names = MAPPINGS[mapping][model_type]
    return Pair(mapping, model_type, names if isinstance(names, str) else names[0])
