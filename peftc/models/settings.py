"""The values of a configuration that the function of a model depends on."""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

Value = bool | int | float | str | None

# Keys that cannot change what a model computes from its inputs outside of training, by reason.
_NAMES = """
    architectures auto_map finetuning_task id2label label2id name_or_path problem_type
    task_specific_params tokenizer_class transformers_version transformers_weights
"""
# Weights may be cast or quantised; ties are compared themselves.
_STORAGE = "dtype quantization_config tie_encoder_decoder tie_word_embeddings torch_dtype use_bfloat16"
_OUTPUTS = """
    attn_implementation chunk_size_feed_forward experts_implementation gradient_checkpointing
    output_attentions output_hidden_states output_router_logits pretraining_tp return_dict
    torchscript use_cache use_return_dict
"""  # what is returned besides the result, and how the same result is computed
# A matter of the tokenizer and the batch; users set them after loading.
_TOKENS = "bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id sep_token_id"
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores prefix remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
WITHOUT_EFFECT = frozenset(" ".join((_NAMES, _STORAGE, _OUTPUTS, _TOKENS, _GENERATION)).split())
# Dropout rates, initialisers (the weights have replaced the values) and loss terms act in
# training alone.
_TRAINING = re.compile(r"drop|loss|jitter|apply_spec_augment|mask_(time|feature)_|label_smoothing|^init_|^initializer_")


def settings(model: nn.Module) -> dict[str, Value]:
    """The values of the configuration that have an effect, by dotted key."""
    return dict(_flatten(getattr(model, "config", None)))


def defaults(model: nn.Module) -> dict[str, Value]:
    """Their defaults, as far as the config classes can be built without arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(_flatten(getattr(model, "config", None), of_class=True))


def differences(
    saved: Mapping[str, Value],
    saved_not_default: frozenset[str],
    current: Mapping[str, Value],
    current_defaults: Mapping[str, Value],
) -> Iterator[tuple[str, str, str]]:
    """Keys whose values differ, with both values as text; one on one side only may be a default."""
    for key in sorted({*saved, *current}):
        if key in saved and key in current:
            if saved[key] != current[key]:
                yield key, str(saved[key]), str(current[key])
        elif key in saved and key in saved_not_default:
            yield key, str(saved[key]), "not set"
        elif key in current and not _is_default(key, current, current_defaults):
            yield key, "not set", str(current[key])


def not_default(values: Mapping[str, Value], defaults: Mapping[str, Value]) -> frozenset[str]:
    return frozenset(key for key in values if not _is_default(key, values, defaults))


def _is_default(key: str, values: Mapping[str, Value], defaults: Mapping[str, Value]) -> bool:
    if key in defaults:
        return defaults[key] == values[key]
    # A key that its class does not have was set by somebody. If the class could not be built,
    # nobody knows.
    sections = key.split(".")[:-1]
    for depth in range(len(sections), -1, -1):
        model_type = ".".join((*sections[:depth], "model_type"))
        if model_type in values:
            return model_type not in defaults
    return not defaults


def _flatten(config: object, prefix: str = "", of_class: bool = False) -> Iterator[tuple[str, Value]]:
    for key, value in _values(config, of_class).items():
        if _has_effect(key):
            child = vars(config).get(key)  # `getattr` may refuse a value that differs between layers
            if callable(getattr(child, "to_dict", None)):
                yield from _flatten(child, f"{prefix}{key}.", of_class)
            else:
                yield from _leaves(f"{prefix}{key}", value)


def _values(config: object, of_class: bool) -> dict[str, Any]:
    if not callable(getattr(config, "to_dict", None)):
        return {}
    try:
        source: Any = type(config)() if of_class else config
        values = source.to_dict()
    except Exception:  # a class that needs arguments has no defaults
        return {}
    return cast(dict[str, Any], values) if isinstance(values, dict) else {}


def _leaves(key: str, value: object) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping) and value:
        for name, item in cast(Mapping[object, object], value).items():
            if _has_effect(str(name)):
                yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, _plain(value)


def _has_effect(key: str) -> bool:
    return not (key.startswith("_") or key in WITHOUT_EFFECT or _TRAINING.search(key))


def _plain(value: object) -> Value:
    """A value that survives JSON: 10000.0 becomes 10000, a list becomes text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if value is None or isinstance(value, bool | int | str):
        return value
    return json.dumps(value, default=str, sort_keys=True)
